"""Whatever the collector does, nobody waits for it, and what it does not get is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from router.tracing import TraceRules
from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError
from specdecode.telemetry import SpanRecord, TraceContext, Tracing, new_trace_id, parse_traceparent
from specdecode.telemetry.otlp import SpanSender
from specdecode.telemetry.tracing import start_tracing
from tests.router.client import MODEL, request_for, speculating
from tests.services import Services
from tests.telemetry.collector import Collector, collector, until
from tests.telemetry.traced import check, traced

TRACEPARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as running:
        yield running


def record(number: int) -> SpanRecord:
    return SpanRecord("test", 1, number, 0, 10.0, 11.0, {"number": number})


def tracing_to(address: str, max_waiting: int = 100) -> Tracing:
    return Tracing(SpanSender(address, {"service.name": "test"}), max_waiting)


def submit(tracing: Tracing, first: int, count: int) -> None:
    for number in range(first, first + count):
        tracing.submit(lambda number=number: [record(number)], 1)  # type: ignore[misc]


def test_all_that_is_handed_in_arrives_before_the_end(spans: Collector) -> None:
    tracing = tracing_to(spans.address)
    submit(tracing, 1, 50)
    tracing.close()
    assert sorted(span.attributes["number"] for span in spans.spans) == list(range(1, 51))
    assert (tracing.num_sent, tracing.num_dropped) == (50, 0)


async def test_what_comes_while_the_collector_is_slow_is_dropped_beyond_a_bound_and_counted(
    spans: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    spans.gate.clear()
    tracing = tracing_to(spans.address)
    submit(tracing, 1, 1)
    await until(lambda: spans.num_calls == 1, "the first call")
    began = time.monotonic()
    submit(tracing, 2, 1000)
    assert time.monotonic() - began < 1.0
    assert tracing.num_dropped == 900
    spans.gate.set()
    with caplog.at_level(logging.WARNING):
        tracing.close()
    assert tracing.num_sent == len(spans.spans) == 101
    assert "900 spans were dropped" in caplog.text


async def test_a_collector_that_comes_back_gets_what_comes_then(spans: Collector) -> None:
    spans.refuses = True
    tracing = tracing_to(spans.address)
    submit(tracing, 1, 3)
    await until(lambda: spans.num_calls >= 1, "the first call")
    spans.refuses = False
    submit(tracing, 4, 3)
    await until(lambda: {4, 5, 6} <= {span.attributes["number"] for span in spans.spans}, "the last spans")
    tracing.close()
    assert tracing.num_sent + tracing.num_dropped == 6


def test_the_end_does_not_wait_for_a_collector_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as gone:
        address = gone.address
    tracing = tracing_to(address)
    submit(tracing, 1, 5)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracing.close()
    assert time.monotonic() - began < 12.0
    assert (tracing.num_sent, tracing.num_dropped) == (0, 5)
    assert "5 spans were dropped" in caplog.text


def test_what_can_not_be_built_is_dropped_and_the_rest_goes_on(spans: Collector) -> None:
    def broken() -> list[SpanRecord]:
        raise ValueError("a mistake of ours")

    tracing = tracing_to(spans.address)
    tracing.submit(broken, 2)
    tracing.close()
    assert (tracing.num_sent, tracing.num_dropped) == (0, 2)
    submit(tracing, 1, 1)
    assert tracing.num_dropped == 3


async def test_requests_are_answered_alike_while_the_collector_is_down_or_slow(model: Path) -> None:
    request = speculating(request_for(temperature=0, max_tokens=20), 3, MODEL)
    async with Services.started(model, model) as services:
        expected = (await services.generate_one(request)).ids
    with collector() as gone:
        pass
    async with traced(gone, model, model) as services:
        assert (await services.generate_one(request)).ids == expected
    with collector() as slow:
        slow.gate.clear()
        async with traced(slow, model, model) as services:
            assert (await services.generate_one(request)).ids == expected
            await until(lambda: slow.num_calls > 0, "a call that hangs")
            answer = await services.generate_one(request)
            assert answer.ids == expected
            slow.gate.set()
    assert len(slow.requests) == 2
    check(slow, slow.requests[1], answer.usage)


def test_without_a_collector_nothing_is_traced() -> None:
    assert start_tracing(RouterSettings()) is None


@pytest.mark.parametrize("endpoint", ["nowhere", "ftp://host:1", "http://host", "host:0", "host:1/path"])
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    from specdecode.config import read_settings

    with pytest.raises(InvalidArgumentError, match="--otlp-endpoint"):
        read_settings(RouterSettings, ["--otlp-endpoint", endpoint])


@pytest.mark.parametrize("endpoint", ["collector:4317", "https://collector.example:4317", "[::1]:4317"])
def test_an_endpoint_is_taken_as_written(endpoint: str) -> None:
    assert RouterSettings(otlp_endpoint=endpoint).otlp_endpoint == endpoint


def test_context_travels_as_it_is() -> None:
    context = parse_traceparent(TRACEPARENT)
    assert context == TraceContext(int("ab" * 16, 16), int("cd" * 8, 16), True)
    assert context.traceparent == TRACEPARENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ff" + TRACEPARENT[2:],
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        TRACEPARENT.replace("ab", "00"),
        TRACEPARENT.replace("cd", "00"),
    ],
)
def test_what_is_no_context_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_a_ratio_samples_the_traces_that_opentelemetry_would(ratio: float) -> None:
    rules, theirs = TraceRules(ratio=ratio), TraceIdRatioBased(ratio)
    ids = [new_trace_id() for _ in range(200)]
    expected = [theirs.should_sample(None, each, "").decision is Decision.RECORD_AND_SAMPLE for each in ids]
    assert [rules.samples(each) for each in ids] == expected
