"""Running many sequences' tokens through a paged model in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode.lm.attention import PLAN_KEYWORD, AttentionPlan, PagedKV, Span
from specdecode.lm.model import LoadedModel
from specdecode.lm.pool import BlockPool
from specdecode.lm.ranks import StepPlan
from specdecode.lm.sequence import KVSequence


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to run at positions kv_len …; the last `num_logits` of them need logits."""

    sequence: KVSequence
    token_ids: Sequence[int]
    num_logits: int


class PagedLM:
    """A model, its block pool and the KV in it.

    Args:
        model: from `load_model`.
        num_blocks: size of the pool.
        block_size: tokens a block holds.
        prefix_cache: whether full blocks are found again by their tokens.
    """

    def __init__(
        self, model: LoadedModel, num_blocks: int, block_size: int = 16, prefix_cache: bool = True
    ) -> None:
        self.model = model
        self.pool = BlockPool(num_blocks, block_size, prefix_cache)
        self.kv = PagedKV(model.layers, num_blocks, block_size, model.dtype, model.device)
        self._kernels = model.kernels_for(block_size)

    @property
    def max_length(self) -> int:
        """Longest sequence that the model and the pool can hold."""
        return min(self.model.max_length, self.pool.num_blocks * self.pool.block_size)

    def new_sequence(self, token_ids: Sequence[int], salt: bytes = b"") -> KVSequence:
        """A sequence of this pool that holds nothing yet."""
        return KVSequence(self.pool, token_ids, salt)

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Runs the chunks, stores their KV and advances each sequence's `kv_len`.

        Returns:
            [Σ num_logits, vocab_size] logits in the model's dtype, in the order of the chunks; −∞ for ids
            that the model's draft vocabulary lacks.

        Raises:
            OutOfBlocksError: the pool can't hold them; reserve before to be sure. Nothing was run.
        """
        return self.spread(self.forward_columns(chunks))

    @torch.inference_mode()
    def forward_columns(self, chunks: Sequence[Chunk]) -> Tensor:
        """`forward` without the ids that a draft vocabulary lacks.

        Returns:
            [Σ num_logits, C], a column for each id of the draft vocabulary, or of the whole one.

        Raises:
            OutOfBlocksError: the pool can't hold them; reserve before to be sure. Nothing was run.
        """
        for chunk in chunks:
            chunk.sequence.reserve(len(chunk.token_ids))
        spans = [Span(c.sequence.block_table, c.sequence.kv_len, len(c.token_ids)) for c in chunks]
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        step = StepPlan(spans, token_ids, _logit_rows(chunks))
        if self.model.ranks is not None:
            self.model.ranks.send(step)
        logits = self._run_step(step)
        for chunk in chunks:
            chunk.sequence.kv_len += len(chunk.token_ids)
        return logits[:, : self.model.num_columns]

    @torch.inference_mode()
    def follow(self) -> None:
        """Runs what rank 0 tells until it lets this rank end."""
        ranks = self.model.ranks
        assert ranks is not None
        while (step := ranks.receive()) is not None:
            self._run_step(step)

    def _run_step(self, step: StepPlan) -> Tensor:
        """Logits of the step's rows: [R, size of the head]."""
        device = self.model.device
        plan = AttentionPlan(self.kv, step.spans, device, self._kernels)
        tokens = torch.tensor(step.token_ids, device=device)
        rows = torch.tensor(step.rows, dtype=torch.long, device=device)
        return self._run(tokens, rows, plan)

    def _run(
        self,
        tokens: Tensor,  # [n] int64
        rows: Tensor,  # [R] int64
        plan: AttentionPlan,
    ) -> Tensor:
        """Logits of the tokens at `rows`: [R, size of the head]."""
        if self.model.stack is not None:
            return self.model.stack.run(tokens, rows, plan)
        output = self.model.module(
            input_ids=tokens[None],
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            **{PLAN_KEYWORD: plan},
        )
        logits: Tensor = output.logits[0]
        return logits

    def spread(
        self,
        logits: Tensor,  # [R, C]
    ) -> Tensor:
        """Columns of `forward_columns` where their ids belong, −∞ elsewhere: [R, vocab_size]."""
        token_ids, size = self.model.draft_vocabulary, self.model.vocab_size
        if token_ids is None:
            return logits
        if self.model.kernels is not None:
            return self.model.kernels.spread(logits, token_ids, size)
        return logits.new_full((len(logits), size), -torch.inf).index_copy_(1, token_ids, logits)


def _logit_rows(chunks: Sequence[Chunk]) -> list[int]:
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        rows += range(end - chunk.num_logits, end)
    return rows
