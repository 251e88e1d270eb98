"""Metrics sent by OTLP over gRPC, now and then. Imports the SDK."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import cast

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar as OtlpExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from specdecode.telemetry.metrics import Collect, Distribution, Exemplar, Family, Sample
from specdecode.telemetry.otlp import SCOPE, endpoint_url

logger = logging.getLogger(__name__)

_UNKNOWN = cast(float, None)  # left out on the wire
_CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsSender:
    """Sends what a service counted every `seconds`, from a thread of its own, and once more at the end."""

    def __init__(self, endpoint: str, service: Mapping[str, str], seconds: float, collect: Collect) -> None:
        self._resource = Resource.create(dict(service))
        self._exporter = OTLPMetricExporter(endpoint=endpoint_url(endpoint))
        self._seconds = seconds
        self._collect = collect
        self._began = time.time_ns()
        self._closing = threading.Event()
        self._works = True
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends once more, within seconds, unless the collector took nothing last time."""
        self._closing.set()
        self._thread.join(5.0 if self._works else 1.0)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._send()
        if self._works:
            self._send()

    def _send(self) -> None:
        try:
            data = _metrics_data(self._collect(), self._resource, self._began)
            works = self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:
            logger.exception("metrics could not be made or sent")
            works = False
        if works is not self._works:
            logger.warning("the collector takes metrics %s", "again" if works else "no more; trying on")
        self._works = works


def _metrics_data(families: Iterable[Family], resource: Resource, began: int) -> MetricsData:
    now = time.time_ns()
    metrics = [Metric(family.name, family.help, "", _data(family, began, now)) for family in families]
    scope = ScopeMetrics(SCOPE, metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _data(family: Family, began: int, now: int) -> Sum | Gauge | Histogram:
    if family.kind == "histogram":
        points = [_distribution(sample, began, now) for sample in family.samples]
        return Histogram([point for point in points if point is not None], _CUMULATIVE)
    numbers = [
        NumberDataPoint(sample.labels, began, now, sample.value)
        for sample in family.samples
        if not isinstance(sample.value, Distribution)
    ]
    return Gauge(numbers) if family.kind == "gauge" else Sum(numbers, _CUMULATIVE, True)


def _distribution(sample: Sample, began: int, now: int) -> HistogramDataPoint | None:
    value = sample.value
    if not isinstance(value, Distribution):
        return None
    return HistogramDataPoint(
        attributes=sample.labels,
        start_time_unix_nano=began,
        time_unix_nano=now,
        count=sum(value.counts),
        sum=value.total,
        bucket_counts=value.counts,
        explicit_bounds=value.bounds,
        min=_UNKNOWN,
        max=_UNKNOWN,
        exemplars=[_exemplar(exemplar) for exemplar in value.exemplars if exemplar is not None],
    )


def _exemplar(exemplar: Exemplar) -> OtlpExemplar:
    context = exemplar.context
    nanoseconds = int(exemplar.time * 1e9)
    return OtlpExemplar({}, exemplar.value, nanoseconds, context.span_id, context.trace_id)
