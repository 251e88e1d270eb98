"""Spans of what steps do for sequences that their routers trace; told by the engine when a step has ended.

Below a round's span `specdecode.verify`: one window. Below a lease's `specdecode.decode`: all its steps.
Below the request's `specdecode.prefill`: from when a sequence comes, or is preempted, until its tokens have
KV. Of each step `specdecode.step`, below the first window told; the windows of the step link to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode.telemetry import (
    EventRecord,
    SpanRecord,
    TraceContext,
    Tracing,
    Value,
    new_span_id,
    parse_traceparent,
    present,
)
from specdecode.types import StepResult, StepTimes
from target_service.sequence import SequenceKey, TargetSequence, Work

_MAX_CHUNKS = 64
"""Of longer prefills the first chunks are told as events."""

Link = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """One step; seconds since the epoch."""

    number: int
    began: float
    ended: float
    works: Sequence[Work]
    results: Mapping[SequenceKey, StepResult]

    @property
    def attributes(self) -> dict[str, Value | None]:
        """Of its own span, and of each window's."""
        return {
            "specdecode.step": self.number,
            "specdecode.batch_size": len(self.works),
            "specdecode.tokens_in_flight": sum(len(work.chunk.token_ids) for work in self.works),
        }


@dataclass
class _Prefill:
    """KV being computed of tokens that are committed."""

    began: float
    recompute: bool = False
    first_step: float | None = None
    ended: float = 0.0
    num_tokens: int = 0
    chunks: list[EventRecord] = field(default_factory=list)

    def note(self, step: Step, num_tokens: int) -> None:
        """A step computes KV of so many tokens, maybe none: then their KV is there."""
        if self.first_step is None:
            self.first_step = self.ended = step.began
        if num_tokens:
            self.ended = step.ended
            self.num_tokens += num_tokens
            if len(self.chunks) < _MAX_CHUNKS:
                said: dict[str, Value] = {"specdecode.step": step.number, "specdecode.tokens": num_tokens}
                self.chunks.append(EventRecord("specdecode.prefill.chunk", step.began, said))


@dataclass
class _Decode:
    """Steps under one lease."""

    span_id: int
    began: float
    ended: float = 0.0
    num_steps: int = 0
    num_emitted: int = 0
    times: StepTimes = field(default_factory=StepTimes)

    def note(self, step: Step, result: StepResult) -> None:
        """One more step."""
        a, b = self.times, result.times
        self.times = StepTimes(a.queue + b.queue, a.forward + b.forward, a.verify + b.verify, a.step + b.step)
        self.num_steps += 1
        self.num_emitted += len(result.token_ids)
        self.ended = step.ended


@dataclass
class _Traced:
    """A sequence, and what is not told yet of it."""

    sequence: TargetSequence
    context: TraceContext
    prefill: _Prefill | None
    decode: _Decode | None = None
    num_preemptions: int = 0


