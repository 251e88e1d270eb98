"""The engine: sequences in, one batched step at a time, results out. No I/O, no threads, no clock of its own.

A request is told by one loop: `apply` a router's frame → `step`: schedule → forward → verify → commit, roll
back. After every step each sequence's KV covers all committed tokens but the newest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from specdecode.cost_tables import StepCosts
from specdecode.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
)
from specdecode.lm.runner import PagedLM
from specdecode.types import (
    DecodeFrame,
    Lease,
    LoadSnapshot,
    OpenSequence,
    StepResult,
    StepTimes,
    Verify,
)
from target_service.checks import check_open, check_target, check_verify
from target_service.load import LoadMeter, NextStep, cached_tokens, is_awaited
from target_service.metrics import StepCounts
from target_service.scheduler import Scheduler, SchedulerLimits
from target_service.sequence import SequenceKey, TargetSequence, Work
from target_service.tracing import Step, StepTracer
from target_service.verify import Outcome, Verifier, first_rows, window_logprobs

log = logging.getLogger("target_service")

_GOES_ON = "a sequence failed; the others go on"
_MAX_FAILED_STEPS = 5
"""Of single sequences in a row: one is its own fault, so many are the engine's."""

Order = TypeVar("Order")


class EngineFailedError(Exception):
    """The engine is beyond help: the replica ends, and its router has its sequences go on elsewhere."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step did: the load at its end and each sequence's result, by the stream it belongs to."""

    step: int
    load: LoadSnapshot
    results: tuple[tuple[SequenceKey, StepResult], ...] = ()


