"""What the router notes of a request's rounds, and what becomes of it: spans, events of one span, or nothing.

A round costs a tuple while it runs; spans are made of it in the exporting thread. Rounds of requests that are
not sampled are noted all the same, the newest of them: when such a request fails or is slow they are told as
events. Nothing here is called where no collector is named.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from router.reasons import DecisionReason
from specdecode.config import RouterSettings
from specdecode.errors import Reason
from specdecode.requests import TraceDetail
from specdecode.telemetry import (
    EventRecord,
    SpanRecord,
    TraceContext,
    Tracing,
    Value,
    new_span_id,
    new_trace_id,
    parse_traceparent,
    present,
)
from specdecode.types import DrafterKind, Method, Origin, StepResult, StepTimes

if TYPE_CHECKING:
    from router.request import Round

MAX_EVENTS = 256
"""Rounds and leases that are kept to be told as events; of longer texts the newest."""
_SPANS_AT_ONCE = 64
_TRACE_IDS = 2**64


@dataclass(frozen=True)
class TraceRules:
    """Which requests are traced, and how far.

    Attributes:
        detail: of requests that do not say.
        ratio: share of the requests outside a trace that are sampled; inside one its first span decided.
        slow_seconds: from which on a request is told that is not sampled.
    """

    detail: TraceDetail = TraceDetail.ROUNDS
    ratio: float = 1.0
    slow_seconds: float = 30.0

    @classmethod
    def of(cls, settings: RouterSettings) -> TraceRules:
        """As the operator set them."""
        detail = TraceDetail(settings.trace_detail)
        return cls(detail, settings.trace_ratio, settings.trace_slow_seconds)

    def samples(self, trace_id: int) -> bool:
        """As OpenTelemetry's TraceIdRatioBased: services with the same ratio sample the same traces."""
        return trace_id % _TRACE_IDS < round(self.ratio * _TRACE_IDS)


class RoundFacts(NamedTuple):
    """A round with drafts asked for, or a lease with all its rounds; times by the monotonic clock.

    Attributes:
        first: index of its first round; None if none came to an end.
        broken: why it came to no end; "": it did.
        num_asked: drafts asked for; of a lease the tokens that it allowed, renewals included.
        times: sums over the steps.
    """

    span_id: int
    is_lease: bool
    choice: int
    first: int | None
    began: float
    ended: float
    replica: str
    reason: DecisionReason
    drafter: DrafterKind | None
    method: Method
    broken: str
    num_asked: int
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_bonus: int = 0
    num_recovered: int = 0
    num_emitted: int = 0
    draft_seconds: float = 0.0
    times: StepTimes = StepTimes()
    predicted_emitted: float = 0.0
    predicted_seconds: float = 0.0
    price: float = 0.0
    tokens_in_flight: int = 0

    @property
    def name(self) -> str:
        """Of its span or event."""
        return "specdecode.lease" if self.is_lease else "specdecode.round"

    @property
    def attributes(self) -> dict[str, Value]:
        """Of its span or event."""
        asked = "specdecode.lease_tokens" if self.is_lease else "specdecode.num_draft_tokens"
        return present(
            {
                "specdecode.choice": self.choice,
                "specdecode.round": self.first,
                "specdecode.rounds": self.num_rounds,
                asked: self.num_asked,
                "specdecode.drafted": self.num_drafted,
                "specdecode.accepted": self.num_accepted,
                "specdecode.bonus": self.num_bonus,
                "specdecode.recovered": self.num_recovered,
                "specdecode.emitted": self.num_emitted,
                "specdecode.drafter": None if self.drafter is None else self.drafter.value,
                "specdecode.method": self.method.value,
                "specdecode.reason": self.reason.value,
                "specdecode.price": self.price,
                "specdecode.tokens_in_flight": self.tokens_in_flight,
                "specdecode.predicted_emitted": self.predicted_emitted,
                "specdecode.predicted_seconds": self.predicted_seconds,
                "specdecode.seconds": self.ended - self.began,
                "specdecode.draft_seconds": self.draft_seconds,
                "specdecode.queue_seconds": self.times.queue,
                "specdecode.forward_seconds": self.times.forward,
                "specdecode.verify_seconds": self.times.verify,
                "specdecode.step_seconds": self.times.step,
                "specdecode.replica": self.replica,
                "specdecode.broken": self.broken or None,
            }
        )


@dataclass(slots=True)
class _Running:
    """A round or lease that has an order; of a lease, what its results came to so far."""

    span_id: int
    is_lease: bool
    began: float
    replica: str
    reason: DecisionReason
    drafter: DrafterKind | None
    num_asked: int
    ended: float
    told: RoundFacts | None = None


