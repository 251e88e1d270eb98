"""What the runs of the concurrency sweep say: ratios turn by turn, and the bars on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.results import Bar, Estimate, bar_of, median_of, paired_ratio

OFF = "off"
AUTO = "auto"
SLOWEST_OF_BEST = 0.97
SLOWEST_OF_OFF = 0.98


class Load(StrEnum):
    """What is asked for."""

    COPY_HEAVY = "copy-heavy"
    CHAT = "chat, temperature 0"
    SAMPLED = "chat, sampled"
    MIXED = "half copy-heavy, half chat"


@dataclass(frozen=True)
class Run:
    """One run as it goes into the results."""

    configuration: str
    load: str
    concurrency: int
    repeat: int
    seconds: float
    tokens_per_second: float
    num_drafted: int
    num_accepted: int
    num_rounds: int


@dataclass(frozen=True)
class Cell:
    """One load at one concurrency.

    Attributes:
        speeds: tokens a second of each configuration.
        best: the configuration without a decision that was fastest on the odd turns.
        against_best: auto over that on the even turns.
        against_off: auto over off, all turns.
        against: auto over each configuration, all turns.
    """

    load: Load
    concurrency: int
    speeds: dict[str, Estimate]
    best: str
    against_best: Estimate
    against_off: Estimate
    against: dict[str, Estimate]
    draft_length: float
    """Mean γ of auto's rounds."""


class SweepFigures:
    """Cells and bars of a sweep."""

    def __init__(
        self, runs: Sequence[Run], configurations: Sequence[str], cells: Sequence[tuple[Load, int]]
    ) -> None:
        self._runs = sorted(runs, key=lambda run: run.repeat)
        self.configurations = tuple(configurations)
        self.cells = [self._cell(load, concurrency) for load, concurrency in cells]

    def _of(self, configuration: str, load: Load, concurrency: int) -> list[Run]:
        cell = (configuration, load, concurrency)
        return [run for run in self._runs if (run.configuration, run.load, run.concurrency) == cell]

    def _cell(self, load: Load, concurrency: int) -> Cell:
        runs = {c: self._of(c, load, concurrency) for c in self.configurations}
        fixed = [c for c in self.configurations if c != AUTO]

        def speeds(configuration: str, rest: int | None = None) -> list[float]:
            return [r.tokens_per_second for r in runs[configuration] if rest is None or r.repeat % 2 == rest]

        best = max(fixed, key=lambda c: median_of(speeds(c, 1)).value)
        drafted, rounds = (sum(getattr(r, n) for r in runs[AUTO]) for n in ("num_drafted", "num_rounds"))
        return Cell(
            load=load,
            concurrency=concurrency,
            speeds={c: median_of(speeds(c)) for c in self.configurations},
            best=best,
            against_best=paired_ratio(speeds(AUTO, 0), speeds(best, 0)),
            against_off=paired_ratio(speeds(AUTO), speeds(OFF)),
            against={c: paired_ratio(speeds(AUTO), speeds(c)) for c in fixed},
            draft_length=round(drafted / rounds, 3),
        )

    def to_json(self) -> list[dict[str, Any]]:
        """One entry a cell."""
        return [
            {
                "load": cell.load,
                "concurrency": cell.concurrency,
                "tokens_per_second": {name: speed.to_json() for name, speed in cell.speeds.items()},
                "best_fixed": cell.best,
                "auto / best fixed": cell.against_best.to_json(),
                "auto / off": cell.against_off.to_json(),
                "mean_draft_length_of_auto": cell.draft_length,
            }
            for cell in self.cells
        ]

    def bars(self) -> list[Bar]:
        """What is promised of the decision."""
        plain = [cell for cell in self.cells if cell.load is not Load.MIXED]
        slower = sum(cell.against_best.high < SLOWEST_OF_BEST for cell in plain)
        below_off = sum(cell.against_off.high < SLOWEST_OF_OFF for cell in plain)
        mean = math.exp(math.fsum(math.log(cell.against_best.value) for cell in plain) / len(plain))
        bars = [
            Bar(f"cells in which auto / best fixed lies below {SLOWEST_OF_BEST}", slower, 0, "at_most"),
            Bar("geometric mean of auto / best fixed over all cells", mean, 0.99, "at_least"),
            Bar(f"cells in which auto / off lies below {SLOWEST_OF_OFF}", below_off, 0, "at_most"),
        ]
        for cell in self.cells:
            if cell.load is Load.MIXED:
                name, ratio = min(cell.against.items(), key=lambda item: item[1].value)
                what = f"mixed load, {cell.concurrency} at once: auto / fastest other ({name})"
                bars.append(bar_of(what, ratio, 0.98, "at_least"))
        return bars
