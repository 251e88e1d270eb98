"""How long the target's steps take: measured as real steps of an engine of its own, on the model that serves.

Every point is one step of many sequences, each with a window of one token or of a few with drafts after it,
or of a prompt of which one token needs logits. KV of what is cached is not computed but taken as it lies:
what is in it does not change how long a step takes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from specdecode.calibrations import Key, keep, kept_or_measured, key_of
from specdecode.config import CalibrationMode
from specdecode.cost_tables import Calibration, StepCosts, StepSample
from specdecode.errors import InvalidArgumentError
from specdecode.lm.pretended import PretendedKV
from specdecode.lm.runner import PagedLM
from specdecode.measuring import InterleavedMedians, Runner, StoppedError, never, run_logged
from specdecode.types import (
    MAX_DRAFT_TOKENS,
    DecodeFrame,
    Lease,
    Method,
    OpenSequence,
    SamplingParams,
    Verify,
)
from target_service.engine import Engine
from target_service.scheduler import SchedulerLimits

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens in flight."""
CONTEXTS = (16, 256, 1024)
"""Cached tokens of each sequence."""
_WINDOW = 4
"""Tokens of a window with drafts, where more are not needed to reach a size."""
_ALL_SIZES_CONTEXT = 16
_LONG_CONTEXT_SIZES = (1, 4, 16, 64, 128)
_PROMPT_SIZES = (16, 64, 256)
_MAX_TOKENS = MAX_DRAFT_TOKENS + 2
_SPARE_BLOCKS = 2
"""Of each sequence: the scheduler admits none without."""


@dataclass(frozen=True)
class StepShape:
    """One step to be measured.

    Attributes:
        tokens: in flight.
        windows: sequences that they are dealt out to.
        context: cached tokens of each.
        is_prompt: whether they are one sequence's prompt, of which only the last token needs logits.
    """

    tokens: int
    windows: int
    context: int
    is_prompt: bool = False


def step_shapes(lm: PagedLM, limits: SchedulerLimits) -> list[StepShape]:
    """What this pool and these limits allow, the cheapest first."""
    found: set[StepShape] = set()
    for context in CONTEXTS:
        sizes = SIZES if context == _ALL_SIZES_CONTEXT else _LONG_CONTEXT_SIZES
        for tokens in (size for size in sizes if size <= limits.max_tokens_in_flight):
            found.update(_decoding(lm, limits, tokens, context))
    longest = min(limits.prefill_chunk, lm.max_length - _MAX_TOKENS, limits.max_tokens_in_flight)
    found.update(StepShape(size, 1, 0, is_prompt=True) for size in _PROMPT_SIZES if size <= longest)
    return sorted(found, key=lambda shape: (shape.tokens + shape.windows * shape.context / 64, shape.windows))


