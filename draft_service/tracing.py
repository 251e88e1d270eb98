"""Spans of drafts, `specdecode.draft` below the round's span, for sequences that their routers trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafting import Answer, SequenceKey
from specdecode.telemetry import (
    SpanRecord,
    TraceContext,
    Tracing,
    Value,
    new_span_id,
    parse_traceparent,
    present,
)
from specdecode.types import Draft, OpenDraft, Propose


@dataclass
class _Traced:
    """A sequence, and what is asked for it now."""

    context: TraceContext
    opened: OpenDraft
    asked: Propose | None = None
    asked_at: float = 0.0


class DraftTracer:
    """Hands on the span of each draft; called in the loop's thread."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._traced: dict[SequenceKey, _Traced] = {}

    def opened(self, key: SequenceKey, order: OpenDraft) -> None:
        """A sequence is there; it is traced if its router's span is sampled."""
        context = parse_traceparent(order.traceparent)
        if context is not None and context.sampled:
            self._traced[key] = _Traced(context, order)

    def asked(self, key: SequenceKey, order: Propose) -> None:
        """A draft is to be made; in place of the one asked for before, if that still waits."""
        traced = self._traced.get(key)
        if traced is not None:
            self._send(self._unanswered(traced, "replaced"))
            traced.asked, traced.asked_at = order, time.time()

    def answered(self, answers: Sequence[Answer]) -> None:
        """Drafts were made together."""
        if not self._traced:
            return
        records = []
        for answer in answers:
            traced = self._traced.get(answer.key)
            if traced is not None and traced.asked is not None:
                records.append(_made(traced, traced.asked, answer.draft, len(answers)))
                traced.asked = None
        self._send(records)

    def closed(self, key: SequenceKey) -> None:
        """A sequence is forgotten, maybe with a draft in the making."""
        traced = self._traced.pop(key, None)
        if traced is not None:
            self._send(self._unanswered(traced, "closed"))

    def _unanswered(self, traced: _Traced, why: str) -> list[SpanRecord]:
        if traced.asked is None:
            return []
        return [_span(traced, traced.asked, {"specdecode.broken": why}, None)]

    def _send(self, records: list[SpanRecord]) -> None:
        if records:
            self._tracing.submit(lambda: records, len(records))


def _made(traced: _Traced, asked: Propose, draft: Draft, batch_size: int) -> SpanRecord:
    said: dict[str, Value | None] = {
        "specdecode.drafted": len(draft.token_ids),
        "specdecode.batch_size": batch_size,
        "specdecode.draft_seconds": draft.seconds,
    }
    return _span(traced, asked, said, None if draft.error is None else draft.error.message)


def _span(traced: _Traced, asked: Propose, said: dict[str, Value | None], error: str | None) -> SpanRecord:
    about: dict[str, Value | None] = {
        "specdecode.drafter": traced.opened.drafter.value,
        "specdecode.method": traced.opened.method.value,
        "specdecode.num_draft_tokens": asked.num_draft_tokens,
        "specdecode.committed_length": asked.committed_length,
    }
    return SpanRecord(
        name="specdecode.draft",
        trace_id=traced.context.trace_id,
        span_id=new_span_id(),
        parent_id=asked.span_id or traced.context.span_id,
        began=traced.asked_at,
        ended=time.time(),
        attributes=present({**about, **said}),
        from_remote=True,
        error=error,
    )
