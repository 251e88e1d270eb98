"""Traces and metrics: what all three services share. Nothing here imports OpenTelemetry until it is needed.

A service notes finished spans as `SpanRecord`s, which costs a few microseconds, and hands them to a
`Tracing`, whose thread turns them into OpenTelemetry's and sends them by OTLP. The router's spans travel on
as W3C trace context in the Open of a sequence, and as the id of each round's span beside its orders.
"""

from specdecode.telemetry.context import TraceContext, new_span_id, new_trace_id, parse_traceparent
from specdecode.telemetry.spans import EventRecord, SpanRecord, Value, present
from specdecode.telemetry.tracing import Tracing, start_tracing

__all__ = [
    "EventRecord",
    "SpanRecord",
    "TraceContext",
    "Tracing",
    "Value",
    "new_span_id",
    "new_trace_id",
    "parse_traceparent",
    "present",
    "start_tracing",
]
