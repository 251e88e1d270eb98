"""Planned runs with an honest time left: guesses are scaled by how the guesses for past runs turned out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Step:
    """One planned run.

    Attributes:
        what: shown while it runs.
        cell: runs of one cell take about equally long.
        guess: seconds, before anything is known.
    """

    what: str
    cell: Hashable
    guess: float


class Forecast:
    """Seconds that steps will take."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, list[float]] = defaultdict(list)
        self._taken = 0.0
        self._guessed = 0.0

    def note(self, step: Step, seconds: float) -> None:
        """A step has been run."""
        self._seconds[step.cell].append(seconds)
        self._taken += seconds
        self._guessed += step.guess

    def remaining(self, steps: Sequence[Step]) -> float:
        """Seconds that these will take: as long as others of their cell, else as guessed, times how wrong
        guesses have been.
        """
        scale = self._taken / self._guessed if self._guessed else 1.0
        return sum(self._expected(step, scale) for step in steps)

    def _expected(self, step: Step, scale: float) -> float:
        seconds = self._seconds.get(step.cell)
        return sum(seconds) / len(seconds) if seconds else step.guess * scale


S = TypeVar("S", bound=Step)


class Display(Generic[S]):
    """A progress bar that is drawn between runs only: a display that draws itself would be measured too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._forecast = Forecast()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            auto_refresh=False,
        )

    def __enter__(self) -> Display[S]:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self._progress.console.print(text)

    def follow(self, steps: Sequence[S]) -> Iterator[S]:
        """Yields the steps to run in order, and times them."""
        task = self._progress.add_task("", total=len(steps), left="")
        for index, step in enumerate(steps):
            left = self._forecast.remaining(steps[index:])
            self._progress.update(task, description=step.what, left=_left(left), refresh=True)
            began = self._clock()
            yield step
            self._forecast.note(step, self._clock() - began)
            self._progress.update(task, advance=1, refresh=True)
        self._progress.update(task, description="measured", left="", refresh=True)


def _left(seconds: float) -> str:
    return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
