"""Metrics as Prometheus reads them: text, and a port of a service's own that gives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar

from specdecode.errors import InvalidArgumentError
from specdecode.telemetry.metrics import Collect, Distribution, Exemplar, Family, Sample

_INFINITY = "+Inf"


def render(families: Iterable[Family], accept: str = "") -> tuple[bytes, str]:
    """The text of an exposition and its content type.

    Args:
        accept: the request's Accept header: OpenMetrics, which alone has exemplars, or Prometheus' own text.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_registry(lambda: families)), content_type


class MetricsServer:
    """Answers scrapes on a port of its own, in threads of its own.

    Attributes:
        port: listened on.
    """

    def __init__(self, host: str, port: int, collect: Collect) -> None:
        """Listens at once.

        Raises:
            InvalidArgumentError: the address can't be listened on.
        """
        try:
            self._server, self._thread = start_http_server(port, host, _registry(collect))
        except OSError as error:
            reason = f"can't listen on {host}:{port}: {error.strerror}"
            raise InvalidArgumentError.of("metrics_port", reason) from None
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Families(Collector):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._collect())


def _registry(collect: Collect) -> CollectorRegistry:
    registry = CollectorRegistry()
    # Nothing is collected to register it.
    registry.register(_Families(collect))
    return registry


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    suffix = "_total" if family.kind == "counter" else ""
    for sample in family.samples:
        if isinstance(sample.value, Distribution):
            _add_distribution(metric, sample, sample.value)
        else:
            metric.add_sample(family.name + suffix, dict(sample.labels), sample.value)
    return metric


def _add_distribution(metric: Metric, sample: Sample, value: Distribution) -> None:
    labels = dict(sample.labels)
    bounds = [*(f"{bound:g}" for bound in value.bounds), _INFINITY]
    exemplars = value.exemplars or (None,) * len(bounds)
    for bound, count, exemplar in zip(bounds, accumulate(value.counts), exemplars, strict=True):
        told = None if exemplar is None else _exemplar(exemplar)
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count, exemplar=told)
    metric.add_sample(f"{metric.name}_count", labels, sum(value.counts))
    metric.add_sample(f"{metric.name}_sum", labels, value.total)


def _exemplar(exemplar: Exemplar) -> PrometheusExemplar:
    ids = {
        "trace_id": f"{exemplar.context.trace_id:032x}",
        "span_id": f"{exemplar.context.span_id:016x}",
    }
    return PrometheusExemplar(ids, exemplar.value, exemplar.time)
