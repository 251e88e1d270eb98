"""How long drafting takes: rounds of equal γ for several sequences at once, as a loop lets a drafter work."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from draft_service.drafting import Drafter, DraftSequence, SequenceKey
from draft_service.lookup import LookupDrafter
from draft_service.model import ModelDrafter, ModelSequence
from specdecode.calibrations import Key, kept_or_measured, key_of
from specdecode.config import CalibrationMode
from specdecode.cost_tables import Calibration, DraftCosts, DraftSample
from specdecode.errors import InvalidArgumentError
from specdecode.lm.pretended import PretendedKV
from specdecode.measuring import InterleavedMedians, Runner, StoppedError, never, run_logged
from specdecode.types import DrafterKind, Method, OpenDraft, Propose, SamplingParams

logger = logging.getLogger(__name__)

DEPTHS = (1, 2, 4, 8)
"""γ."""
BATCHES = (1, 4, 16, 64)
CONTEXTS = (32, 256, 1024)
"""Committed tokens of each sequence; all but the first at one γ alone."""
_LONG_CONTEXT_DEPTH = 4
_PERIOD = 24
"""Prompts to look up in repeat themselves after so many tokens: there is always something to find."""
_LOOKUP_SHARE = 0.1
"""Of the budget, for drafters without a model where there is one with a model."""
_STREAM = -1


@dataclass(frozen=True)
class RoundShape:
    """One round to be measured: γ tokens for each of `batch` sequences of `context` tokens."""

    num_draft_tokens: int
    batch: int
    context: int


class Bench(ABC):
    """A drafter, and how to bring its sequences to where a round begins."""

    kind: DrafterKind
    single_pass: bool

    def __init__(self, drafter: Drafter, max_draft_tokens: int, max_sequences: int) -> None:
        self.drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._max_sequences = max_sequences

    @abstractmethod
    def holds(self, shape: RoundShape) -> bool:
        """Whether there is room for it."""

    @abstractmethod
    def tokens(self, length: int) -> tuple[int, ...]:
        """What a sequence of this length may consist of."""

    @abstractmethod
    def settle(self, sequences: Sequence[DraftSequence], context: int) -> None:
        """Has everything done that precedes the first Propose."""

    @abstractmethod
    def forget(self, sequences: Sequence[DraftSequence]) -> None:
        """Before they are closed: lets nobody find what they leave behind."""

    def shapes(self) -> list[RoundShape]:
        """What can be measured, the cheapest first."""
        found = [
            RoundShape(depth, batch, context)
            for context in CONTEXTS
            for depth in (DEPTHS if context == CONTEXTS[0] else (_LONG_CONTEXT_DEPTH,))
            for batch in BATCHES
            if depth <= self._max_draft_tokens and batch <= self._max_sequences
        ]
        return sorted(filter(self.holds, found), key=lambda s: s.num_draft_tokens * (8 + s.batch))


class ModelBench(Bench):
    """The model drafter; KV of what is committed is pretended."""

    kind = DrafterKind.MODEL
    single_pass = False

    def __init__(self, drafter: ModelDrafter, max_sequences: int) -> None:
        super().__init__(drafter, drafter.limits.max_draft_tokens, max_sequences)
        self._lm = drafter.lm
        self._pretended = PretendedKV(drafter.lm)
        self._random = random.Random(0)

    def holds(self, shape: RoundShape) -> bool:
        """By context and pool."""
        length = shape.context + 1 + shape.num_draft_tokens
        blocks = shape.batch * self._lm.pool.blocks_for(length)
        return length <= self._lm.max_length and blocks <= self._lm.pool.num_blocks

    def tokens(self, length: int) -> tuple[int, ...]:
        """Any."""
        return tuple(self._random.choices(range(self._lm.model.vocab_size), k=length))

    def settle(self, sequences: Sequence[DraftSequence], context: int) -> None:
        """Their prompts count as computed."""
        self._pretended.fill((s.kv for s in sequences if isinstance(s, ModelSequence)), context)
        self.drafter.advance()

    def forget(self, sequences: Sequence[DraftSequence]) -> None:
        """Takes their blocks out of the prefix cache."""
        self._pretended.forget(s.kv for s in sequences if isinstance(s, ModelSequence))


class LookupBench(Bench):
    """A drafter that looks up."""

    single_pass = True

    def __init__(
        self, kind: DrafterKind, drafter: Drafter, max_draft_tokens: int, max_sequences: int
    ) -> None:
        super().__init__(drafter, max_draft_tokens, max_sequences)
        self.kind = kind

    def holds(self, shape: RoundShape) -> bool:
        """Always."""
        return True

    def tokens(self, length: int) -> tuple[int, ...]:
        """A text that repeats itself."""
        return tuple(index % _PERIOD for index in range(length))

    def settle(self, sequences: Sequence[DraftSequence], context: int) -> None:
        """Indexes the prompts."""
        while self.drafter.busy:
            self.drafter.advance()

    def forget(self, sequences: Sequence[DraftSequence]) -> None:
        """They leave nothing behind."""


class DraftMeasurement:
    """Measures a drafter that nobody else uses meanwhile; after every `advance` it has no sequence. A
    `specdecode.measuring.Work`.

    Args:
        bench: the drafter.
        seconds: budget.
        clock: seconds.

    Raises:
        InvalidArgumentError: no budget, or no room for two different rounds.
    """

    def __init__(self, bench: Bench, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        shapes = bench.shapes()
        if len({(shape.num_draft_tokens, shape.batch) for shape in shapes}) < 2:
            raise InvalidArgumentError.of("num_blocks", "the KV pool holds no rounds that could be measured")
        self._bench = bench
        self._clock = clock
        self._number = 0
        self._medians = InterleavedMedians(shapes, self._measure, seconds, clock)

    @property
    def progress(self) -> float:
        """Share that is done; 1 at the end."""
        return self._medians.progress

    def advance(self) -> None:
        """Measures one round."""
        self._medians.advance()

    def costs(self) -> DraftCosts:
        """The fit through what is measured."""
        samples = [
            DraftSample(shape.num_draft_tokens, shape.batch, shape.batch * shape.context, seconds)
            for shape, seconds in self._medians.medians().items()
        ]
        return DraftCosts.of_samples(samples, self._bench.single_pass)

    def _measure(self, shape: RoundShape) -> float:
        tokens = self._bench.tokens(shape.context + 1)
        sequences = {}
        try:
            for index in range(shape.batch):
                self._number += 1
                order = _order(self._number, tokens[:-1], self._bench.kind, greedy=index % 2 == 0)
                sequences[self._number] = self._bench.drafter.open(SequenceKey(_STREAM, self._number), order)
            self._bench.settle(list(sequences.values()), shape.context)
            return self._round(shape, sequences, tokens[-1])
        finally:
            self._bench.forget(list(sequences.values()))
            for sequence in sequences.values():
                sequence.close()

    def _round(self, shape: RoundShape, sequences: Mapping[int, DraftSequence], token: int) -> float:
        drafter = self._bench.drafter
        began = self._clock()
        for number, sequence in sequences.items():
            sequence.propose(Propose(number, shape.context, (token,), shape.num_draft_tokens))
        answered = 0
        while answered < shape.batch:
            answers = drafter.advance()
            answered += len(answers)
            for answer in answers:
                if answer.draft.error is not None:
                    raise answer.draft.error
        return self._clock() - began


def _order(number: int, tokens: tuple[int, ...], kind: DrafterKind, *, greedy: bool) -> OpenDraft:
    """Half of the sequences are greedy, half are sampled."""
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
    method = Method.GREEDY if greedy else Method.REJECTION
    # A salt for each: none waits for another's prefix, and no request ever finds one.
    salt = b"calibration" + number.to_bytes(8, "little")
    return OpenDraft(
        number, tokens, len(tokens), sampling, method, kind, cache_salt=salt, remembers_output=False
    )


def draft_key(drafters: Mapping[DrafterKind, Drafter]) -> Key:
    """What a calibration of these drafters holds for."""
    model = drafters.get(DrafterKind.MODEL)
    offered = "+".join(sorted(kind.value for kind in drafters))
    if not isinstance(model, ModelDrafter):
        return key_of("draft", None, drafters=offered)
    drafted = model.lm.model.draft_vocabulary
    more = {"block_size": model.lm.pool.block_size, "top_k": model.limits.top_k}
    if drafted is not None:
        more["vocabulary"] = len(drafted)
    return key_of("draft", model.lm.model, drafters=offered, **more)


def benches(drafters: Mapping[DrafterKind, Drafter], max_sequences: int) -> list[Bench]:
    """Every drafter that can be measured."""
    found: list[Bench] = []
    for kind, drafter in drafters.items():
        if isinstance(drafter, ModelDrafter):
            found.append(ModelBench(drafter, max_sequences))
        elif isinstance(drafter, LookupDrafter):
            found.append(LookupBench(kind, drafter, max(DEPTHS), max_sequences))
    return found


def budgets(found: Sequence[Bench], seconds: float) -> list[float]:
    """What each bench may use of the budget."""
    lookups = sum(bench.single_pass for bench in found)
    if lookups == len(found):
        return [seconds * _LOOKUP_SHARE / lookups] * lookups
    rest = (seconds - seconds * _LOOKUP_SHARE * lookups) / (len(found) - lookups)
    return [seconds * _LOOKUP_SHARE if bench.single_pass else rest for bench in found]


def calibration_of(
    drafters: Mapping[DrafterKind, Drafter],
    max_sequences: int,
    seconds: float,
    refresh: bool,
    run: Runner = run_logged,
    stopped: Callable[[], bool] = never,
) -> Calibration:
    """The drafters' costs as they are kept, or measured now, one drafter after the other.

    Args:
        drafters: without sequences.
        max_sequences: open at once.
        seconds: budget of measuring.
        refresh: measure in any case.
        run: shows how far it is.
        stopped: whether to give up waiting for another process that measures.

    Raises:
        InvalidArgumentError: no budget, or nothing that could be measured.
        StoppedError: given up.
    """
    key = draft_key(drafters)
    measure = partial(_measure, drafters, max_sequences, key, seconds, run)
    return kept_or_measured(key, measure, refresh, stopped)


def _measure(
    drafters: Mapping[DrafterKind, Drafter], max_sequences: int, key: Key, seconds: float, run: Runner
) -> Calibration:
    found = benches(drafters, max_sequences)
    costs: dict[str, DraftCosts] = {}
    for bench, budget in zip(found, budgets(found, seconds), strict=True):
        work = DraftMeasurement(bench, budget)
        run(work, f"measuring how long drafting by {bench.kind.value} takes (up to {budget:.2g} s)")
        costs[bench.kind.value] = measured = work.costs()
        logger.info(
            "drafting by %s: 4 tokens for 1 sequence take %.2f ms, for 16 %.2f ms; typical error %.0f %%",
            *(bench.kind.value, 1e3 * measured.round([4]), 1e3 * measured.round([4] * 16)),
            100 * measured.residual,
        )
    return Calibration(key, drafts=costs)


def calibrate(
    drafters: Mapping[DrafterKind, Drafter],
    max_sequences: int,
    mode: CalibrationMode,
    seconds: float,
    stopped: Callable[[], bool] = never,
) -> dict[DrafterKind, DraftCosts]:
    """What the drafters cost: as kept, or measured now; nothing where that is off, impossible or stopped."""
    if mode == "off":
        return {}
    try:
        run = partial(run_logged, stopped=stopped)
        found = calibration_of(drafters, max_sequences, seconds, mode == "refresh", run, stopped)
    except StoppedError:
        return {}
    except InvalidArgumentError as error:
        logger.warning("drafting can't be measured, costs stay unknown: %s", error.message)
        return {}
    return {DrafterKind(name): costs for name, costs in found.drafts.items()}
