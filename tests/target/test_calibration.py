"""Steps that are measured: what is left behind, what is kept, and when they are measured again."""

from __future__ import annotations

import itertools
import logging
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from specdecode.calibrations import find, path_of
from specdecode.cost_tables import Calibration, StepCosts
from specdecode.errors import InvalidArgumentError
from specdecode.lm.runner import PagedLM
from specdecode.types import Lease, StepFrame
from target_service.calibration import (
    Recalibration,
    StepMeasurement,
    calibrate,
    calibration_of,
    step_shapes,
    target_key,
)
from target_service.engine import Engine
from target_service.loop import EngineLoop
from target_service.scheduler import SchedulerLimits
from tests.lm.tiny import paged_model
from tests.target.driver import Client, frame_of, make_engine, opening
from tests.target.texts import GREEDY_TEXT, PROMPT

SECONDS = 60.0
"""Within which anything waited for must come."""
BUDGET = 0.3


class Ticks:
    """A clock on which every look takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))


def measurement(
    num_blocks: int = 64, limits: SchedulerLimits | None = None, seconds: float = 5.0
) -> StepMeasurement:
    lm = PagedLM(paged_model("llama"), num_blocks)
    return StepMeasurement(lm, limits or SchedulerLimits(), seconds, Ticks())


def finish(work: StepMeasurement) -> StepCosts:
    while work.progress < 1:
        work.advance()
    return work.costs()


# Measuring


def test_after_every_measured_step_the_pool_is_free_and_no_prefix_is_known() -> None:
    work = measurement()
    while work.progress < 1:
        work.advance()
        pool = work._lm.pool
        pool.check_integrity([])
        assert pool.num_free == pool.num_blocks
        assert not pool._block_of
        work._engine.check_integrity()


def test_a_request_after_measuring_says_what_it_always_says() -> None:
    engine = make_engine()
    finish(StepMeasurement(engine.lm, engine.limits, BUDGET))
    client = Client(engine)
    client.send(opening(0, PROMPT, max_tokens=40), Lease(0, len(PROMPT), 40))
    client.settle()
    assert client.tokens(0) == GREEDY_TEXT
    assert client.last(0).num_cached_tokens == 0


def test_windows_of_one_and_of_a_few_tokens_long_contexts_and_prompts_are_measured() -> None:
    samples = finish(measurement(512, seconds=60.0)).samples
    assert {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128} <= {s.tokens for s in samples}
    assert any(s.tokens == s.sequences == 16 for s in samples)
    assert any(s.tokens == 4 * s.sequences == 16 for s in samples)
    assert any(s.cached_tokens > 256 * s.sequences for s in samples)
    assert any(s.rows == 1 < s.tokens for s in samples)
    assert all(s.rows == s.tokens or s.sequences == 1 for s in samples)


def test_cached_tokens_are_counted_as_in_the_load_of_real_steps() -> None:
    samples = finish(measurement()).samples
    first = min(samples, key=lambda s: (s.tokens, s.cached_tokens))
    # 16 cached ones and the newest, whose KV the step computes.
    assert (first.tokens, first.rows, first.cached_tokens, first.sequences) == (1, 1, 17, 1)


@pytest.mark.parametrize(
    ("num_blocks", "limits"),
    [
        (64, SchedulerLimits(max_running=3)),
        (64, SchedulerLimits(max_tokens_in_flight=33)),
        (12, SchedulerLimits()),
        (40, SchedulerLimits(prefill_chunk=20)),
    ],
)
def test_what_is_measured_stays_within_pool_and_limits(num_blocks: int, limits: SchedulerLimits) -> None:
    work = measurement(num_blocks, limits)
    shapes = step_shapes(work._lm, limits)
    assert all(shape.windows <= limits.max_running for shape in shapes)
    assert all(shape.tokens <= limits.max_tokens_in_flight for shape in shapes)
    samples = finish(work).samples
    assert {s.tokens for s in samples} <= {shape.tokens for shape in shapes}
    assert len(samples) >= 4


def test_a_budget_that_is_none_and_a_pool_too_small_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="seconds"):
        measurement(seconds=-1.0)
    with pytest.raises(InvalidArgumentError, match="num_blocks: 2 KV blocks"):
        measurement(num_blocks=2)


# Kept and used again


def test_costs_are_measured_once_and_reused_by_the_next_start() -> None:
    first, second = make_engine(), make_engine()
    calibrate(first, "auto", BUDGET)
    assert first.costs is not None
    kept = path_of(target_key(first)).read_bytes()
    calibrate(second, "auto", BUDGET)
    assert second.costs == first.costs
    assert path_of(target_key(first)).read_bytes() == kept
    assert first.lm.pool.num_free == first.lm.pool.num_blocks


def test_a_round_trip_through_the_file_keeps_every_sample() -> None:
    found = calibration_of(make_engine(), BUDGET, refresh=False)
    assert found == Calibration.load(path_of(found.key))
    assert found.step is not None
    assert len(found.step.samples) > 2


def test_refresh_measures_and_rewrites() -> None:
    engine = make_engine()
    calibrate(engine, "auto", BUDGET)
    old = engine.costs
    calibrate(engine, "refresh", BUDGET)
    assert engine.costs != old
    kept = find(target_key(engine))
    assert kept is not None
    assert kept.step == engine.costs


def test_off_measures_nothing(tmp_path: Path) -> None:
    engine = make_engine()
    calibrate(engine, "off", BUDGET)
    assert engine.costs is None
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_stopped_keeps_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    engine = make_engine()
    looks = itertools.count()
    calibrate(engine, "auto", BUDGET, lambda: next(looks) == 3)
    assert next(looks) == 4
    assert engine.costs is None
    assert not list(tmp_path.glob("*/*.json"))
    assert engine.lm.pool.num_free == engine.lm.pool.num_blocks


def test_one_process_measures_at_a_time_and_a_stop_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    engine = make_engine()
    with FileLock(tmp_path / "calibration" / ".lock", is_singleton=False):
        calibrate(engine, "auto", BUDGET, lambda: True)
        assert engine.costs is None
    calibrate(engine, "auto", BUDGET)
    assert engine.costs is not None


def test_other_limits_are_another_calibration() -> None:
    engine = make_engine()
    other = make_engine(limits=SchedulerLimits(max_tokens_in_flight=64))
    assert path_of(target_key(engine)) != path_of(target_key(other))


def test_a_damaged_file_is_logged_and_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    path = path_of(target_key(engine))
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "specdecode-calibration", "version": 1, "key": {}, "step": {}}')
    calibrate(engine, "auto", BUDGET)
    assert path.name in caplog.text
    assert engine.costs is not None
    assert Calibration.load(path).step == engine.costs


def test_where_nothing_can_be_measured_the_target_goes_without_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(num_blocks=2)
    calibrate(engine, "auto", BUDGET)
    assert engine.costs is None
    assert "costs stay unknown" in caplog.text


# Measured again while idle


class Stream:
    """A router's stream to a loop."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.frames: queue.Queue[StepFrame | None] = queue.Queue()
        self.number = loop.open_stream(self.frames.put)

    def decode(self, sequence: int, num_tokens: int) -> list[int]:
        """A request from beginning to end."""
        opened = opening(sequence, PROMPT, max_tokens=num_tokens)
        self.loop.submit(self.number, frame_of([opened, Lease(sequence, len(PROMPT), num_tokens)]))
        emitted: list[int] = []
        while True:
            frame = self.frames.get(timeout=SECONDS)
            assert frame is not None
            assert frame.costs is None, "measured again while a request was open"
            for result in frame.results:
                emitted += result.token_ids
                if result.ended:
                    return emitted


