"""A thread that sends spans by OTLP, and never keeps anybody waiting.

What is handed in beyond a bound is dropped, as is what the collector does not take in time; both are counted,
and told by a warning now and then. A collector that is down, or comes and goes, costs nothing but spans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specdecode import __version__
from specdecode.config import ServiceSettings
from specdecode.telemetry.context import new_trace_id
from specdecode.telemetry.spans import SpanRecord

if TYPE_CHECKING:
    from specdecode.telemetry.otlp import SpanSender

logger = logging.getLogger(__name__)

Build = Callable[[], Sequence[SpanRecord]]
"""Makes the spans, in the exporting thread."""

_MAX_WAITING = 8192
_MAX_BATCH = 512
_GATHER_SECONDS = 0.5
"""Spans wait this long for others to travel with them."""
_CLOSE_SECONDS = 5.0
"""The last spans have this long to be sent; a collector that took none of those before has a fifth of it."""
_WARN_SECONDS = 60.0
_INSTANCE_ID = f"{new_trace_id():032x}"
"""Of this process."""


class _Handed(NamedTuple):
    build: Build
    num_spans: int


class Tracing:
    """Where finished spans go.

    Attributes:
        num_sent: spans that the collector took.
        num_dropped: spans that it did not take, or that found too many before them.
    """

    def __init__(self, sender: SpanSender, max_waiting: int = _MAX_WAITING) -> None:
        """Starts the thread; `max_waiting` spans may wait for it."""
        self.num_sent = 0
        self.num_dropped = 0
        self._sender = sender
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._handed: deque[_Handed] = deque()
        self._num_waiting = 0
        self._closing = False
        self._works = True
        self._dropped_told = 0
        self._told_at = -_WARN_SECONDS
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def submit(self, build: Build, num_spans: int) -> None:
        """Takes spans that are yet to be built; from any thread, never waits for the collector."""
        with self._changed:
            if self._closing or self._num_waiting + num_spans > self._max_waiting:
                self.num_dropped += num_spans
                return
            self._handed.append(_Handed(build, num_spans))
            self._num_waiting += num_spans
            if len(self._handed) == 1 or self._num_waiting >= _MAX_BATCH:
                self._changed.notify()

    def close(self) -> None:
        """Sends what is there, within seconds, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS if self._works else _CLOSE_SECONDS / 5)
        # Ends also what is being sent.
        self._sender.close()
        self._thread.join(_CLOSE_SECONDS)
        with self._changed:
            self.num_dropped += self._num_waiting
            self._num_waiting = 0
            self._handed.clear()
        self._tell(at_once=True)

    def _run(self) -> None:
        while handed := self._next():
            records: list[SpanRecord] = []
            num_spans = sum(batch.num_spans for batch in handed)
            try:
                for batch in handed:
                    records += batch.build()
                self._works = self._sender.send(records)
            except Exception:
                logger.exception("spans could not be made or sent")
                self._works = False
            with self._changed:
                self.num_sent += num_spans if self._works else 0
                self.num_dropped += 0 if self._works else num_spans
            self._tell()

    def _next(self) -> list[_Handed]:
        """What is sent next; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed or self._closing)
            end = time.monotonic() + _GATHER_SECONDS
            self._changed.wait_for(self._is_full, max(end - time.monotonic(), 0))
            handed: list[_Handed] = []
            num_spans = 0
            while self._handed and (not handed or num_spans + self._handed[0].num_spans <= _MAX_BATCH):
                handed.append(self._handed.popleft())
                num_spans += handed[-1].num_spans
            self._num_waiting -= num_spans
            return handed

    def _is_full(self) -> bool:
        return self._closing or self._num_waiting >= _MAX_BATCH

    def _tell(self, at_once: bool = False) -> None:
        count = self.num_dropped - self._dropped_told
        if count and (at_once or time.monotonic() - self._told_at >= _WARN_SECONDS):
            self._dropped_told, self._told_at = self.num_dropped, time.monotonic()
            logger.warning("%d spans were dropped, %d since the start", count, self.num_dropped)


def start_tracing(settings: ServiceSettings) -> Tracing | None:
    """What sends a service's spans; None where the operator names no collector."""
    if settings.otlp_endpoint is None:
        return None
    from specdecode.telemetry.otlp import SpanSender

    return Tracing(SpanSender(settings.otlp_endpoint, describe_service(settings)))


def describe_service(settings: ServiceSettings) -> dict[str, str]:
    """Attributes of the resource that a service is."""
    return {
        "service.name": f"specdecode-{settings.section}",
        "service.namespace": "specdecode",
        "service.version": __version__,
        "service.instance.id": _INSTANCE_ID,
    }