class Engine:
    """Continuous batching over one paged model.

    Args:
        lm: the target.
        limits: bounds of a step and of the queue.
        generator: noise for `rejection` and `block`; seeded from the system's entropy when None.
        clock: seconds, for times and deadlines (epoch).
        trust_draft: whether q may be believed; a request can only be stricter.
        tracer: makes spans of what is done for sequences that their routers trace; None: nobody does.

    Raises:
        FailedPreconditionError: the model has a draft vocabulary.
    """

    def __init__(
        self,
        lm: PagedLM,
        limits: SchedulerLimits | None = None,
        generator: torch.Generator | None = None,
        clock: Callable[[], float] = time.time,
        trust_draft: bool = True,
        tracer: StepTracer | None = None,
    ) -> None:
        check_target(lm.model)
        self.lm = lm
        self.limits = limits or SchedulerLimits()
        self.scheduler = Scheduler(lm.pool, self.limits)
        self.sequences: dict[SequenceKey, TargetSequence] = {}
        self.meter = LoadMeter()
        self.counts = StepCounts()
        self.load = self._snapshot([], 0.0)
        self._verifier = Verifier(generator or _entropy(), lm.model.kernels)
        self._clock = clock
        self._trust_draft = trust_draft
        self._num_failed_steps = 0
        self._tracer = tracer
        self._step = 0
        self._notices: list[tuple[SequenceKey, StepResult]] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a window, a prefill, an admission, or a notice to give."""
        return bool(self._notices) or self._overdue() or self.scheduler.has_work

    @property
    def costs(self) -> StepCosts | None:
        """What steps cost; None until measured. `load.cost_ratio` corrects them."""
        return self.meter.match.costs

    def owes(self, stream: int) -> bool:
        """Whether a stream has a sequence open, or is to be told of one in the next step."""
        return any(key.stream == stream for key in (*self.sequences, *(key for key, _ in self._notices)))

    def now(self) -> float:
        """Seconds since the epoch, by the engine's clock."""
        return self._clock()

    def next_deadline(self) -> float | None:
        """The earliest deadline of an open sequence, in seconds since the epoch."""
        deadlines = (sequence.opened.deadline for sequence in self.sequences.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def apply(self, stream: int, frame: DecodeFrame) -> None:
        """Takes a router's orders. What can't be taken is answered by an error in the next step's results."""
        for opened in frame.opens:
            self._notify_on_error(SequenceKey(stream, opened.sequence), self._open, opened)
        for verify in frame.verifies:
            self._notify_on_error(SequenceKey(stream, verify.sequence), self._order_verify, verify)
        for lease in frame.leases:
            self._notify_on_error(SequenceKey(stream, lease.sequence), self._order_lease, lease)
        for sequence in frame.closes:
            self.close(SequenceKey(stream, sequence))
        self._note_waiting(self._clock())

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence; unknown ones (already ended) are fine."""
        sequence = self._forget(key)
        if sequence is not None and self._tracer is not None:
            self._tracer.closed(sequence, self._clock())

    def close_stream(self, stream: int) -> None:
        """Forgets all sequences of a stream that was lost."""
        for key in [key for key in self.sequences if key.stream == stream]:
            self.close(key)
        self._note_waiting(self._clock())

    def step(self) -> StepOutcome:
        """Runs one step over everything that has something to run."""
        began = self._clock()
        self._expire(began)
        works = self.scheduler.plan()
        if works:
            served = {work.sequence for work in works}
            waiting = any(is_awaited(s) for s in self.scheduler.running if s not in served)
            self.meter.idle.change(began, stepping=True, waiting=waiting)
        results = self._run(works, began) if works else []
        self._step += 1
        ended = self._clock()
        self._note_waiting(ended)
        self.load = self._measured(works, results, ended - began)
        notices, self._notices = self._notices, []
        return StepOutcome(self._step, self.load, (*notices, *results))

    def fail_all(self, error: SpecdecodeError) -> None:
        """Ends every sequence with `error`: after a step that could not be run."""
        for key in list(self.sequences):
            self._fail(key, error)

    def check_integrity(self) -> None:
        """Proves the pool's invariants; see `BlockPool.check_integrity`.

        Raises:
            IntegrityError: one does not hold.
        """
        known = list(self.sequences.values())
        for sequence in known:
            sequence.kv.check_integrity()
        self.lm.pool.check_integrity([sequence.kv.block_table for sequence in known])
        if sorted(map(id, known)) != sorted(map(id, [*self.scheduler.running, *self.scheduler.waiting])):
            raise AssertionError("a sequence is neither running nor waiting")

    def _run(self, works: Sequence[Work], began: float) -> list[tuple[SequenceKey, StepResult]]:
        works, logits = self._forward(works)
        forward_done = self._clock()
        windows = [work for work in works if work.has_window]
        outcomes = self._verify(logits, windows) if windows else []
        verify_done = self._clock()
        results: list[tuple[SequenceKey, StepResult]] = []
        for work, outcome, row in zip(windows, outcomes, first_rows(windows), strict=True):
            rows = logits[row : row + work.chunk.num_logits]
            try:
                results.append((work.sequence.key, self._commit(work, outcome, rows, began)))
            except Exception:
                log.exception(_GOES_ON)
                self._fail(work.sequence.key, _failure())
        for work in works:
            work.sequence.last_step = self._step
            if work.sequence.key in self.sequences:
                self.scheduler.computed(work.sequence)
        done = self._clock()
        times = StepTimes(0.0, forward_done - began, verify_done - forward_done, done - began)
        results = [(key, replace(r, times=replace(times, queue=r.times.queue))) for key, r in results]
        if self._tracer is not None:
            self._tracer.stepped(Step(self._step + 1, began, done, works, dict(results)))
        return results

    def _forward(self, works: Sequence[Work]) -> tuple[Sequence[Work], Tensor]:
        """The step's logits. If it fails, each work is tried by itself: who fails alone, ends alone.

        Raises:
            EngineFailedError: none of several works can be run, or time after time none at all.
        """
        try:
            logits = self.lm.forward([work.chunk for work in works])
            self._num_failed_steps = 0
            return works, logits
        except Exception:
            log.exception("a step of %d sequences failed; each is tried by itself", len(works))
        done: list[Work] = []
        rows: list[Tensor] = []
        for work in works:
            try:
                rows.append(self.lm.forward([work.chunk]))
            except Exception:
                log.exception(_GOES_ON)
            else:
                done.append(work)
        self._num_failed_steps = 0 if done else self._num_failed_steps + 1
        if not done and (len(works) > 1 or self._num_failed_steps >= _MAX_FAILED_STEPS):
            raise EngineFailedError(f"none of {len(works)} sequences could be run")
        for work in works:
            if work not in done:
                self._fail(work.sequence.key, _failure())
        return done, torch.cat(rows) if rows else torch.empty(0)

    def _verify(
        self,
        logits: Tensor,  # [R, vocab_size]
        windows: Sequence[Work],
    ) -> list[Outcome]:
        """One outcome a window; as `_forward`, where it fails. What was drawn for all of them is not used."""
        try:
            return self._verifier.verify(logits, windows)
        except Exception:
            log.exception("verifying %d windows failed; each is tried by itself", len(windows))
        outcomes: list[Outcome] = []
        for work, row in zip(windows, first_rows(windows), strict=True):
            try:
                outcomes += self._verifier.verify(logits[row : row + work.chunk.num_logits], [work])
            except Exception:
                log.exception(_GOES_ON)
                outcomes.append(Outcome([], error=_failure()))
        return outcomes

    def _forget(self, key: SequenceKey) -> TargetSequence | None:
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.scheduler.remove(sequence)
        return sequence

    def _commit(
        self,
        work: Work,
        outcome: Outcome,
        logits: Tensor,  # [γ + 1, vocab_size]
        began: float,
    ) -> StepResult:
        """Appends what a window emits, forgets KV of what was rejected, and says so."""
        sequence, key = work.sequence, work.sequence.key
        if outcome.error is not None:
            # Whoever has the same prefix next computes it anew.
            sequence.kv.pool.forget(sequence.kv.block_table)
            self._forget(key)
            return StepResult(key.sequence, sequence.committed_length, error=outcome.error)
        count, finish = sequence.finish_of(outcome.token_ids)
        token_ids = outcome.token_ids[:count]
        sequence.kv.commit(token_ids)
        sequence.kv.rollback(sequence.committed_length - 1)
        sequence.verify = None
        num_top = sequence.sampling.logprobs
        result = StepResult(
            sequence=key.sequence,
            committed_length=sequence.committed_length,
            token_ids=tuple(token_ids),
            origins=tuple(outcome.origins(len(work.drafted))[:count]),
            num_drafted=len(work.drafted),
            num_accepted=min(outcome.num_accepted, count),
            tested=outcome.tested,
            passed=outcome.passed,
            logprobs=() if num_top is None else window_logprobs(logits, token_ids, num_top),
            lease_left=sequence.lease_left,
            times=StepTimes(queue=max(began - sequence.ordered_at, 0.0)),
            num_cached_tokens=0 if sequence.reported else sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            finish_reason=finish,
        )
        sequence.reported = True
        sequence.ordered_at = self._clock()
        if finish is not None:
            sequence.kv.publish()
            self._forget(key)
        return result

    def _open(self, key: SequenceKey, opened: OpenSequence) -> None:
        if key in self.sequences:
            raise InvalidArgumentError(
                f"sequence {key.sequence} is open already", reason=Reason.SEQUENCE_EXISTS
            )
        check_open(opened, self.lm)
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            raise ResourceExhaustedError(
                f"the target's queue is full ({self.limits.max_waiting} sequences wait)", retry_after=1.0
            )
        if not self._trust_draft:
            opened = replace(opened, trust_draft=False)
        kv = self.lm.new_sequence(opened.token_ids, opened.cache_salt)
        sequence = TargetSequence(key, opened, kv, ordered_at=self._clock())
        self.sequences[key] = sequence
        self.scheduler.waiting.append(sequence)
        if self._tracer is not None:
            self._tracer.opened(sequence, sequence.ordered_at)

    def _order_verify(self, key: SequenceKey, verify: Verify) -> None:
        sequence = self._known(key)
        if verify.committed_length != sequence.committed_length:
            return  # stale: what it was drafted for has been overtaken
        check_verify(verify, self.lm.model.vocab_size)
        sequence.verify = verify
        sequence.lease_end = 0
        sequence.ordered_at = self._clock()

    def _order_lease(self, key: SequenceKey, lease: Lease) -> None:
        sequence = self._known(key)
        if lease.committed_length > sequence.committed_length:
            raise InvalidArgumentError.of(
                "leases.committed_length", f"{lease.committed_length} exceeds {sequence.committed_length}"
            )
        if not sequence.ready:
            sequence.ordered_at = self._clock()
        sequence.lease_end = lease.committed_length + lease.num_tokens
        sequence.lease_span_id = lease.span_id

    def _known(self, key: SequenceKey) -> TargetSequence:
        sequence = self.sequences.get(key)
        if sequence is None:
            raise NotFoundError(f"sequence {key.sequence} is not open", reason=Reason.SEQUENCE_UNKNOWN)
        return sequence

    def _notify_on_error(
        self, key: SequenceKey, take: Callable[[SequenceKey, Order], None], order: Order
    ) -> None:
        try:
            take(key, order)
        except SpecdecodeError as error:
            self._fail(key, error)

    def _fail(self, key: SequenceKey, error: SpecdecodeError) -> None:
        length = self.sequences[key].committed_length if key in self.sequences else 0
        self.close(key)
        self._notices.append((key, StepResult(key.sequence, length, error=error)))

    def _expire(self, now: float) -> None:
        for key, sequence in list(self.sequences.items()):
            deadline = sequence.opened.deadline
            if deadline is not None and deadline <= now:
                self._fail(key, DeadlineExceededError("the request's deadline passed"))

    def _overdue(self) -> bool:
        deadline = self.next_deadline()
        return deadline is not None and deadline <= self._clock()

    def _note_waiting(self, now: float) -> None:
        """Between two steps: whether some router is waited for."""
        waiting = any(map(is_awaited, self.scheduler.running))
        self.meter.idle.change(now, stepping=False, waiting=waiting)

    def _measured(
        self, works: Sequence[Work], results: Sequence[tuple[SequenceKey, StepResult]], seconds: float
    ) -> LoadSnapshot:
        """The load at the end of a step that took `seconds`."""
        load = self._snapshot(works, seconds)
        self.meter.match.note(load, len(works))
        told = [result for _, result in results]
        self.meter.note_results(told)
        if works:
            self.counts.count(works, told, load)
        self.counts.num_preemptions = self.scheduler.num_preemptions
        emitted = sum(len(result.token_ids) for _, result in results)
        coming = NextStep.of(self.scheduler)
        return replace(
            load,
            num_ordered=len(coming.ordered),
            num_ordered_tokens=coming.num_ordered_tokens,
            num_prefill_tokens=coming.num_prefill_tokens,
            expected_emitted=self.meter.expected_emitted(coming.ordered),
            price=self.meter.price(load, len(works), emitted),
            idle_share=self.meter.idle.share,
            cost_ratio=self.meter.match.ratio,
        )

    def _snapshot(self, works: Sequence[Work], seconds: float) -> LoadSnapshot:
        pool = self.lm.pool
        return LoadSnapshot(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            tokens_in_flight=sum(len(work.chunk.token_ids) for work in works),
            num_rows=sum(work.chunk.num_logits for work in works),
            num_cached_tokens=cached_tokens(works),
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            step_seconds=seconds,
        )


def _failure() -> InternalError:
    return InternalError("the engine failed at this sequence; the service's log has the details")


def _entropy() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
