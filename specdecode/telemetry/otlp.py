"""Span records sent by OTLP over gRPC. Imports the SDK.

Connection, headers, TLS and retries are those of the SDK's exporter. Messages are made here: its own encoding
takes 85 µs of a span with two dozen attributes, in a process whose event loop wants the interpreter, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from specdecode import __version__
from specdecode.telemetry.spans import EventRecord, SpanRecord, Value

SCOPE = InstrumentationScope("specdecode", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LOCAL = TraceFlags.SAMPLED | SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class SpanSender:
    """Sends to one collector; blocks, so it has a thread of its own.

    Args:
        endpoint: host:port, maybe with http:// or https:// before it.
        service: attributes of the resource; those in OTEL_RESOURCE_ATTRIBUTES are added.
    """

    def __init__(self, endpoint: str, service: Mapping[str, str]) -> None:
        # It tells each attempt that fails; `Tracing` tells once for many.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._exporter = _Exporter(endpoint_url(endpoint), Resource.create(dict(service)))

    def send(self, records: Sequence[SpanRecord]) -> bool:
        """Whether the collector took them; tries for OTEL_EXPORTER_OTLP_TIMEOUT seconds (10)."""
        return self._exporter.export(cast(Any, records)) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends whatever is being sent."""
        self._exporter.shutdown()


class _Exporter(OTLPSpanExporter):
    """The SDK's, for records."""

    def __init__(self, endpoint: str, resource: Resource) -> None:
        super().__init__(endpoint=endpoint)
        self._frame = _frame(resource)

    def _translate_data(self, data: Any) -> ExportTraceServiceRequest:
        request = ExportTraceServiceRequest()
        request.CopyFrom(self._frame)
        request.resource_spans[0].scope_spans[0].spans.extend(map(span_message, data))
        return request


def _frame(resource: Resource) -> ExportTraceServiceRequest:
    """A request of this resource and scope without spans, as the SDK writes it."""
    context = SpanContext(1, 1, False, _SAMPLED)
    example = ReadableSpan("", context, resource=resource, instrumentation_scope=SCOPE)
    frame = encode_spans([example])
    del frame.resource_spans[0].scope_spans[0].spans[:]
    return frame


def endpoint_url(endpoint: str) -> str:
    """The URL of what an operator may write; plain text where the scheme is not given."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def span_message(record: SpanRecord) -> Span:
    """A record as OTLP has it."""
    trace_id = record.trace_id.to_bytes(16, "big")
    return Span(
        trace_id=trace_id,
        span_id=record.span_id.to_bytes(8, "big"),
        parent_span_id=record.parent_id.to_bytes(8, "big") if record.parent_id else b"",
        flags=_REMOTE if record.parent_id and record.from_remote else _LOCAL,
        name=record.name,
        kind=Span.SPAN_KIND_SERVER if record.is_server else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=_nanoseconds(record.began),
        end_time_unix_nano=_nanoseconds(max(record.began, record.ended)),
        attributes=_attributes(record.attributes),
        events=[_event(event) for event in record.events],
        links=[
            Span.Link(trace_id=trace.to_bytes(16, "big"), span_id=span.to_bytes(8, "big"), flags=_LOCAL)
            for trace, span in record.links
        ],
        status=Status()
        if record.error is None
        else Status(code=Status.STATUS_CODE_ERROR, message=record.error),
    )


def _event(event: EventRecord) -> Span.Event:
    attributes = _attributes(event.attributes)
    return Span.Event(name=event.name, time_unix_nano=_nanoseconds(event.time), attributes=attributes)


def _attributes(attributes: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_value, value)))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