class ChoiceTrace:
    """Notes one choice's rounds, of which one runs at a time: what is ordered anew ends a lease."""

    def __init__(self, trace: RequestTrace, choice: int, method: Method) -> None:
        self._trace = trace
        self._choice = choice
        self._method = method
        self._running: _Running | None = None
        self._num_preemptions = 0

    def began_round(
        self, began: float, num_draft_tokens: int, drafter: DrafterKind, reason: DecisionReason, replica: str
    ) -> int:
        """Drafts are asked for; the id of the round's span for others, 0 if it has none for them."""
        self._begin(_Running(new_span_id(), False, began, replica, reason, drafter, num_draft_tokens, began))
        return self.span_id

    def began_lease(self, began: float, num_tokens: int, reason: DecisionReason, replica: str) -> int:
        """As `began_round`, for a lease."""
        self._begin(_Running(new_span_id(), True, began, replica, reason, None, num_tokens, began))
        return self.span_id

    def renewed_lease(self, num_tokens: int) -> int:
        """The lease that runs allows more; the id of its span for others."""
        if self._running is not None:
            self._running.num_asked += num_tokens
        return self.span_id

    @property
    def span_id(self) -> int:
        """Of what runs, for others; 0 if it has none for them."""
        return self._running.span_id if self._running is not None and self._trace.has_round_spans else 0

    def took(
        self, index: int, result: StepResult, origins: Sequence[Origin], round_: Round, now: float
    ) -> None:
        """A result came; `index` is that of its first round, `origins` those of the tokens that were kept."""
        if result.num_preemptions > self._num_preemptions:
            self._num_preemptions = result.num_preemptions
            self._trace.event("specdecode.preempted", now, {"specdecode.choice": self._choice})
        running = self._running
        if running is None or not origins:
            return
        running.ended = now
        facts = self._facts(running, index, result, origins, round_)
        if running.is_lease:
            running.told = facts if running.told is None else _sum(running.told, facts)
        else:
            self._running = None
            self._trace.add(facts)

    def _facts(
        self, running: _Running, index: int, result: StepResult, origins: Sequence[Origin], round_: Round
    ) -> RoundFacts:
        num_rounds = 1 if result.num_drafted else len(origins)
        return RoundFacts(
            span_id=running.span_id,
            is_lease=running.is_lease,
            choice=self._choice,
            first=index,
            began=running.began,
            ended=running.ended,
            replica=running.replica,
            reason=round_.reason,
            drafter=round_.drafter,
            method=self._method,
            broken="",
            num_asked=running.num_asked,
            num_rounds=num_rounds,
            num_drafted=result.num_drafted,
            num_accepted=origins.count(Origin.ACCEPTED),
            num_bonus=origins.count(Origin.BONUS),
            num_recovered=origins.count(Origin.RECOVERED),
            num_emitted=len(origins),
            draft_seconds=round_.draft_seconds,
            times=_scaled(result.times, num_rounds),
            predicted_emitted=round_.predicted_emitted,
            predicted_seconds=round_.predicted_seconds,
            price=round_.price,
            tokens_in_flight=round_.tokens_in_flight,
        )

    def ended(self, broken: str | None, now: float) -> None:
        """Nothing more comes of what runs; `broken` says why, where that is not in good order."""
        running, self._running = self._running, None
        if running is None:
            return
        facts = running.told or self._nothing(running)
        ended = running.ended if broken is None else now
        self._trace.add(facts._replace(num_asked=running.num_asked, broken=broken or "", ended=ended))

    def moved(self, replica: str, reason: Reason, now: float) -> None:
        """The choice goes on elsewhere: `replica` can't, for this reason."""
        self.ended(reason, now)
        self._num_preemptions = 0
        attributes: dict[str, Value] = {
            "specdecode.choice": self._choice,
            "specdecode.replica": replica,
            "specdecode.reason": reason.value,
        }
        self._trace.event("specdecode.failover", now, attributes)

    def _begin(self, running: _Running) -> None:
        self.ended(None, running.began)
        self._running = running

    def _nothing(self, running: _Running) -> RoundFacts:
        """What is told of a round or lease without a result."""
        return RoundFacts(
            span_id=running.span_id,
            is_lease=running.is_lease,
            choice=self._choice,
            first=None,
            began=running.began,
            ended=running.ended,
            replica=running.replica,
            reason=running.reason,
            drafter=running.drafter,
            method=self._method,
            broken="",
            num_asked=running.num_asked,
        )


def _scaled(times: StepTimes, count: int) -> StepTimes:
    """Sums of steps whose means these are."""
    if count == 1:
        return times
    return StepTimes(*(count * part for part in (times.queue, times.forward, times.verify, times.step)))


def _sum(told: RoundFacts, more: RoundFacts) -> RoundFacts:
    """A lease and what came later of it; what its last decision knew stays, where there was one."""
    a, b = told.times, more.times
    times = StepTimes(a.queue + b.queue, a.forward + b.forward, a.verify + b.verify, a.step + b.step)
    return told._replace(
        ended=more.ended,
        reason=more.reason,
        num_rounds=told.num_rounds + more.num_rounds,
        num_emitted=told.num_emitted + more.num_emitted,
        times=times,
        predicted_emitted=more.predicted_emitted or told.predicted_emitted,
        predicted_seconds=more.predicted_seconds or told.predicted_seconds,
        price=more.price or told.price,
        tokens_in_flight=more.tokens_in_flight,
    )


