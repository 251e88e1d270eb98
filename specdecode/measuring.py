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
_HELD_UP = 1.5
"""A repeat that takes so many times as long as the fastest one was held up."""
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
    """Medians of repeats that go over all points in turn, so that a machine that gets slower for a while
    slows every point down alike.

    The first repeat only warms up, where two more follow. Each of the first three may use its share of what
    is left of the budget and ends there: the last points are then measured less often, or not at all. Time
    between two calls of `advance` does not count.

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
        self._coming = list(points)
        self._repeats = 0
        self._spent = 0.0
        self._repeat_ends = seconds / _WANTED_REPEATS

    @property
    def progress(self) -> float:
        """Share of the budget, or of the repeats, that is used up; 1 when there will be no more."""
        if not self._coming:
            return 1.0
        passed = (self._repeats + 1 - len(self._coming) / len(self._points)) / _MOST_REPEATS
        return min(max(self._spent / self._budget, passed), 0.999)

    def advance(self) -> None:
        """Measures the next point, once."""
        began = self._clock()
        point = self._coming.pop(0)
        self._values.setdefault(point, []).append(self._measure(point))
        self._spent += self._clock() - began
        measured = len(self._points) - len(self._coming)
        if not self._coming or (self._spent >= self._repeat_ends and measured >= _KEPT_POINTS):
            self._end_repeat()

    def medians(self) -> dict[P, float]:
        """Seconds of every point that was measured more than once, as soon as two of them were; in the order
        given.
        """
        counted = {point: values for point, values in self._values.items() if len(values) > 1}
        if len(counted) < _KEPT_POINTS:
            counted = self._values
        return {point: _usual(counted[point]) for point in self._points if point in counted}

    def _end_repeat(self) -> None:
        self._repeats += 1
        goes_on = self._repeats < _MOST_REPEATS and self._spent < self._budget
        self._coming = list(self._points) if goes_on else []
        left = self._budget - self._spent
        self._repeat_ends = self._spent + left / max(_WANTED_REPEATS - self._repeats, 1)


def _usual(values: Sequence[float]) -> float:
    """The median of the repeats that nothing held up: neither what is set up lazily in the first, where there
    are more than two, nor another process (a step of two threads that has to share a core with one takes 50
    times as long).
    """
    undisturbed = [value for value in values if value <= _HELD_UP * min(values)]
    return statistics.median(undisturbed[1:] if len(undisturbed) > 2 else [min(undisturbed)])


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
