"""The engine and the model drafter on models whose every distribution depends on the whole history.

An oracle's "KV" is the token stored in each slot of the real block pool, and its logits are a function of
what the block table leads to: one stale, shifted or shared slot anywhere gives another text. It costs
microseconds a token, so that whole requests can be sampled by the thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from draft_service.drafting import SequenceKey as DraftKey
from draft_service.model import DraftLimits, ModelDrafter
from specdecode.lm.model import LoadedModel
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.types import (
    DecodeFrame,
    Draft,
    DrafterKind,
    Lease,
    Method,
    OpenDraft,
    OpenSequence,
    Propose,
    SamplingParams,
    StepResult,
    Verify,
)
from target_service.engine import Engine
from target_service.scheduler import SchedulerLimits
from target_service.sequence import SequenceKey

Tokens = tuple[int, ...]
STREAM = 1
EMPTY = -1
MAX_LENGTH = 400


class Oracle:
    """Random logits after every history, always the same ones; `share` of them may be another oracle's."""

    def __init__(self, seed: int, vocab_size: int, like: Oracle | None = None, share: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self._seed, self._like, self._share = seed, like, share
        self._known: dict[Tokens, np.ndarray] = {}

    def logits(self, history: Sequence[int]) -> np.ndarray:  # [V] float32
        """Logits after `history`."""
        key = tuple(history)
        if key not in self._known:
            drawn = 1.5 * np.random.default_rng([self._seed, *key]).standard_normal(self.vocab_size)
            if self._like is not None:
                drawn = self._share * self._like.logits(key) + (1 - self._share) * drawn
            self._known[key] = drawn.astype(np.float32)
        return self._known[key]


class OracleLM(PagedLM):
    """An oracle behind the block pool.

    Attributes:
        stored: [num_blocks * block_size] token in each slot, EMPTY where nothing was stored.
    """

    def __init__(self, oracle: Oracle, num_blocks: int = 64, block_size: int = 4) -> None:
        model = LoadedModel(
            module=None,
            name="oracle",
            vocab_size=oracle.vocab_size,
            max_length=MAX_LENGTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
            layers=(),
            num_parameters=0,
        )
        super().__init__(model, num_blocks, block_size)
        self.stored = [EMPTY] * (num_blocks * block_size)
        self._oracle = oracle

    def forward_columns(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        rows = []
        for chunk in chunks:
            sequence, size = chunk.sequence, len(chunk.token_ids)
            sequence.reserve(size)
            slots = [self._slot(sequence.block_table, i) for i in range(sequence.kv_len + size)]
            for slot, token in zip(slots[sequence.kv_len :], chunk.token_ids, strict=True):
                self.stored[slot] = token
            sequence.kv_len += size
            history = [self.stored[slot] for slot in slots]
            assert EMPTY not in history, "a position is attended to that was never computed"
            rows += [
                self._oracle.logits(history[: len(slots) - i]) for i in reversed(range(chunk.num_logits))
            ]
        return torch.from_numpy(np.array(rows).reshape(-1, self.model.vocab_size))

    def _slot(self, block_table: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self.pool.block_size)
        return block_table[block] * self.pool.block_size + offset


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: Tokens
    sampling: SamplingParams
    method: Method
    seed: int = 0
    choice_index: int = 0
    trust_draft: bool = True


@dataclass
class Told:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


Drafting = Callable[[dict[int, list[int]]], dict[int, Draft]]
"""Committed tokens by request number → drafts; a request without one gets a round without."""


class Service:
    """An engine on an oracle, driven as a router would, its invariants proven after every step."""

    def __init__(
        self,
        oracle: Oracle,
        seed: int = 0,
        num_blocks: int = 64,
        limits: SchedulerLimits | None = None,
        trust_draft: bool = True,
    ) -> None:
        self.lm = OracleLM(oracle, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        self.engine = Engine(self.lm, limits, generator, trust_draft=trust_draft)

    def run(self, asked: Sequence[Asked], drafting: Drafting | None = None) -> list[Told]:
        """All requests together, by rounds of one Verify each, or one leased token for who has no draft."""
        told = [Told() for _ in asked]
        opens = tuple(
            OpenSequence(
                *(number, a.prompt, len(a.prompt), a.sampling, a.method, a.seed, a.choice_index),
                trust_draft=a.trust_draft,
            )
            for number, a in enumerate(asked)
        )
        self.engine.apply(STREAM, DecodeFrame(opens))
        due = list(range(len(asked)))
        while self.engine.sequences:
            self._order(asked, told, due, drafting)
            due = []
            for result in self.step():
                assert result.error is None
                told[result.sequence].token_ids += result.token_ids
                told[result.sequence].results.append(result)
                if not result.ended:
                    due.append(result.sequence)
        return told

    def step(self) -> list[StepResult]:
        """One step; afterwards KV is where it should be."""
        results = [result for _, result in self.engine.step().results]
        self.engine.check_integrity()
        for result in results:
            sequence = self.engine.sequences.get(SequenceKey(STREAM, result.sequence))
            if sequence is not None and result.token_ids:
                assert sequence.kv.kv_len == sequence.committed_length - 1
        return results

    def _order(
        self, asked: Sequence[Asked], told: Sequence[Told], due: Sequence[int], drafting: Drafting | None
    ) -> None:
        committed = {number: [*asked[number].prompt, *told[number].token_ids] for number in due}
        drafts = drafting(committed) if drafting is not None else {}
        verifies, leases = [], []
        for number, token_ids in committed.items():
            draft = drafts.get(number)
            if draft is not None and draft.token_ids:
                verifies.append(Verify(number, len(token_ids), draft.token_ids, draft.q))
            else:
                leases.append(Lease(number, len(token_ids), 1))
        self.engine.apply(STREAM, DecodeFrame(verifies=tuple(verifies), leases=tuple(leases)))


class OracleDrafter:
    """The real model drafter on an oracle; call it for drafts.

    With `max_turns`, drafts that take more turns than that come too late, and the round goes on without them.
    """

    def __init__(
        self,
        oracle: Oracle,
        asked: Sequence[Asked],
        num_draft_tokens: int,
        top_k: int = 64,
        seed: int = 1,
        max_turns: int | None = None,
    ) -> None:
        self.lm = OracleLM(oracle, num_blocks=64 + 8 * len(asked))
        self._drafter = ModelDrafter(self.lm, DraftLimits(top_k=top_k), torch.Generator().manual_seed(seed))
        self._num_draft_tokens = num_draft_tokens
        self._max_turns = max_turns
        self._sequences = []
        for number, a in enumerate(asked):
            order = OpenDraft(
                *(number, a.prompt, len(a.prompt), a.sampling, a.method, DrafterKind.MODEL),
                *(a.seed, a.choice_index),
            )
            self._sequences.append(self._drafter.open(DraftKey(STREAM, number), order))
        while self._drafter.busy:
            self._drafter.advance()

    def __call__(self, committed: dict[int, list[int]]) -> dict[int, Draft]:
        for number, token_ids in committed.items():
            sequence = self._sequences[number]
            known = sequence.committed_length
            sequence.propose(Propose(number, known, tuple(token_ids[known:]), self._num_draft_tokens))
        drafts: dict[int, Draft] = {}
        turns = count() if self._max_turns is None else iter(range(self._max_turns))
        while len(drafts) < len(committed) and next(turns, None) is not None:
            for answer in self._drafter.advance():
                assert answer.draft.error is None
                drafts[answer.key.sequence] = answer.draft
        return drafts
