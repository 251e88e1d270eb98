"""Many answers of one model at once: its tokens, and the final hidden state that each was chosen from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecode.lm.runner import Chunk, PagedLM
from specdecode.lm.sequence import KVSequence
from specdecode.sampling import inverse_cdf

_PREFILL_TOKENS = 1024
"""Prompt tokens that one step computes at most, unless a single prompt is longer."""

_CACHE_ROWS = 8
"""Rows of logits handled at once: passes over them stay in a CPU's cache."""

Advanced = Callable[[int, float], None]
"""Told how many tokens a step wrote, and about what share of everything is done."""


@dataclass(frozen=True)
class Order:
    """One text to write.

    Attributes:
        index: names the order and decides its random numbers.
        token_ids: the prompt.
        temperature: 0 is greedy.
        max_tokens: the answer ends here at the latest.
    """

    index: int
    token_ids: tuple[int, ...]
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Written:
    """An answer.

    Attributes:
        token_ids: [n], the end token included.
        hidden: [n, d], what the head saw when it chose each token, in the model's dtype.
        log_normaliser: [n] float32, log Σ exp(logits) at temperature 1.
    """

    order: Order
    token_ids: tuple[int, ...]
    hidden: Tensor
    log_normaliser: Tensor


@dataclass
class _Running:
    order: Order
    sequence: KVSequence
    uniforms: np.ndarray[Any, Any]
    token_ids: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    log_normalisers: list[Tensor] = field(default_factory=list)

    def written(self) -> Written:
        hidden, log_normaliser = torch.stack(self.hidden), torch.stack(self.log_normalisers)
        return Written(self.order, tuple(self.token_ids), hidden, log_normaliser)


class Writer:
    """Writes answers in a batch that is filled up as texts end.

    Args:
        lm: the model; used by nobody else meanwhile.
        stop_token_ids: ids that end an answer.
        batch_size: texts written at once.
        seed: with an order's index it decides its random numbers, whatever the batch.
    """

    def __init__(self, lm: PagedLM, stop_token_ids: Sequence[int], batch_size: int, seed: int) -> None:
        self._lm = lm
        self._stops = frozenset(stop_token_ids)
        self._batch_size = batch_size
        self._seed = seed
        self._seen: Tensor = torch.empty(0)
        lm.model.module.get_output_embeddings().register_forward_pre_hook(self._note)

    def write(
        self, orders: Sequence[Order], advanced: Advanced = lambda tokens, share: None
    ) -> Iterator[Written]:
        """Answers in the order in which they end; `advanced` hears of each step."""
        waiting = list(reversed(orders))
        running: list[_Running] = []
        try:
            while waiting or running:
                self._admit(waiting, running)
                self._step(running)
                ahead = sum(1 - len(text.token_ids) / text.order.max_tokens for text in running)
                advanced(len(running), 1 - (len(waiting) + ahead) / len(orders))
                ended = [text for text in running if self._has_ended(text)]
                running[:] = [text for text in running if not self._has_ended(text)]
                for text in ended:
                    text.sequence.release()
                    yield text.written()
        finally:
            for text in running:
                text.sequence.release()

    def _admit(self, waiting: list[Order], running: list[_Running]) -> None:
        budget = _PREFILL_TOKENS
        while waiting and len(running) < self._batch_size:
            order = waiting[-1]
            if budget < len(order.token_ids) and budget < _PREFILL_TOKENS:
                return
            sequence = self._lm.new_sequence(order.token_ids)
            sequence.adopt_prefix()
            budget -= len(sequence.missing)
            uniforms = np.random.default_rng((self._seed, order.index)).random(order.max_tokens)
            running.append(_Running(order, sequence, uniforms))
            waiting.pop()

    def _step(self, running: Sequence[_Running]) -> None:
        logits = self._lm.forward([Chunk(text.sequence, text.sequence.missing, 1) for text in running])
        hidden = self._seen.reshape(len(running), -1).cpu()
        tokens, normalisers = [], []
        for start in range(0, len(running), _CACHE_ROWS):
            rows = slice(start, start + _CACHE_ROWS)
            some = self._pick(logits[rows].float(), running[rows])
            tokens += some[0]
            normalisers.append(some[1])
        for row, (text, token, normaliser) in enumerate(
            zip(running, tokens, torch.cat(normalisers), strict=True)
        ):
            text.token_ids.append(token)
            text.hidden.append(hidden[row])
            text.log_normalisers.append(normaliser)
            text.sequence.publish()
            text.sequence.commit([token])

    def _pick(
        self,
        scores: Tensor,  # [R, V] float32
        running: Sequence[_Running],  # [R]
    ) -> tuple[list[int], Tensor]:
        """The rows' tokens, and log Σ exp of their scores [R] on the CPU."""
        tokens = scores.argmax(dim=1)
        normalisers = torch.logsumexp(scores, dim=1)
        sampled = [row for row, text in enumerate(running) if text.order.temperature > 0]
        if sampled:
            rows = torch.tensor(sampled, device=scores.device)
            heat = torch.tensor([running[row].order.temperature for row in sampled], device=scores.device)
            uniforms = [running[row].uniforms[len(running[row].token_ids)] for row in sampled]
            p = torch.softmax(scores[rows] / heat[:, None], dim=1)
            tokens[rows] = inverse_cdf(p, torch.tensor(uniforms, device=scores.device))
        return [int(token) for token in tokens.tolist()], normalisers.cpu()

    def _has_ended(self, text: _Running) -> bool:
        return text.token_ids[-1] in self._stops or len(text.token_ids) == text.order.max_tokens

    def _note(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._seen = inputs[0].detach().clone()
