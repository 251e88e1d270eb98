"""Span records as OpenTelemetry's spans, sent by OTLP over gRPC. Imports the SDK."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specdecode import __version__
from specdecode.telemetry.spans import EventRecord, SpanRecord

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
SCOPE = InstrumentationScope("specdecode", __version__)


class SpanSender:
    """Sends to one collector; blocks, so it has a thread of its own.

    Args:
        endpoint: host:port, maybe with http:// or https:// before it.
        service: attributes of the resource; those in OTEL_RESOURCE_ATTRIBUTES are added.
    """

    def __init__(self, endpoint: str, service: Mapping[str, str]) -> None:
        # It tells each attempt that fails; `Tracing` tells once for many.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._resource = Resource.create(dict(service))
        self._exporter = OTLPSpanExporter(endpoint=endpoint_url(endpoint))

    def send(self, records: Sequence[SpanRecord]) -> bool:
        """Whether the collector took them; tries for OTEL_EXPORTER_OTLP_TIMEOUT seconds (10)."""
        spans = [readable_span(record, self._resource) for record in records]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends whatever is being sent."""
        self._exporter.shutdown()


def endpoint_url(endpoint: str) -> str:
    """The URL of what an operator may write; plain text where the scheme is not given."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def readable_span(record: SpanRecord, resource: Resource) -> ReadableSpan:
    """The SDK's span of a record."""
    parent = None
    if record.parent_id:
        parent = SpanContext(record.trace_id, record.parent_id, record.from_remote, _SAMPLED)
    return ReadableSpan(
        name=record.name,
        context=SpanContext(record.trace_id, record.span_id, False, _SAMPLED),
        parent=parent,
        resource=resource,
        attributes=record.attributes,
        events=[_event(event) for event in record.events],
        links=[Link(SpanContext(*link, False, _SAMPLED)) for link in record.links],
        kind=SpanKind.SERVER if record.is_server else SpanKind.INTERNAL,
        status=_UNSET if record.error is None else Status(StatusCode.ERROR, record.error),
        start_time=_nanoseconds(record.began),
        end_time=_nanoseconds(max(record.began, record.ended)),
        instrumentation_scope=SCOPE,
    )


def _event(event: EventRecord) -> Event:
    return Event(event.name, event.attributes, _nanoseconds(event.time))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