class RequestTrace:
    """One request's span, and what is told below it.

    Args:
        tracing: where spans go.
        rules: the operator's.
        parent: the span that the client is in.
        detail: what the client wants told; None: as the rules say.
    """

    def __init__(
        self, tracing: Tracing, rules: TraceRules, parent: TraceContext | None, detail: TraceDetail | None
    ) -> None:
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = rules.samples(trace_id) if parent is None else parent.sampled
        self.context = TraceContext(trace_id, new_span_id(), sampled)
        self.detail = detail or rules.detail
        self.began = time.monotonic()
        self._epoch = time.time() - self.began
        self._tracing = tracing
        self._rules = rules
        self._parent = parent
        self._rounds: deque[RoundFacts] = deque()
        self._events: list[EventRecord] = []
        self._num_left_out = 0
        self._first_chunk: float | None = None

    @classmethod
    def begin(
        cls, tracing: Tracing, rules: TraceRules, traceparent: str, detail: TraceDetail | None
    ) -> RequestTrace:
        """The trace of a request that came with `traceparent` ("": none)."""
        return cls(tracing, rules, parse_traceparent(traceparent), detail)

    @property
    def has_round_spans(self) -> bool:
        """Whether rounds get spans, which the other services' are below."""
        return self.context.sampled and self.detail is TraceDetail.ROUNDS

    @property
    def told(self) -> TraceContext | None:
        """The request's span, where it will be exported for sure."""
        return self.context if self.context.sampled else None

    @property
    def traceparent(self) -> str:
        """For the other services: sampled only where they are to have spans of their own."""
        context = self.context
        return TraceContext(context.trace_id, context.span_id, self.has_round_spans).traceparent

    def choice(self, index: int, method: Method) -> ChoiceTrace:
        """What notes one choice's rounds."""
        return ChoiceTrace(self, index, method)

    def said(self, now: float) -> None:
        """The client gets its first piece."""
        self._first_chunk = now

    def event(self, name: str, now: float, attributes: dict[str, Value]) -> None:
        """Something happened to the request, at `now` by the monotonic clock."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(EventRecord(name, self._epoch + now, attributes))

    def add(self, facts: RoundFacts) -> None:
        """A round or lease has ended."""
        if self.context.sampled and self.detail is TraceDetail.REQUEST:
            return
        self._rounds.append(facts)
        if self.has_round_spans:
            if len(self._rounds) >= _SPANS_AT_ONCE:
                self._send_rounds()
        elif len(self._rounds) > MAX_EVENTS:
            self._rounds.popleft()
            self._num_left_out += 1

    def end(self, name: str, attributes: dict[str, Value | None], error: str | None, failed: bool) -> None:
        """Sends what is told of the request.

        Args:
            name: of its span.
            attributes: of its span.
            error: why it could not be answered; None: it was, or the client took it back.
            failed: whether it had been begun and failed.
        """
        now = time.monotonic()
        kept = None
        if not self.context.sampled:
            kept = "failed" if failed else "slow" if now - self.began > self._rules.slow_seconds else None
            if kept is None:
                return
        if self.has_round_spans:
            self._send_rounds()
        more: dict[str, Value | None] = {
            "gen_ai.response.time_to_first_chunk": self._first_chunk and self._first_chunk - self.began,
            "specdecode.trace_kept": kept,
            "specdecode.rounds_left_out": self._num_left_out or None,
        }
        build = partial(self._build, name, {**attributes, **more}, error, now)
        self._tracing.submit(lambda: [build()], 1)

    def _send_rounds(self) -> None:
        facts, self._rounds = self._rounds, deque()
        if facts:
            self._tracing.submit(lambda: [self._span(each) for each in facts], len(facts))

    def _span(self, facts: RoundFacts) -> SpanRecord:
        context = self.context
        began, ended = self._epoch + facts.began, self._epoch + facts.ended
        ids = (context.trace_id, facts.span_id, context.span_id)
        return SpanRecord(facts.name, *ids, began, ended, facts.attributes)

    def _build(
        self, name: str, attributes: dict[str, Value | None], error: str | None, ended: float
    ) -> SpanRecord:
        rounds = [
            EventRecord(facts.name, self._epoch + facts.ended, facts.attributes) for facts in self._rounds
        ]
        return SpanRecord(
            name=name,
            trace_id=self.context.trace_id,
            span_id=self.context.span_id,
            parent_id=0 if self._parent is None else self._parent.span_id,
            began=self._epoch + self.began,
            ended=self._epoch + ended,
            attributes=present(attributes),
            events=tuple(sorted([*self._events, *rounds], key=lambda event: event.time)),
            from_remote=True,
            is_server=True,
            error=error,
        )
