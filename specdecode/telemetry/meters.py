"""Where a service's metrics go: a port that Prometheus scrapes, a collector, both or neither."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdecode.config import ServiceSettings
from specdecode.telemetry.exposition import MetricsServer
from specdecode.telemetry.metrics import Collect, Family
from specdecode.telemetry.tracing import Tracing, describe_service

if TYPE_CHECKING:
    from specdecode.telemetry.otlp_metrics import MetricsSender

logger = logging.getLogger(__name__)

_COLLECT_SECONDS = 10.0


class Meters:
    """Gives a service's metrics to whoever the settings name.

    Attributes:
        port: that Prometheus scrapes; None: there is none.
    """

    def __init__(self, settings: ServiceSettings, collect: Collect) -> None:
        """Starts at once; `collect` is called from threads of its own.

        Raises:
            InvalidArgumentError: the metrics' port can't be listened on.
        """
        self._server: MetricsServer | None = None
        self._sender: MetricsSender | None = None
        if settings.metrics_port is not None:
            self._server = MetricsServer(settings.host, settings.metrics_port, collect)
            logger.info("metrics on %s:%d", settings.host, self._server.port)
        if settings.otlp_endpoint is not None and settings.otlp_metrics_seconds:
            from specdecode.telemetry.otlp_metrics import MetricsSender

            service, seconds = describe_service(settings), settings.otlp_metrics_seconds
            self._sender = MetricsSender(settings.otlp_endpoint, service, seconds, collect)

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    def close(self) -> None:
        """Tells the collector the last of it and stops listening. Not within the event loop."""
        if self._sender is not None:
            self._sender.close()
        if self._server is not None:
            self._server.close()


def within(loop: asyncio.AbstractEventLoop, collect: Collect) -> Collect:
    """The same, run within an event loop whose data it reads, for callers in other threads."""

    async def run() -> list[Family]:
        return list(collect())

    def collect_there() -> Iterable[Family]:
        return asyncio.run_coroutine_threadsafe(run(), loop).result(_COLLECT_SECONDS)

    return collect_there


def close_telemetry(tracing: Tracing | None, meters: Meters) -> None:
    """Sends what is left, and ends both; waits for it."""
    meters.close()
    if tracing is not None:
        tracing.close()
