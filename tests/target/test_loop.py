"""The engine's thread: whose results go where, when a step starts, and what is left after a failure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from specdecode.errors import Reason
from specdecode.lm.model import adopt_model
from specdecode.lm.runner import PagedLM
from specdecode.types import Lease, LoadSnapshot, StepFrame, StepResult, Verify
from target_service import engine as engine_module
from target_service import frames
from target_service.engine import Engine, StepOutcome
from target_service.loop import EngineLoop, StepClock
from target_service.sequence import SequenceKey
from tests.lm.tiny import plain_model
from tests.target.driver import STREAM, Client, Order, frame_of, make_engine, opening
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, OTHER_TEXT, PROMPT, prompt_lease

SECONDS = 60.0
"""Within which anything waited for must come."""


class Stream:
    """One router's stream to a loop."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.frames: queue.Queue[StepFrame | None] = queue.Queue()
        self.number = loop.open_stream(self.frames.put)

    def send(self, *orders: Order) -> None:
        self.loop.submit(self.number, frame_of(orders))

    def next(self) -> StepFrame:
        frame = self.frames.get(timeout=SECONDS)
        assert frame is not None, "the stream has ended"
        return frame

    def has_ended(self) -> bool:
        """Whether nothing but the end is there."""
        return self.frames.get(timeout=SECONDS) is None

    def wait_until_applied(self) -> None:
        """Until the loop has taken in everything sent so far."""
        applied = threading.Event()
        self.loop._post(applied.set)
        assert applied.wait(SECONDS)

    def until_ended(self, *sequences: int) -> dict[int, list[StepResult]]:
        """Results up to the end of all these sequences."""
        results: dict[int, list[StepResult]] = {sequence: [] for sequence in sequences}
        while not all(own and own[-1].ended for own in results.values()):
            for result in self.next().results:
                results[result.sequence].append(result)
        return results


def tokens(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.token_ids]


@pytest.fixture
def start() -> Iterator[Callable[[Engine], EngineLoop]]:
    loops: list[EngineLoop] = []

    def start(engine: Engine) -> EngineLoop:
        loops.append(EngineLoop(engine))
        loops[-1].start()
        return loops[-1]

    yield start
    for loop in loops:
        loop.stop()


Start = Callable[[Engine], EngineLoop]


# Streams


def test_each_stream_gets_its_own_results(start: Start) -> None:
    loop = start(make_engine())
    mine, other = Stream(loop), Stream(loop)
    mine.send(opening(0, PROMPT, max_tokens=40), prompt_lease(40))
    other.send(opening(0, OTHER_PROMPT, max_tokens=40), Lease(0, len(OTHER_PROMPT), 40))
    assert tokens(mine.until_ended(0)[0]) == GREEDY_TEXT
    assert tokens(other.until_ended(0)[0]) == OTHER_TEXT
    assert loop.load.num_free_blocks == loop.load.num_blocks


def test_rounds_go_on_as_orders_come(start: Start) -> None:
    stream = Stream(start(make_engine()))
    stream.send(opening(0, PROMPT, max_tokens=40))
    emitted: list[int] = []
    steps = []
    while len(emitted) < 40:
        stream.send(Verify(0, len(PROMPT) + len(emitted), tuple(GREEDY_TEXT[len(emitted) :][:3])))
        frame = stream.next()
        emitted += tokens(list(frame.results))
        steps.append(frame.step)
    assert emitted == GREEDY_TEXT
    assert steps == sorted(set(steps))


def test_a_closed_stream_leaves_nothing_behind(start: Start) -> None:
    engine = make_engine()
    loop = start(engine)
    lost, other = Stream(loop), Stream(loop)
    lost.send(opening(0, PROMPT, max_tokens=40), opening(1, PROMPT, max_tokens=40), prompt_lease(30))
    lost.next()
    loop.close_stream(lost.number)
    lost.send(opening(2, PROMPT, max_tokens=40))
    other.send(opening(0, OTHER_PROMPT, max_tokens=1), Lease(0, len(OTHER_PROMPT), 1))
    other.until_ended(0)
    assert not engine.sequences
    assert engine.lm.pool.num_free == 64
    engine.check_integrity()


