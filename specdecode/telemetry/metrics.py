"""Metrics as plain data: what a service has counted when it is asked.

Counters first: ratios are left to queries. Histograms are observed by one thread, without a lock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specdecode.telemetry.context import TraceContext

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of histograms of seconds."""
TOKENS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 33.0)
"""Bounds of histograms of a round's tokens."""


@dataclass(frozen=True)
class Exemplar:
    """One observation that leads to a trace; `time` in seconds since the epoch."""

    value: float
    time: float
    context: TraceContext


@dataclass(frozen=True)
class Distribution:
    """Observations by bucket.

    Attributes:
        bounds: highest value of each bucket but the last, which has none.
        counts: one more than bounds.
        exemplars: of each bucket the newest, None without one; or none at all.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    exemplars: Sequence[Exemplar | None] = ()


@dataclass(frozen=True)
class Sample:
    """One series' value."""

    value: float | Distribution
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """All series of one name; a counter's name has no `_total`, which Prometheus adds."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    samples: tuple[Sample, ...]


Collect = Callable[[], Iterable[Family]]
"""What a service counted so far; may be called from any thread."""


def counter(name: str, what: str, *samples: Sample) -> Family:
    """A family of counters."""
    return Family(name, what, "counter", samples)


def gauge(name: str, what: str, *samples: Sample) -> Family:
    """A family of gauges."""
    return Family(name, what, "gauge", samples)


def histogram(name: str, what: str, *samples: Sample) -> Family:
    """A family of histograms."""
    return Family(name, what, "histogram", samples)


class Histogram:
    """Observations of one series."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, value: float, context: TraceContext | None = None) -> None:
        """Counts a value; `context` is that of a trace that tells of it."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._total += value
        if context is not None:
            self._exemplars[bucket] = Exemplar(value, time.time(), context)

    def sample(self, **labels: str) -> Sample:
        """What was counted so far."""
        counts, exemplars = tuple(self._counts), tuple(self._exemplars)
        return Sample(Distribution(self._bounds, counts, self._total, exemplars), labels)