Start = Callable[[Engine, Recalibration], EngineLoop]


@pytest.fixture
def start() -> Iterator[Start]:
    loops: list[EngineLoop] = []

    def start(engine: Engine, work: Recalibration) -> EngineLoop:
        loops.append(EngineLoop(engine, work))
        loops[-1].start()
        return loops[-1]

    yield start
    for loop in loops:
        loop.stop()


def with_wrong_costs() -> Engine:
    """An engine that believes its steps to take a tenth of a millisecond."""
    engine = make_engine()
    engine.meter.match.measured(StepCosts(1e-4, 1e-9))
    return engine


def test_costs_that_do_not_fit_are_measured_again_once_idle_kept_and_told(start: Start) -> None:
    engine = with_wrong_costs()
    stream = Stream(start(engine, Recalibration(engine, BUDGET)))
    stream.decode(0, 210)
    frame = stream.frames.get(timeout=SECONDS)
    assert frame.costs is not None
    assert frame.costs == engine.costs
    assert frame.results == ()
    kept = find(target_key(engine))
    assert kept is not None
    assert kept.step == frame.costs
    assert stream.decode(1, 40) == GREEDY_TEXT
    assert engine.lm.pool.num_free == engine.lm.pool.num_blocks


def test_a_request_that_comes_while_measuring_is_served_first(start: Start) -> None:
    engine = with_wrong_costs()
    work = Recalibration(engine, 3600.0)
    stream = Stream(start(engine, work))
    stream.decode(0, 210)
    for sequence in range(1, 6):
        # Fails if all of it were measured before, or between, the tokens of a request.
        assert stream.decode(sequence, 40) == GREEDY_TEXT
    frame = stream.frames.get(timeout=SECONDS)
    assert frame.costs is not None


def test_a_failure_while_measuring_again_leaves_the_service_as_it_was(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = with_wrong_costs()
    before = engine.costs
    # The budget is refused.
    stream = Stream(start(engine, Recalibration(engine, -1.0)))
    with caplog.at_level(logging.ERROR):
        stream.decode(0, 210)
        assert stream.decode(1, 40) == GREEDY_TEXT
    assert engine.costs == before