def test_a_deadline_wakes_an_idle_loop(start: Start) -> None:
    stream = Stream(start(make_engine()))
    stream.send(opening(0, PROMPT, max_tokens=40, deadline=time.time() + 0.3))
    (result,) = stream.until_ended(0)[0]
    assert result.error is not None
    assert result.error.reason is Reason.DEADLINE


def test_what_is_held_is_told_when_the_next_step_has_nothing_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "PIECE_SECONDS", SECONDS)
    monkeypatch.setattr(frames, "LONGEST_PIECE_SECONDS", SECONDS)
    engine = make_engine(num_blocks=8)
    loop = EngineLoop(engine)  # its steps are run here
    older, younger = Stream(loop), Stream(loop)
    older.send(opening(0, PROMPT, max_tokens=80), prompt_lease(80))
    younger.send(opening(0, OTHER_PROMPT, max_tokens=80), Lease(0, len(OTHER_PROMPT), 80))
    key = SequenceKey(younger.number, 0)
    while not (key in engine.sequences and engine.sequences[key].num_preemptions):
        assert loop._wait_for_work()
        loop._deliver(loop._step())
    told = 0
    while not younger.frames.empty():
        told += len(tokens(list(younger.next().results)))
    assert told == engine.sequences[key].num_output > 0


# Endings


def test_draining_refuses_opens_and_finishes_what_runs(start: Start) -> None:
    loop = start(make_engine())
    stream = Stream(loop)
    stream.send(opening(0, PROMPT, max_tokens=40), prompt_lease(2))
    first = list(stream.next().results)
    loop.drain()
    stream.send(opening(1, PROMPT, max_tokens=40), prompt_lease(40, 1), prompt_lease(40, 0))
    results = stream.until_ended(0, 1)
    error = results[1][0].error
    assert error is not None
    assert (error.reason, error.retry_after is not None) == (Reason.DRAINING, True)
    assert len(results[1]) == 1
    assert tokens(first + results[0]) == GREEDY_TEXT
    assert stream.has_ended()


def test_a_drained_stream_ends_when_its_last_sequence_is_closed(start: Start) -> None:
    loop = start(make_engine())
    stream, idle = Stream(loop), Stream(loop)
    stream.send(opening(0, PROMPT, max_tokens=40), opening(1, PROMPT, max_tokens=40), prompt_lease(1))
    stream.next()
    loop.drain()
    assert idle.has_ended()
    stream.send(0)
    stream.wait_until_applied()
    assert stream.frames.empty()
    stream.send(1)
    assert stream.has_ended()


@pytest.mark.parametrize("busy", [False, True])
def test_stop_joins_the_thread(busy: bool) -> None:
    loop = EngineLoop(make_engine())
    loop.start()
    stream = Stream(loop)
    if busy:
        stream.send(opening(0, PROMPT, max_tokens=400), prompt_lease(400))
        stream.next()
    loop.stop()
    assert loop.ended.done()
    assert loop.ended.exception() is None
    assert not loop._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_says_of_what() -> None:
    loop = EngineLoop(make_engine())
    loop.start()

    def refuse(frame: StepFrame | None) -> None:
        raise RuntimeError("nobody listens")

    loop.submit(loop.open_stream(refuse), frame_of([opening(0, PROMPT, max_tokens=4), prompt_lease(1)]))
    assert "nobody listens" in str(loop.ended.exception(timeout=SECONDS))
    loop.stop()
    loop._thread.join(SECONDS)


def test_a_step_that_can_not_be_run_ends_its_sequence_and_nobody_else(start: Start) -> None:
    module = deepcopy(plain_model("llama"))
    engine = Engine(PagedLM(adopt_model(module, "llama", use_kernels=False), num_blocks=64))
    loop = start(engine)
    mine, other = Stream(loop), Stream(loop)
    mine.send(opening(0, PROMPT, max_tokens=40), prompt_lease(2))
    other.send(opening(0, OTHER_PROMPT, max_tokens=40))
    emitted = tokens(list(mine.next().results) + list(mine.next().results))
    assert emitted == GREEDY_TEXT[:2]

    def fail(*args: Any) -> None:
        raise RuntimeError("out of something")

    hook = module.model.layers[1].register_forward_hook(fail)
    mine.send(Lease(0, len(PROMPT) + 2, 38))
    error = mine.until_ended(0)[0][-1].error
    assert error is not None
    assert error.reason is Reason.ENGINE_FAILED
    hook.remove()
    mine.send(opening(1, PROMPT, max_tokens=40), prompt_lease(40, 1))
    assert tokens(mine.until_ended(1)[1]) == GREEDY_TEXT
    other.send(Lease(0, len(OTHER_PROMPT), 40))
    assert tokens(other.until_ended(0)[0]) == OTHER_TEXT
    assert engine.lm.pool.num_free == 64