def _decoding(lm: PagedLM, limits: SchedulerLimits, tokens: int, context: int) -> Iterator[StepShape]:
    """Windows of one token each and of a few, or of as many as it takes where sequences are few."""
    if context + _MAX_TOKENS > lm.max_length:
        return
    for width in (1, _WINDOW):
        pool = lm.pool
        room = min(pool.num_blocks // (pool.blocks_for(context + width) + _SPARE_BLOCKS), limits.max_running)
        windows = min(-(-tokens // width), room)
        widest = -(-tokens // max(windows, 1))
        fits = pool.blocks_for(context + widest) + _SPARE_BLOCKS <= pool.num_blocks // max(windows, 1)
        if windows and fits and widest <= MAX_DRAFT_TOKENS + 1:
            yield StepShape(tokens, windows, context)


class StepMeasurement:
    """Measures the steps of a model whose pool nobody else uses meanwhile; after every `advance` all of it is
    free again, and the prefix cache knows nothing of it. A `specdecode.measuring.Work`.

    Args:
        lm: the target.
        limits: bounds of a step.
        seconds: budget.
        clock: seconds, for steps and budget.

    Raises:
        InvalidArgumentError: no budget, or a pool that does not hold two steps of different sizes.
    """

    def __init__(
        self,
        lm: PagedLM,
        limits: SchedulerLimits,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        shapes = step_shapes(lm, limits)
        if len({shape.tokens for shape in shapes}) < 2:
            raise InvalidArgumentError.of(
                "num_blocks", f"{lm.pool.num_blocks} KV blocks hold no steps that could be measured"
            )
        self._lm = lm
        self._engine = Engine(lm, limits, torch.Generator().manual_seed(0), clock)
        self._random = random.Random(0)
        self._number = 0
        self._pretended = PretendedKV(lm)
        self._seen: dict[StepShape, tuple[int, int, int]] = {}
        self._medians = InterleavedMedians(shapes, self._measure, seconds, clock)

    @property
    def progress(self) -> float:
        """Share that is done; 1 at the end."""
        return self._medians.progress

    def advance(self) -> None:
        """Measures one step."""
        self._medians.advance()

    def costs(self) -> StepCosts:
        """Table and fit through what is measured."""
        medians = self._medians.medians()
        return StepCosts.of_samples(
            [StepSample(*self._seen[shape], s, shape.windows) for shape, s in medians.items()]
        )

    def _measure(self, shape: StepShape) -> float:
        try:
            numbers = self._open_prompt(shape) if shape.is_prompt else self._open_windows(shape)
            load = self._engine.step().load
        finally:
            self._close_all()
        if load.tokens_in_flight != shape.tokens:
            raise AssertionError(f"{load.tokens_in_flight} tokens ran of {shape} ({len(numbers)} sequences)")
        self._seen[shape] = (load.tokens_in_flight, load.num_rows, load.num_cached_tokens)
        return load.step_seconds

    def _open_prompt(self, shape: StepShape) -> list[int]:
        number = self._open(shape.tokens)
        self._engine.apply(0, DecodeFrame(leases=(Lease(number, shape.tokens, 1),)))
        return [number]

    def _open_windows(self, shape: StepShape) -> list[int]:
        numbers = [self._open(shape.context + 1) for _ in range(shape.windows)]
        self._pretended.fill((s.kv for s in self._engine.sequences.values()), shape.context)
        self._engine.step()  # admits them all, and runs nothing: nothing is ordered
        least, wider = divmod(shape.tokens, shape.windows)
        orders = tuple(
            Verify(number, shape.context + 1, self._tokens(least - (index >= wider)))
            for index, number in enumerate(numbers)
        )
        self._engine.apply(0, DecodeFrame(verifies=orders))
        return numbers

    def _open(self, num_tokens: int) -> int:
        """Half of the sequences are greedy, half are sampled."""
        self._number += 1
        greedy = len(self._engine.sequences) % 2 == 0
        sampling = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=_MAX_TOKENS)
        method = Method.GREEDY if greedy else Method.REJECTION
        # A salt for each: none waits for another's prefix, and no request ever finds one.
        salt = b"calibration" + self._number.to_bytes(8, "little")
        tokens = self._tokens(num_tokens)
        opened = OpenSequence(self._number, tokens, num_tokens, sampling, method, cache_salt=salt)
        self._engine.apply(0, DecodeFrame(opens=(opened,)))
        return self._number

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._lm.model.vocab_size), k=count))

    def _close_all(self) -> None:
        self._pretended.forget(s.kv for s in self._engine.sequences.values())
        self._engine.close_stream(0)


def target_key(engine: Engine) -> Key:
    """What a calibration of this engine holds for."""
    return key_of(
        "target",
        engine.lm.model,
        block_size=engine.lm.pool.block_size,
        max_tokens_in_flight=engine.limits.max_tokens_in_flight,
    )


def calibration_of(
    engine: Engine,
    seconds: float,
    refresh: bool,
    run: Runner = run_logged,
    stopped: Callable[[], bool] = never,
) -> Calibration:
    """The engine's costs as they are kept for it, or measured now, while no sequence is open.

    Args:
        engine: stays as it is.
        seconds: budget of measuring.
        refresh: measure in any case.
        run: shows how far it is.
        stopped: whether to give up waiting for another process that measures.

    Raises:
        InvalidArgumentError: no budget, or nothing that could be measured.
        StoppedError: given up.
    """
    key = target_key(engine)
    return kept_or_measured(key, lambda: _measure(engine, key, seconds, run), refresh, stopped)


def _measure(engine: Engine, key: Key, seconds: float, run: Runner) -> Calibration:
    work = StepMeasurement(engine.lm, engine.limits, seconds)
    run(work, f"measuring how long steps of {engine.lm.model.name} take (up to {seconds:g} s)")
    costs = work.costs()
    logger.info(
        "a step takes %.1f ms and %.3f ms a token: as much at %.0f tokens in flight; typical error %.0f %%",
        *(1e3 * costs.base_seconds, 1e3 * costs.token_seconds, costs.ridge, 100 * costs.residual),
    )
    return Calibration(key, costs)


def calibrate(
    engine: Engine, mode: CalibrationMode, seconds: float, stopped: Callable[[], bool] = never
) -> None:
    """Gives the engine its costs: those that are kept for it, or measured now; none where that is off,
    impossible or stopped.
    """
    if mode == "off":
        return
    try:
        run = partial(run_logged, stopped=stopped)
        found = calibration_of(engine, seconds, mode == "refresh", run, stopped)
    except StoppedError:
        return
    except InvalidArgumentError as error:
        logger.warning("steps can't be measured, costs stay unknown: %s", error.message)
        return
    assert found.step is not None
    engine.meter.match.measured(found.step)


class Recalibration:
    """Measures an engine's steps again once the costs no longer fit, one by one while nothing else is to do.

    Args:
        engine: calibrated.
        seconds: budget.
        clock: seconds, for the measured steps.
    """

    def __init__(
        self, engine: Engine, seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine = engine
        self._seconds = seconds
        self._clock = clock
        self._work: StepMeasurement | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is something to measure; no sequence may be open then."""
        return self._work is not None or self._engine.meter.match.is_stale

    def advance(self) -> StepCosts | None:
        """Measures one step; the new costs after the last one, which the engine has from then on."""
        if self._work is None:
            logger.info("steps took another time than they should have; measuring again while idle")
            self._work = StepMeasurement(self._engine.lm, self._engine.limits, self._seconds, self._clock)
        self._work.advance()
        if self._work.progress < 1:
            return None
        costs, self._work = self._work.costs(), None
        self._engine.meter.match.measured(costs)
        keep(Calibration(target_key(self._engine), costs))
        logger.info("measured again: the ridge is at %.0f tokens in flight", costs.ridge)
        return costs
