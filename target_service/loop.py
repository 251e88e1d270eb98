"""The engine's thread: takes frames from many streams, decides when a step starts, hands each stream its
results.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from itertools import count

from specdecode.cost_tables import StepCosts
from specdecode.errors import InternalError, Reason, UnavailableError
from specdecode.types import DecodeFrame, LoadSnapshot, StepFrame, StepResult
from target_service.calibration import Recalibration
from target_service.engine import Engine, EngineFailedError, StepOutcome
from target_service.frames import HELD_ON_CORES_SECONDS, HeldFrames
from target_service.sequence import SequenceKey

log = logging.getLogger("target_service")

Deliver = Callable[[StepFrame | None], None]
"""Takes a step, or None after the last one of a drained stream; returns at once."""

_PATIENCE_STEPS = 2.0
"""No cohort is worth a longer wait than this many steps: a router that is gone must not stall the others."""
_SMOOTHING = 0.2
_GATHER_STEPS, _LONGEST_GATHER_SECONDS = 0.125, 0.0015
"""While nothing runs, whoever comes within this time of another starts with it."""
_MOST_GATHERS = 8


class StepClock:
    """When the next step starts.

    Starting as soon as anyone is ready splits speculating sequences into half-empty cohorts. After a step the
    engine waits δ for the k sequences whose routers are still drafting, while δ·ready < k·T (T: usual step
    time): what the ready ones lose by waiting is less than what the others lose by missing the step. Who
    missed a step once is not waited for again.

    Likewise, requests that come together while nothing runs come one after another: were the first to start
    at once, the others would miss its prefill, and it would end a step before them.
    """

    def __init__(self) -> None:
        self._step_seconds = 0.0
        self._ended_at = 0.0
        self._awaited: set[SequenceKey] = set()

    def ended(self, outcome: StepOutcome, now: float) -> None:
        """Notes a step: who is due now may be drafting. One that only gave notices changes nothing."""
        if not outcome.load.tokens_in_flight:
            return
        seconds = outcome.load.step_seconds
        self._step_seconds += (seconds - self._step_seconds) * (_SMOOTHING if self._step_seconds else 1.0)
        self._ended_at = now
        self._awaited = {
            key for key, result in outcome.results if not result.ended and result.lease_left == 0
        }

    def patience(self, engine: Engine, now: float) -> float:
        """Seconds that the next step should still wait; 0 or less starts it."""
        if not engine.scheduler.running:
            return self._gathering(engine, now)
        ready = sum(sequence.ready for sequence in engine.scheduler.running) + len(engine.scheduler.waiting)
        drafting = sum(
            1 for key in self._awaited if (s := engine.sequences.get(key)) is not None and not s.ready
        )
        if not drafting:
            return 0.0
        longest = min(drafting / max(ready, 1), _PATIENCE_STEPS) * self._step_seconds
        # A clock that is set back must not stretch the wait.
        return longest - max(now - self._ended_at, 0.0)

    def _gathering(self, engine: Engine, now: float) -> float:
        quiet = min(_GATHER_STEPS * self._step_seconds, _LONGEST_GATHER_SECONDS)
        came = [sequence.ordered_at for sequence in engine.scheduler.waiting]
        # Nor must a clock that is set back make anybody wait for ever.
        if not came or max(came) > now:
            return 0.0
        return min(max(came) + quiet, min(came) + _MOST_GATHERS * quiet) - now


class EngineLoop:
    """Runs an engine in one thread; every method may be called from any thread.

    The event loop never waits for a step: orders go into an inbox, and results are delivered by a callback
    per stream that must return at once.

    Args:
        engine: used by nobody else from now on.
        recalibration: done while no sequence is open; a request that comes then waits for one step of it.

    Attributes:
        ended: done when the thread has ended, with what ended it if that was not `stop`.
    """

    def __init__(self, engine: Engine, recalibration: Recalibration | None = None) -> None:
        self.ended: Future[None] = Future()
        self._engine = engine
        self._recalibration = recalibration
        self._clock = StepClock()
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._streams: dict[int, Deliver] = {}
        self._held: dict[int, HeldFrames] = {}
        on_cores = engine.lm.model.device.type == "cpu"
        self._least_held_seconds = HELD_ON_CORES_SECONDS if on_cores else 0.0
        self._numbers = count(1)
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)

    @property
    def load(self) -> LoadSnapshot:
        """Load at the end of the last step."""
        return self._engine.load

    @property
    def costs(self) -> StepCosts | None:
        """What steps cost, as measured last."""
        return self._engine.costs

    def start(self) -> None:
        """Runs in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stops after the running step and waits for the end of `run`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        wait([self.ended])

    def drain(self) -> None:
        """From now on every Open is refused; what is open goes on, and a stream with nothing open ends."""

        def begin() -> None:
            self._draining = True
            for stream in list(self._streams):
                self._end_if_drained(stream)

        self._post(begin)

    def open_stream(self, deliver: Deliver) -> int:
        """Registers a router's stream; `deliver` is called in the engine's thread."""
        stream = next(self._numbers)
        self._streams[stream] = deliver
        return stream

    def submit(self, stream: int, frame: DecodeFrame) -> None:
        """Takes a frame of orders."""
        self._post(lambda: self._apply(stream, frame))

    def close_stream(self, stream: int) -> None:
        """Frees everything that came by the stream."""
        self._streams.pop(stream, None)

        def forget() -> None:
            self._engine.close_stream(stream)
            self._held.pop(stream, None)

        self._post(forget)

    def _post(self, change: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(change)
            self._changed.notify()

    def run(self) -> None:
        """Steps until `stop`, in the calling thread."""
        try:
            while self._wait_for_work():
                outcome = self._step()
                self._clock.ended(outcome, self._engine.now())
                self._deliver(outcome)
        except BaseException as error:
            self.ended.set_exception(error)
            raise
        self.ended.set_result(None)

    def _wait_for_work(self) -> bool:
        """Applies orders until a step should start; False when the loop is to stop."""
        while True:
            changes = self._take_changes()
            if changes is None:
                return False
            for change in changes:
                change()
            timeout = self._patience()
            if timeout is not None and timeout <= 0:
                return True
            if self._measured_a_step():
                continue
            with self._changed:
                if not self._inbox and not self._stopping:
                    self._changed.wait(timeout)

    def _measured_a_step(self) -> bool:
        """Whether there was nothing else to do, and costs to be measured again."""
        work = self._recalibration
        if work is None or self._engine.sequences or not work.wanted:
            return False
        try:
            costs = work.advance()
        except Exception:
            log.exception("measuring again failed; the costs stay as they are")
            self._recalibration = None
            return False
        if costs is not None:
            for deliver in list(self._streams.values()):
                deliver(StepFrame(0, self._engine.load, costs=costs))
        return True

    def _take_changes(self) -> list[Callable[[], None]] | None:
        with self._changed:
            changes = list(self._inbox)
            self._inbox.clear()
            return None if self._stopping else changes

    def _patience(self) -> float | None:
        """Seconds until a step should start; None while there is nothing to run and no deadline."""
        now = self._engine.now()
        if self._engine.has_work:
            return self._clock.patience(self._engine, now)
        deadline = self._engine.next_deadline()
        return None if deadline is None else deadline - now

    def _step(self) -> StepOutcome:
        try:
            return self._engine.step()
        except EngineFailedError:
            raise
        except Exception:
            log.exception("a step failed; every open sequence ends with ENGINE_FAILED")
            self._engine.fail_all(InternalError("the engine failed in this step"))
            return self._engine.step()

    def _apply(self, stream: int, frame: DecodeFrame) -> None:
        deliver = self._streams.get(stream)
        if deliver is None:
            return
        if self._draining and frame.opens:
            error = UnavailableError("the replica is draining", reason=Reason.DRAINING, retry_after=1.0)
            refused = tuple(StepResult(o.sequence, len(o.token_ids), error=error) for o in frame.opens)
            deliver(StepFrame(0, self._engine.load, refused))
            gone = {opened.sequence for opened in frame.opens}
            frame = DecodeFrame(
                verifies=tuple(v for v in frame.verifies if v.sequence not in gone),
                leases=tuple(x for x in frame.leases if x.sequence not in gone),
                closes=frame.closes,
            )
        self._engine.apply(stream, frame)
        self._end_if_drained(stream)

    def _deliver(self, outcome: StepOutcome) -> None:
        results: dict[int, list[StepResult]] = {}
        for key, result in outcome.results:
            if key.stream in self._streams:
                results.setdefault(key.stream, []).append(result)
        now = self._engine.now()
        # Whose sequences had no part in this step, preempted perhaps, may have none for long.
        frames = {s: held.release(now) for s, held in self._held.items() if s not in results}
        for stream, own in results.items():
            held = self._held.setdefault(stream, HeldFrames(self._least_held_seconds))
            frames[stream] = held.take(StepFrame(outcome.step, outcome.load, tuple(own)), now)
        for stream, frame in frames.items():
            deliver = self._streams.get(stream)
            if deliver is not None and frame is not None:
                deliver(frame)
            self._end_if_drained(stream)

    def _end_if_drained(self, stream: int) -> None:
        """Here, not where the stream is written: what a step ended is told before the stream ends."""
        deliver = self._streams.get(stream)
        if self._draining and deliver is not None and not self._engine.owes(stream):
            deliver(None)