class StepTracer:
    """Hands on the spans of each step."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._traced: dict[SequenceKey, _Traced] = {}
        self._records: list[SpanRecord] = []

    def opened(self, sequence: TargetSequence, now: float) -> None:
        """A sequence is there; it is traced if its router's span is sampled."""
        context = parse_traceparent(sequence.opened.traceparent)
        if context is not None and context.sampled:
            self._traced[sequence.key] = _Traced(sequence, context, _Prefill(now))

    def stepped(self, step: Step) -> None:
        """A step has ended."""
        if not self._traced:
            return
        self._note_preemptions(step)
        link: Link | None = None
        for work in step.works:
            traced = self._traced.get(work.sequence.key)
            if traced is not None:
                link = self._tell(traced, work, step, link)
        self._send()

    def closed(self, sequence: TargetSequence, now: float) -> None:
        """A sequence is forgotten, maybe with an order that was not served."""
        traced = self._traced.pop(sequence.key, None)
        if traced is None:
            return
        self._end_decode(traced)
        if traced.prefill is not None and traced.prefill.first_step is not None:
            self._end_prefill(traced, traced.prefill)
        if sequence.verify is not None:
            said: dict[str, Value | None] = {
                "specdecode.drafted": len(sequence.verify.drafted),
                "specdecode.broken": "closed",
            }
            span_id, began = sequence.verify.span_id, sequence.ordered_at
            self._add(traced, "specdecode.verify", span_id, (began, now), said)
        self._send()

    def _note_preemptions(self, step: Step) -> None:
        for traced in self._traced.values():
            if traced.sequence.num_preemptions > traced.num_preemptions:
                traced.num_preemptions = traced.sequence.num_preemptions
                self._end_decode(traced)
                traced.prefill = _Prefill(step.began, recompute=True)

    def _tell(self, traced: _Traced, work: Work, step: Step, link: Link | None) -> Link | None:
        """Notes or tells one sequence's part; where the step itself is told."""
        if traced.prefill is not None:
            traced.prefill.note(step, len(work.chunk.token_ids) - work.chunk.num_logits)
        result = step.results.get(work.sequence.key)
        if result is None:
            return link
        if traced.prefill is not None:
            self._end_prefill(traced, traced.prefill)
        if work.verify is not None:
            self._end_decode(traced)
            link = self._tell_window(traced, work.verify.span_id, result, step, link)
        else:
            self._note_decode(traced, result, step)
        if result.ended:
            del self._traced[work.sequence.key]
        return link

    def _tell_window(
        self, traced: _Traced, round_span_id: int, result: StepResult, step: Step, link: Link | None
    ) -> Link:
        span_id = new_span_id()
        told = link or (traced.context.trace_id, new_span_id())
        window = (step.began - result.times.queue, step.ended)
        said = {
            **step.attributes,
            **_said_of_times(result.times),
            "specdecode.method": traced.sequence.opened.method.value,
            "specdecode.committed_length": result.committed_length,
            "specdecode.drafted": result.num_drafted,
            "specdecode.accepted": result.num_accepted,
            "specdecode.emitted": len(result.token_ids),
        }
        error = None if result.error is None else result.error.message
        self._add(
            traced,
            "specdecode.verify",
            round_span_id,
            window,
            said,
            span_id=span_id,
            links=(told,),
            error=error,
        )
        if link is None:
            within = (step.began, step.ended)
            self._add(traced, "specdecode.step", span_id, within, step.attributes, span_id=told[1])
        return told

    def _note_decode(self, traced: _Traced, result: StepResult, step: Step) -> None:
        span_id = traced.sequence.lease_span_id
        if traced.decode is None or traced.decode.span_id != span_id:
            self._end_decode(traced)
            traced.decode = _Decode(span_id, step.began - result.times.queue)
        traced.decode.note(step, result)
        if result.ended or not result.lease_left:
            self._end_decode(traced, result)

    def _end_decode(self, traced: _Traced, last: StepResult | None = None) -> None:
        decode, traced.decode = traced.decode, None
        if decode is None:
            return
        said = {
            **_said_of_times(decode.times),
            "specdecode.steps": decode.num_steps,
            "specdecode.emitted": decode.num_emitted,
        }
        error = None if last is None or last.error is None else last.error.message
        times = (decode.began, decode.ended)
        self._add(traced, "specdecode.decode", decode.span_id, times, said, error=error)

    def _end_prefill(self, traced: _Traced, prefill: _Prefill) -> None:
        traced.prefill = None
        first_step = prefill.began if prefill.first_step is None else prefill.first_step
        said: dict[str, Value | None] = {
            "specdecode.tokens": prefill.num_tokens,
            "specdecode.cached_tokens": 0 if prefill.recompute else traced.sequence.num_cached_tokens,
            "specdecode.recompute": prefill.recompute,
            "specdecode.queue_seconds": max(first_step - prefill.began, 0.0),
        }
        events = tuple(prefill.chunks)
        self._add(traced, "specdecode.prefill", 0, (prefill.began, prefill.ended), said, events=events)

    def _add(
        self,
        traced: _Traced,
        name: str,
        parent_id: int,
        times: tuple[float, float],
        said: Mapping[str, Value | None],
        *,
        span_id: int | None = None,
        events: tuple[EventRecord, ...] = (),
        links: tuple[Link, ...] = (),
        error: str | None = None,
    ) -> None:
        """`parent_id` 0 stands for the span that the sequence was opened in."""
        record = SpanRecord(
            name=name,
            trace_id=traced.context.trace_id,
            span_id=span_id or new_span_id(),
            parent_id=parent_id or traced.context.span_id,
            began=times[0],
            ended=times[1],
            attributes=present(said),
            events=events,
            links=links,
            from_remote=name != "specdecode.step",
            error=error,
        )
        self._records.append(record)

    def _send(self) -> None:
        records, self._records = self._records, []
        if records:
            self._tracing.submit(lambda: records, len(records))


def _said_of_times(times: StepTimes) -> dict[str, Value | None]:
    """Of one step or a sum; what is neither the forward nor verification commits and rolls back."""
    return {
        "specdecode.queue_seconds": times.queue,
        "specdecode.forward_seconds": times.forward,
        "specdecode.verify_seconds": times.verify,
        "specdecode.rollback_seconds": max(times.step - times.forward - times.verify, 0.0),
    }
