"""What is scraped parses, adds up to what clients were told, and has a bounded number of series."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from router.figures import MAX_TRAFFIC_CLASSES
from router.router import Router
from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError
from specdecode.telemetry.exposition import render
from specdecode.telemetry.meters import Meters
from specdecode.telemetry.metrics import Histogram, counter, histogram
from specdecode.types import Usage
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import Services, eventually
from tests.telemetry.collector import collector
from tests.telemetry.traced import PARENT

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRAPED = {"metrics_port": 0}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, other_model: Path) -> AsyncIterator[Services]:
    async with Services.started(model, other_model, target=SCRAPED, draft=SCRAPED, **SCRAPED) as started:
        yield started


def router_of(services: Services) -> Router:
    router: Router = services.router.running.on_stopped.__self__  # type: ignore[attr-defined]
    return router


def scraped(port: int | None, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return str(reply.read().decode())


async def scrape(port: int | None) -> Series:
    text = await asyncio.to_thread(scraped, port)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


async def scrape_router(services: Services) -> Series:
    meters = router_of(services).meters
    assert meters is not None
    return await scrape(meters.port)


def total(series: Series, name: str, **labels: str) -> float:
    """The sum of all series of this name with these labels."""
    return sum(
        value for (own, has), value in series.items() if own == f"specdecode_{name}" and has >= labels.items()
    )


def added(before: Series, after: Series, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


async def usages(services: Services) -> list[Usage]:
    """Of a few requests of all kinds, one of them cancelled."""
    requests = [
        speculating(request_for(temperature=0, max_tokens=30, ignore_eos=True), 4, MODEL),
        speculating(request_for(seed=5, max_tokens=30, ignore_eos=True), 3, NGRAM),
        speculating(request_for(temperature=0, max_tokens=20, ignore_eos=True), 0, NGRAM),
    ]
    requests[1].n = 2
    answers = [answer for request in requests for answer in await services.generate(request)]
    return [answer.usage for answer in answers if answer.usage is not None]


async def test_sums_are_those_of_the_usage_that_clients_were_told(services: Services) -> None:
    before = await scrape_router(services)
    told = await usages(services)
    await eventually(lambda: router_of(services).status().num_requests == 0, "all requests have ended")
    after = await scrape_router(services)
    for name, field in [
        ("num_draft_tokens_total", "num_drafted"),
        ("num_accepted_tokens_total", "num_accepted"),
        ("num_bonus_tokens_total", "num_bonus"),
        ("num_recovered_tokens_total", "num_recovered"),
        ("num_emitted_tokens_total", "num_emitted"),
        ("num_rounds_total", "num_rounds"),
        ("num_accepted_tokens_per_pos_total", "num_accepted"),
        ("num_draft_tokens_per_pos_total", "num_drafted"),
        ("prompt_tokens_total", "num_prompt_tokens"),
    ]:
        assert added(before, after, name) == sum(getattr(usage, field) for usage in told), name
    assert added(before, after, "rounds_by_reason_total") == sum(usage.num_rounds for usage in told)
    assert added(before, after, "requests_total", outcome="finished") == 3
    assert added(before, after, "accepted_run_length_count") == added(before, after, "num_drafts_total")
    assert added(before, after, "accepted_run_length_sum") == added(
        before, after, "num_accepted_tokens_total"
    )
    assert added(before, after, "request_duration_seconds_count") == 3
    assert added(before, after, "time_to_first_token_seconds_count") == 3
    drafted = added(before, after, "num_draft_tokens_total", drafter="model", temperature="0")
    assert drafted == told[0].num_drafted > 0


async def test_target_and_draft_service_count_what_the_router_counts(services: Services) -> None:
    assert services.drafts is not None
    ports = (services.target.meters.port, services.drafts.meters.port)
    before = [await scrape(port) for port in ports]
    told = await usages(services)
    await services.all_is_free()
    after = [await scrape(port) for port in ports]
    target, drafts = zip(before, after, strict=True)
    for name, field in [
        ("emitted_tokens", "num_emitted"),
        ("draft_tokens", "num_drafted"),
        ("accepted_tokens", "num_accepted"),
        ("prefix_hit_tokens", "num_cached_tokens"),
    ]:
        expected = sum(getattr(usage, field) for usage in told)
        if field != "num_cached_tokens":
            assert added(*target, f"target_{name}_total") == expected
        else:
            assert added(*target, f"target_{name}_total") >= expected
    assert added(*target, "target_step_seconds_count", part="step") > 0
    assert total(after[0], "target_free_blocks") == total(after[0], "target_blocks") == 64
    assert added(*drafts, "drafter_tokens_total", drafter="model") >= told[0].num_drafted
    assert added(*drafts, "drafter_seconds_count") == added(*drafts, "drafter_drafts_total")


async def test_requests_that_are_refused_or_taken_back_are_counted_as_such(services: Services) -> None:
    before = await scrape_router(services)
    with pytest.raises(grpc.aio.AioRpcError):
        await services.generate(request_for(temperature=9))
    call = services.router.call(request_for(max_tokens=200, ignore_eos=True))
    await call.read()
    call.cancel()
    await services.all_is_free()
    after = await scrape_router(services)
    outcomes = ["finished", "cancelled", "failed", "refused"]
    counted = [added(before, after, "requests_total", outcome=each) for each in outcomes]
    assert counted == [0, 1, 0, 1]


async def test_a_client_can_not_make_series_without_bound(services: Services) -> None:
    for number in range(MAX_TRAFFIC_CLASSES + 10):
        request = speculating(request_for(temperature=0, max_tokens=1), 0, NGRAM)
        request.speculation.traffic_class = f'class "{number}" \\'
        await services.generate_one(request)
    series = await scrape_router(services)
    classes = {dict(labels)["traffic_class"] for name, labels in series if name.endswith("num_rounds_total")}
    assert len(classes) <= MAX_TRAFFIC_CLASSES + 2
    assert total(series, "num_rounds_total", traffic_class="other") >= 9


async def test_a_bucket_leads_to_a_trace(model: Path) -> None:
    with collector() as spans:
        async with Services.started(model, otlp_endpoint=spans.address, **SCRAPED) as services:
            request = request_for(temperature=0, max_tokens=4)
            call = services.router.stub.Generate(request, metadata=[("traceparent", PARENT)])
            while await call.read() is not grpc.aio.EOF:
                pass
            meters = router_of(services).meters
            assert meters is not None
            text = await asyncio.to_thread(scraped, meters.port, OPENMETRICS)
    exemplars = {
        sample.exemplar.labels["trace_id"]
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert exemplars == {PARENT.split("-")[1]} == {span.trace_id for span in spans.requests}


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def numbers(self, service: str) -> dict[str, float]:
        """Sums over series of what a service sent last."""
        found: dict[str, float] = {}
        for request in self.requests:
            (resource,) = request.resource_metrics
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            if names["service.name"] != service:
                continue
            for metric in resource.scope_metrics[0].metrics:
                kind = metric.WhichOneof("data")
                points = getattr(metric, kind).data_points
                if kind == "histogram":
                    found[metric.name] = sum(point.count for point in points)
                else:
                    found[metric.name] = sum(point.as_double or point.as_int for point in points)
        return found


async def test_a_collector_gets_the_same_numbers(model: Path, other_model: Path) -> None:
    taken = MetricsCollector()
    server = grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sent = {"otlp_endpoint": f"127.0.0.1:{port}", "otlp_metrics_seconds": 3600}
    async with Services.started(model, other_model, target=sent, draft=sent, **sent) as services:
        told = await usages(services)
    await server.stop(None)
    router, target = taken.numbers("specdecode-router"), taken.numbers("specdecode-target")
    assert router["specdecode_num_emitted_tokens"] == sum(usage.num_emitted for usage in told)
    assert target["specdecode_target_emitted_tokens"] == sum(usage.num_emitted for usage in told)
    assert router["specdecode_time_to_first_token_seconds"] == 3
    assert "specdecode_drafter_tokens" in taken.numbers("specdecode-draft")


async def test_a_port_that_is_taken_is_refused_by_name(services: Services) -> None:
    taken = services.target.meters.port
    with pytest.raises(InvalidArgumentError, match=f"metrics_port: can't listen on 127.0.0.1:{taken}"):
        Meters(RouterSettings(metrics_port=taken), list)


async def test_text_is_what_was_counted() -> None:
    observed = Histogram((0.5, 2.0))
    for value in (0.1, 0.5, 1.0, 7.0):
        observed.observe(value)
    families = [counter("a", "A", observed.sample()), histogram("h", "H", observed.sample(part="x"))]
    text, content_type = render(families[1:])
    assert "text/plain" in content_type
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'h_bucket{le="0.5",part="x"} 2.0',
        'h_bucket{le="2",part="x"} 3.0',
        'h_bucket{le="+Inf",part="x"} 4.0',
        'h_count{part="x"} 4.0',
        'h_sum{part="x"} 8.6',
    ]