def test_a_step_that_fails_halfway_tells_what_it_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs, rows = engine_module.window_logprobs, iter(range(2))

    def fail_at_the_second(*args: Any) -> Any:
        if next(rows):
            raise RuntimeError("out of something")
        return logprobs(*args)

    monkeypatch.setattr(engine_module, "window_logprobs", fail_at_the_second)
    stream = Stream(start(make_engine()))
    stream.send(
        opening(0, PROMPT, max_tokens=1, logprobs=0),
        opening(1, OTHER_PROMPT, max_tokens=40, logprobs=0),
        prompt_lease(1),
        Lease(1, len(OTHER_PROMPT), 40),
    )
    results = stream.until_ended(0, 1)
    assert tokens(results[0]) == GREEDY_TEXT[:1]
    assert results[1][-1].error is not None
    assert results[1][-1].error.reason is Reason.ENGINE_FAILED


# When a step starts


def due_engine(num_sequences: int) -> tuple[Client, StepClock]:
    """An engine with sequences 0 … that are all due after a step of one second that ended at 100."""
    client = Client(make_engine())
    for n in range(num_sequences):
        client.send(opening(n, PROMPT[: n + 1], max_tokens=40), Verify(n, n + 1, ()))
    clock = StepClock()
    clock.ended(timed(client.engine.step(), 1.0), now=100.0)
    return client, clock


def timed(outcome: StepOutcome, seconds: float) -> StepOutcome:
    return replace(outcome, load=replace(outcome.load, step_seconds=seconds))


def order(client: Client, *sequences: int) -> None:
    for n in sequences:
        length = client.state(n).committed_length
        client.engine.apply(STREAM, frame_of([Verify(n, length, (1,))]))


@pytest.mark.parametrize(
    ("num_sequences", "num_ready", "expected"),
    [
        (4, 1, 2.0),
        (4, 2, 1.0),
        (4, 3, 1 / 3),
        (4, 4, 0.0),
        (2, 1, 1.0),
        (9, 1, 2.0),
        (5, 0, 2.0),
        (1, 0, 1.0),
    ],
)
def test_the_ready_wait_while_it_costs_them_less_than_the_drafting_would_lose(
    num_sequences: int, num_ready: int, expected: float
) -> None:
    """δ · ready < k · T, and never longer than two steps."""
    client, clock = due_engine(num_sequences)
    order(client, *range(num_ready))
    assert clock.patience(client.engine, now=100.0) == pytest.approx(expected)
    if expected:
        assert clock.patience(client.engine, now=100.25) == pytest.approx(expected - 0.25)
        assert clock.patience(client.engine, now=100.0 + expected + 0.01) < 0


def test_leased_and_waiting_sequences_count_as_ready() -> None:
    client, clock = due_engine(3)
    client.engine.apply(STREAM, frame_of([Lease(0, client.state(0).committed_length, 5)]))
    assert clock.patience(client.engine, now=100.0) == pytest.approx(2.0)
    client.send(opening(7, PROMPT, max_tokens=4))
    assert clock.patience(client.engine, now=100.0) == pytest.approx(1.0)


def test_who_has_ended_or_is_closed_is_not_waited_for() -> None:
    client, clock = due_engine(2)
    order(client, 0)
    assert clock.patience(client.engine, now=100.0) > 0
    client.send(1)
    assert clock.patience(client.engine, now=100.0) == 0


def test_who_missed_a_step_is_not_waited_for_again() -> None:
    client, clock = due_engine(3)
    order(client, 0, 1)
    clock.ended(timed(client.engine.step(), 1.0), now=101.0)
    order(client, 0)
    assert clock.patience(client.engine, now=101.0) == pytest.approx(1.0)
    order(client, 1)
    assert clock.patience(client.engine, now=101.0) == 0


