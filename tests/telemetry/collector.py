"""An OTLP collector of the test's own: real gRPC, keeps every span, and may be slow, refuse, or be gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

DEADLINE = 60.0


@dataclass(frozen=True)
class Event:
    """As the collector got it."""

    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """As the collector got it; times in seconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    attributes: dict[str, Any]
    events: tuple[Event, ...]
    links: tuple[tuple[str, str], ...]
    service: str
    is_server: bool
    error: str | None

    def __getitem__(self, name: str) -> Any:
        """An attribute of ours."""
        return self.attributes[f"specdecode.{name}"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Attributes:
    spans: everything taken so far.
    refuses: answers UNAVAILABLE.
    gate: calls wait while it is cleared.
    """

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []
        self.num_calls = 0
        self.refuses = False
        self.gate = threading.Event()
        self.gate.set()

    def Export(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        self.gate.wait(DEADLINE)
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the test says so")
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans.extend(_span(span, service) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Spans of this name, by their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.began)

    def children(self, parent: Span) -> list[Span]:
        """Spans right below another, by their start."""
        below = (span for span in self.spans if span.parent_id == parent.span_id)
        return sorted(below, key=lambda span: span.began)

    @property
    def requests(self) -> list[Span]:
        """The routers' spans of requests."""
        return [span for span in self.spans if span.is_server]

    def tree(self, span: Span) -> Any:
        """Names: (name, [children]), in the order of their starts."""
        return span.name, [self.tree(child) for child in self.children(span)]


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A running collector."""
    service = Collector()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield service
    finally:
        service.gate.set()
        server.stop(None).wait()


async def until(holds: Any, what: str) -> None:
    """Waits for what other threads bring about."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.005)


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events=tuple(Event(event.name, _attributes(event.attributes)) for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        service=service,
        is_server=span.kind == ProtoSpan.SPAN_KIND_SERVER,
        error=span.status.message if span.status.code == 2 else None,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(map(_value, value.array_value.values))
    return getattr(value, kind)
