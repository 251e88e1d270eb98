"""What the runs of the throughput benchmark say: medians, ratios turn by turn, bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

from benchmarks.pictures import Panel
from benchmarks.prompts import PromptKind
from benchmarks.results import Bar, Estimate, bar_of, median_of, paired_ratio


class Configuration(StrEnum):
    """What is measured."""

    TRANSFORMERS = "transformers generate"
    IN_PROCESS = "engine in process"
    OFF = "services, speculation off"
    NGRAM = "services, n-gram"


SERVICES = (Configuration.OFF, Configuration.NGRAM)
RATIOS = {
    "off / transformers": (Configuration.OFF, Configuration.TRANSFORMERS),
    "off / in process": (Configuration.OFF, Configuration.IN_PROCESS),
    "n-gram / off": (Configuration.NGRAM, Configuration.OFF),
}
_MANY = 32


@dataclass(frozen=True)
class Options:
    """What to measure."""

    concurrencies: tuple[int, ...]
    max_tokens: int
    repeats: int
    model: str
    device: str
    dtype: str
    threads: int
    full: bool
    """Whether copy-heavy prompts are given to transformers as well."""

    def repeats_at(self, concurrency: int) -> int:
        """Turns: more where a run is one prompt, whose own speed varies the most; fewer where it is many."""
        if concurrency == 1:
            return self.repeats * 2
        return -(-self.repeats * 3 // 5) if concurrency >= _MANY else self.repeats

    def configurations(self, kind: PromptKind) -> tuple[Configuration, ...]:
        """What is measured on a kind of prompts.

        The engine in process gets all that the services get: a pool whose blocks were used before is slower.
        """
        if self.full or kind is PromptKind.FREE_FORM:
            return tuple(Configuration)
        return (Configuration.IN_PROCESS, *SERVICES)


@dataclass(frozen=True)
class Run:
    """One run as it goes into the results."""

    configuration: str
    kind: str
    concurrency: int
    repeat: int
    seconds: float
    tokens_per_second: float
    usage: dict[str, int]
    num_held_blocks: int | None
    agreement: float
    """Share of each text before it parts from that of speculation off, on average: in bfloat16 ties part."""


class Summary:
    """Medians and ratios of the runs."""

    def __init__(self, runs: Sequence[Run], options: Options) -> None:
        self._runs = sorted(runs, key=lambda run: run.repeat)
        self._options = options
        self._cells = list(product(PromptKind, options.concurrencies))

    def _of(self, configuration: Configuration, kind: PromptKind, concurrency: int) -> list[Run]:
        cell = (configuration, kind, concurrency)
        return [run for run in self._runs if (run.configuration, run.kind, run.concurrency) == cell]

    def speed(self, configuration: Configuration, kind: PromptKind, concurrency: int) -> Estimate:
        """Tokens a second."""
        return median_of([r.tokens_per_second for r in self._of(configuration, kind, concurrency)])

    def ratio(
        self, above: Configuration, below: Configuration, kind: PromptKind, concurrency: int
    ) -> Estimate:
        """Of speeds, turn by turn."""
        return paired_ratio(
            *([r.tokens_per_second for r in self._of(c, kind, concurrency)] for c in (above, below))
        )

    def to_json(self) -> list[dict[str, Any]]:
        """One entry a cell."""
        return [self._cell(kind, concurrency) for kind, concurrency in self._cells]

    def _cell(self, kind: PromptKind, concurrency: int) -> dict[str, Any]:
        measured = self._options.configurations(kind)
        runs = {c: self._of(c, kind, concurrency) for c in measured}
        ratios = {n: pair for n, pair in RATIOS.items() if set(pair) <= set(measured)}
        return {
            "kind": kind,
            "concurrency": concurrency,
            "tokens_per_second": {c: self.speed(c, kind, concurrency).to_json() for c in measured},
            "ratios": {n: self.ratio(*pair, kind, concurrency).to_json() for n, pair in ratios.items()},
            "n-gram": _acceptance(runs[Configuration.NGRAM]),
            "agreement_with_off": {
                c: round(sum(run.agreement for run in runs[c]) / len(runs[c]), 4)
                for c in measured
                if c is not Configuration.OFF
            },
        }

    def panels(self) -> list[list[Panel]]:
        """A row for each kind of prompt."""
        kinds = dict.fromkeys(kind for kind, _ in self._cells)
        return [[self._panel(*cell) for cell in self._cells if cell[0] is kind] for kind in kinds]

    def _panel(self, kind: PromptKind, concurrency: int) -> Panel:
        measured = self._options.configurations(kind)
        speeds = {c.value: self.speed(c, kind, concurrency) for c in measured}
        return Panel(f"{kind}, {concurrency} at once", {"": speeds})


def _acceptance(runs: Sequence[Run]) -> dict[str, float]:
    def total(name: str) -> int:
        return sum(run.usage[name] for run in runs)

    return {
        "emitted_per_round": round(total("num_emitted") / total("num_rounds"), 3),
        "acceptance": round(total("num_accepted") / max(total("num_drafted"), 1), 4),
    }


def bars_of(summary: Summary, runs: Sequence[Run], waste: Mapping[str, float], options: Options) -> list[Bar]:
    """What is promised about these figures."""
    bars = []
    for concurrency in options.concurrencies:
        at = f"{PromptKind.FREE_FORM}, {concurrency} at once"
        off = (PromptKind.FREE_FORM, concurrency)
        against = summary.ratio(Configuration.OFF, Configuration.TRANSFORMERS, *off)
        bound = 1.05 if concurrency == 1 else 1.2
        bars.append(bar_of(f"{at}: services off / transformers generate", against, bound, "at_least"))
        cost = summary.ratio(Configuration.OFF, Configuration.IN_PROCESS, *off)
        bars.append(bar_of(f"{at}: services off / engine in process", cost, 0.92, "at_least"))
    if 1 in options.concurrencies:
        gain = summary.ratio(Configuration.NGRAM, Configuration.OFF, PromptKind.COPY_HEAVY, 1)
        bars.append(bar_of(f"{PromptKind.COPY_HEAVY}, 1 at once: n-gram / off", gain, 1.4, "at_least"))
    bars.append(Bar("KV blocks wasted by a sequence, worst moment", max(waste.values()), 1.0, "at_most"))
    held = max(run.num_held_blocks or 0 for run in runs)
    bars.append(Bar("KV blocks still held after a run", held, 0.0, "at_most"))
    return bars