def test_a_step_that_only_gives_notices_changes_nobodys_wait() -> None:
    client, clock = due_engine(2)
    order(client, 0)
    notice = StepResult(9, 0)
    clock.ended(
        StepOutcome(2, LoadSnapshot(step_seconds=1e-6), ((SequenceKey(STREAM, 9), notice),)), now=100.1
    )
    assert clock.patience(client.engine, now=100.25) == pytest.approx(0.75)


def test_a_clock_set_back_does_not_stretch_the_wait() -> None:
    client, clock = due_engine(2)
    order(client, 0)
    assert clock.patience(client.engine, now=-5000.0) == pytest.approx(1.0)


def test_the_usual_step_time_follows_slowly() -> None:
    client, clock = due_engine(2)
    order(client, 0, 1)
    clock.ended(timed(client.engine.step(), 6.0), now=110.0)
    order(client, 0)
    assert clock.patience(client.engine, now=110.0) == pytest.approx(2.0)


GATHER = 0.0015


def idle_engine(step_seconds: float, *came: float) -> tuple[Client, StepClock]:
    """An engine in which nothing runs after a step, and requests that have come since, by their times."""
    now = [90.0]
    client = Client(make_engine(clock=lambda: now[0]))
    client.send(opening(0, PROMPT, max_tokens=1), prompt_lease(1))
    clock = StepClock()
    clock.ended(timed(client.engine.step(), step_seconds), now=90.0)
    assert not client.engine.sequences
    for n, now[0] in enumerate(came, 1):
        client.send(opening(n, PROMPT, max_tokens=4), prompt_lease(4, n))
    return client, clock


@pytest.mark.parametrize(
    ("came", "now", "expected"),
    [
        ([100.0], 100.0, GATHER),
        ([100.0], 100.001, 0.0005),
        ([100.0, 100.001], 100.002, 0.0005),
        ([100.0 + n / 1000 for n in range(13)], 100.012, 0.0),  # not for ever
        ([100.0 + n / 1000 for n in range(12)], 100.011, 0.001),
    ],
)
def test_who_comes_together_while_nothing_runs_starts_together(
    came: list[float], now: float, expected: float
) -> None:
    client, clock = idle_engine(1.0, *(time for time in came if time <= now))
    assert clock.patience(client.engine, now) == pytest.approx(expected, abs=1e-9)


def test_a_gathering_is_short_against_a_step_and_none_without_one() -> None:
    client, clock = idle_engine(0.004, 100.0)
    assert clock.patience(client.engine, 100.0) == pytest.approx(0.0005)
    assert StepClock().patience(client.engine, 100.0) <= 0


def test_a_clock_set_back_does_not_make_them_gather_for_ever() -> None:
    client, clock = idle_engine(1.0, 100.0)
    assert clock.patience(client.engine, 50.0) <= 0


def test_who_runs_is_not_kept_waiting_for_who_comes() -> None:
    client, clock = idle_engine(1.0, 100.0)
    client.engine.step()
    client.send(opening(7, PROMPT, max_tokens=4), prompt_lease(4, 7))
    assert clock.patience(client.engine, 100.0) == 0


def test_a_cohort_is_verified_in_one_step(start: Start) -> None:
    """The engine's clock moves only while a step runs: waiting for the cohort has no end of its own."""
    now = [0.0]
    module = deepcopy(plain_model("llama"))
    engine = Engine(
        PagedLM(adopt_model(module, "llama", use_kernels=False), num_blocks=64), clock=lambda: now[0]
    )

    def advance(*args: Any) -> None:
        now[0] += 1.0

    module.register_forward_hook(advance)
    stream = Stream(start(engine))
    prompts = (PROMPT, OTHER_PROMPT)
    lengths = [len(prompt) for prompt in prompts]
    opens = [opening(n, prompt, max_tokens=40) for n, prompt in enumerate(prompts)]
    stream.send(*opens, Verify(0, lengths[0], ()), Verify(1, lengths[1], ()))
    for _ in range(10):
        assert {result.sequence for result in stream.next().results} == {0, 1}
        lengths = [length + 1 for length in lengths]
        stream.send(Verify(0, lengths[0], ()))
        stream.wait_until_applied()
        stream.send(Verify(1, lengths[1], ()))
