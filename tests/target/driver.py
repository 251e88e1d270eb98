"""A router's side of an engine called in process: opens, orders, results, and what holds after a step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdecode.lm.runner import PagedLM
from specdecode.types import (
    DecodeFrame,
    FinishReason,
    Lease,
    Method,
    OpenSequence,
    Origin,
    SamplingParams,
    SparseDistributions,
    StepResult,
    Verify,
)
from target_service.engine import Engine
from target_service.scheduler import SchedulerLimits
from target_service.sequence import SequenceKey, TargetSequence
from tests.lm.tiny import VOCAB_SIZE, paged_model

STREAM = 1
Order = OpenSequence | Verify | Lease | int
"""An int closes."""


def make_engine(
    name: str = "llama", num_blocks: int = 64, limits: SchedulerLimits | None = None, **options: Any
) -> Engine:
    """An engine with an empty pool over a tiny model."""
    return Engine(PagedLM(paged_model(name), num_blocks), limits, **options)


def opening(sequence: int, prompt: Iterable[int], output: Iterable[int] = (), **options: Any) -> OpenSequence:
    """An Open; sampling parameters and fields of OpenSequence by name, greedy unless said otherwise."""
    prompt = tuple(prompt)
    fields = OpenSequence.__dataclass_fields__
    own = {name: options.pop(name) for name in list(options) if name in fields}
    sampling = SamplingParams(**{"temperature": 0.0, **options})
    own.setdefault("method", Method.GREEDY if sampling.temperature == 0 else Method.COUPLED)
    return OpenSequence(sequence, (*prompt, *output), len(prompt), sampling, **own)


def frame_of(orders: Iterable[Order]) -> DecodeFrame:
    """One frame with all orders."""
    orders = tuple(orders)
    return DecodeFrame(
        tuple(order for order in orders if isinstance(order, OpenSequence)),
        tuple(order for order in orders if isinstance(order, Verify)),
        tuple(order for order in orders if isinstance(order, Lease)),
        tuple(order for order in orders if isinstance(order, int)),
    )


def one_hot_q(drafted: Iterable[int]) -> SparseDistributions:
    """q of drafts that were certain."""
    ids = np.array(list(drafted), dtype=np.int32)
    return SparseDistributions(np.ones_like(ids), ids, np.ones(len(ids), dtype=np.float32))


class Client:
    """One stream's view of an engine.

    Attributes:
        results: everything that came, by sequence.
    """

    def __init__(self, engine: Engine, stream: int = STREAM) -> None:
        self.engine = engine
        self.stream = stream
        self.results: dict[int, list[StepResult]] = defaultdict(list)
        self._opened: dict[int, OpenSequence] = {}

    def send(self, *orders: Order) -> None:
        """Gives the engine one frame."""
        for order in orders:
            if isinstance(order, OpenSequence):
                self._opened.setdefault(order.sequence, order)
        self.engine.apply(self.stream, frame_of(orders))

    def step(self) -> dict[int, StepResult]:
        """One step, its invariants checked; this stream's results."""
        outcome = self.engine.step()
        check(self.engine)
        own = {key.sequence: result for key, result in outcome.results if key.stream == self.stream}
        for sequence, result in own.items():
            self.results[sequence].append(result)
            self._check_result(sequence, result)
        return own

    def settle(self, max_steps: int = 300) -> None:
        """Steps until there is nothing to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def run(self, order: Callable[[int], Verify | Lease], max_steps: int = 3000) -> None:
        """Orders for every due sequence and steps until all have ended."""
        for _ in range(max_steps):
            self.send(*(order(n) for n in self.open if not self.state(n).ready))
            self.step()
            if not self.open:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    @property
    def open(self) -> list[int]:
        """Sequences that the engine knows."""
        return [key.sequence for key in self.engine.sequences if key.stream == self.stream]

    def lease(self, sequence: int, num_tokens: int) -> Lease:
        """A lease from where the sequence is."""
        return Lease(sequence, self.length(sequence), num_tokens)

    def verify(self, sequence: int, *drafted: int, q: SparseDistributions | None = None) -> Verify:
        """A round from where the sequence is."""
        return Verify(sequence, self.length(sequence), drafted, q)

    def state(self, sequence: int) -> TargetSequence:
        """The engine's own record of an open sequence."""
        return self.engine.sequences[SequenceKey(self.stream, sequence)]

    def tokens(self, sequence: int) -> list[int]:
        """Everything emitted."""
        return [token for result in self.results[sequence] for token in result.token_ids]

    def length(self, sequence: int) -> int:
        """Committed length as the results tell it."""
        return len(self._opened[sequence].token_ids) + len(self.tokens(sequence))

    def ended(self, sequence: int) -> bool:
        """Whether a result said that it is over."""
        return any(result.ended for result in self.results[sequence])

    def last(self, sequence: int) -> StepResult:
        """The newest result."""
        return self.results[sequence][-1]

    def _check_result(self, sequence: int, result: StepResult) -> None:
        if result.error is not None:
            return
        opened = self._opened[sequence]
        assert result.committed_length == self.length(sequence)
        assert result.committed_length <= opened.num_prompt_tokens + opened.sampling.max_tokens
        assert len(result.origins) == len(result.token_ids) >= 1
        assert result.origins.count(Origin.ACCEPTED) == result.num_accepted <= result.num_drafted
        assert Origin.ACCEPTED not in result.origins[result.num_accepted :]
        assert len(result.tested) == len(result.passed) == result.num_drafted
        wanted = 0 if opened.sampling.logprobs is None else len(result.token_ids)
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids[:wanted])
        if result.finish_reason is FinishReason.STOP:
            assert result.token_ids[-1] in opened.sampling.stop_token_ids


class Drafter:
    """Drafts that are right, half right, wrong or random, made knowing what the target will say.

    Args:
        texts: what each sequence will be continued with.
    """

    def __init__(self, client: Client, texts: Mapping[int, Sequence[int]], kind: str = "half right") -> None:
        self._client = client
        self._texts = texts
        self._kind = kind
        self._random = random.Random(1)

    def verify(self, sequence: int, num_draft_tokens: int) -> Verify:
        """A round from where the sequence is."""
        done = len(self._client.tokens(sequence))
        right = list(self._texts[sequence][done : done + num_draft_tokens])
        right += [0] * (num_draft_tokens - len(right))
        return self._client.verify(sequence, *map(self._draft, right))

    def any_order(self, sequence: int) -> Verify | Lease:
        """A round of some γ, or a lease."""
        if self._random.random() < 0.25:
            return self._client.lease(sequence, self._random.randint(1, 4))
        return self.verify(sequence, self._random.randint(0, 8))

    def _draft(self, right: int) -> int:
        match self._kind:
            case "right":
                return right
            case "half right":
                return right if self._random.random() < 0.5 else (right + 1) % VOCAB_SIZE
            case "wrong":
                return (right + 1) % VOCAB_SIZE
            case _:
                return self._random.randrange(VOCAB_SIZE)


def check(engine: Engine) -> None:
    """What holds after every step."""
    engine.check_integrity()
    size = engine.lm.pool.block_size
    for sequence in engine.sequences.values():
        kv = sequence.kv
        assert kv.kv_len <= kv.committed_length - 1
        if sequence.num_output > len(sequence.opened.token_ids) - sequence.opened.num_prompt_tokens:
            computed = sequence in engine.scheduler.running and not sequence.num_preemptions
            assert not computed or kv.kv_len == kv.committed_length - 1
        assert len(kv.block_table) * size - kv.kv_len < size, "more than one block is wasted"
