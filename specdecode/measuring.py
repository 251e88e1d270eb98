"""Times of many points, each measured again and again within one budget of seconds."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from specdecode.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

_MOST_REPEATS = 15
_WANTED_REPEATS = 3
_FIRST_SHARE = 0.4
"""Of the budget that the first repeat, which finds out how long each point takes, may use."""
_KEPT_POINTS = 2
"""Never given up: through one point there is no line."""
_NEWS_SHARE = 0.25

P = TypeVar("P", bound=Hashable)


class Work(Protocol):
    """Something that is done piece by piece."""

    @property
    def progress(self) -> float:
        """Share that is done, in [0, 1]; 1 at the end only."""

    def advance(self) -> None:
        """Does the next piece."""


class InterleavedMedians(Generic[P]):
    """Medians of repeats that go over all points in turn, there and back, so that a machine that gets slower
    for a while slows every point down alike.

    The first repeat only warms up, where two more follow. Points that would leave no time for three repeats
    are given up, the last ones first. Time between two calls of `advance` does not count.

    Args:
        points: in rising order of what they cost, as far as known; at least two.
        measure: runs a point once; the seconds that count.
        seconds: budget, what `measure` does around those seconds included.
        clock: seconds.
    """

    def __init__(
        self,
        points: Sequence[P],
        measure: Callable[[P], float],
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if len(points) < _KEPT_POINTS:
            raise InvalidArgumentError.of("points", f"{len(points)} points; at least {_KEPT_POINTS}")
        if not seconds > 0:
            raise InvalidArgumentError.of("seconds", f"{seconds} is not above 0")
        self._points = list(points)
        self._measure = measure
        self._budget = seconds
        self._clock = clock
        self._values: dict[P, list[float]] = {}
        self._took: dict[P, float] = {}
        self._coming = list(points)
        self._repeats = 0
        self._spent = 0.0

    @property
    def done(self) -> bool:
        """Whether there is no time, or no need, for another repeat."""
        return not self._coming

    @property
    def progress(self) -> float:
        """Share of the budget, or of the repeats, that is used up; 1 when done."""
        if self.done:
            return 1.0
        passed = (self._repeats + 1 - len(self._coming) / len(self._points)) / _MOST_REPEATS
        return min(max(self._spent / self._budget, passed), 0.999)

    def advance(self) -> None:
        """Measures the next point, once."""
        began = self._clock()
        point = self._coming.pop(0)
        self._values.setdefault(point, []).append(self._measure(point))
        self._took[point] = self._clock() - began
        self._spent += self._took[point]
        if self._repeats == 0 and self._spent > _FIRST_SHARE * self._budget:
            self._give_up(self._coming[max(_KEPT_POINTS - len(self._values), 0) :])
        elif self._repeats > 0 and self._spent > self._budget:
            self._coming = []
            return
        if not self._coming:
            self._begin_repeat()

    def medians(self) -> dict[P, float]:
        """Seconds of every point that was measured, in the order given."""
        medians = {}
        for point in self._points:
            values = self._values.get(point, [])
            if values:
                # Of two, the first may have paid for what is set up lazily.
                medians[point] = statistics.median(values[1:]) if len(values) > 2 else min(values)
        return medians

    def _begin_repeat(self) -> None:
        self._repeats += 1
        if self._repeats == 1:
            self._keep_affordable()
        left = self._budget - self._spent
        if self._repeats < _MOST_REPEATS and sum(self._took[point] for point in self._points) <= left:
            self._coming = self._points[:: -1 if self._repeats % 2 else 1]

    def _keep_affordable(self) -> None:
        left = self._budget - self._spent
        while len(self._points) > _KEPT_POINTS:
            if _WANTED_REPEATS * sum(self._took[point] for point in self._points) <= left:
                break
            self._give_up(self._points[-1:])

    def _give_up(self, points: Sequence[P]) -> None:
        gone = set(points)
        self._points = [point for point in self._points if point not in gone]
        self._coming = [point for point in self._coming if point not in gone]


Runner = Callable[[Work, str], None]
"""Does all of some work, and shows how far it is under a name."""


class StoppedError(Exception):
    """Nobody waits for what was measured any more."""


def never() -> bool:
    """What is asked whether to stop where nobody could want that."""
    return False


def run_logged(work: Work, what: str, stopped: Callable[[], bool] = never) -> None:
    """Does all of it, with a line in the log now and then.

    Raises:
        StoppedError: before the next piece, once `stopped` says so.
    """
    told = 0.0
    logger.info("%s", what)
    while work.progress < 1:
        if stopped():
            raise StoppedError
        work.advance()
        if work.progress >= told + _NEWS_SHARE:
            told = work.progress
            logger.info("%s: %.0f %%", what, 100 * told)
