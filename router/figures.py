"""Counting what came of rounds, for one choice and for all. Pure: no clock, no I/O.

A choice counts its own rounds, a few additions each; the router takes the sums over when the choice ends, and
adds those of running choices when it is asked. Memory is bounded: there are as many labels as temperature
buckets, drafters, methods, and the first `MAX_TRAFFIC_CLASSES` traffic classes make; later ones share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from router.estimates import temperature_bucket
from router.reasons import DecisionReason
from router.regret import Outlook
from specdecode.figures import FigureLabel, Figures, Predictions, Regret
from specdecode.types import DrafterKind, Method, Origin, StepResult

if TYPE_CHECKING:
    from router.request import Round

MAX_TRAFFIC_CLASSES = 64
OTHER_CLASS = "other"
"""Where traffic classes beyond the first `MAX_TRAFFIC_CLASSES` are counted."""

FALLBACKS = frozenset(
    {
        DecisionReason.DRAFTER_UNAVAILABLE,
        DecisionReason.DRAFTER_LATE,
        DecisionReason.DRAFT_EMPTY,
        DecisionReason.DRAFT_INVALID,
    }
)
"""Reasons of rounds that wanted drafts and got none."""

_BUCKETS = ("0", "0-0.5", "0.5-0.9", "0.9-1.2", "1.2-2")


def bucket_name(temperature: float) -> str:
    """Where a temperature is counted: as estimates bucket it; a bucket's lower end belongs to it."""
    return _BUCKETS[temperature_bucket(temperature)]


@dataclass
class Tally:
    """Sums over rounds of one kind, as in `specdecode.figures.Figures`."""

    runs: list[list[int]] = field(default_factory=list)
    tested: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    reasons: Counter[DecisionReason] = field(default_factory=Counter)
    num_emitted: int = 0
    num_recovered: int = 0
    num_cut: int = 0
    num_fallbacks: int = 0
    num_timed: int = 0
    timed_emitted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    target_flops: float = 0.0
    num_predicted: int = 0
    predicted_emitted: float = 0.0
    predicted_seconds: float = 0.0
    emitted_of_predicted: int = 0
    seconds_of_predicted: float = 0.0
    num_regretted: int = 0
    expected: float = 0.0
    lost: list[float] = field(default_factory=list)

    def count(
        self, result: StepResult, origins: tuple[Origin, ...], round_: Round, seconds: float | None
    ) -> None:
        """Counts a result of which the tokens with these origins were kept.

        Args:
            result: of one round with drafts, or of one or more without (leased steps may come merged).
            origins: at least one.
            round_: what was known of it before.
            seconds: since the result before; None where that measures no round (a prompt was taken in).
        """
        drafted = result.num_drafted
        num_rounds = 1 if drafted else len(origins)
        self._count_run(drafted, origins.count(Origin.ACCEPTED), num_rounds)
        self.num_emitted += len(origins)
        self.num_recovered += origins[-1] is Origin.RECOVERED
        self.num_cut += origins[-1] is Origin.ACCEPTED
        self.num_fallbacks += num_rounds * (round_.reason in FALLBACKS)
        self.reasons[round_.reason] += num_rounds
        _add(self.tested, result.tested)
        _add(self.passed, result.passed)
        self.draft_seconds += round_.draft_seconds
        self.target_flops += 2.0 * round_.num_parameters * (drafted + num_rounds)
        if seconds is not None:
            self._count_seconds(seconds, result.times.step * num_rounds, len(origins), num_rounds)
            if round_.predicted_seconds > 0:
                self._count_prediction(round_, len(origins), seconds, num_rounds)
            if round_.outlook is not None:
                self._count_regret(round_.outlook)

    def _count_run(self, drafted: int, accepted: int, num_rounds: int) -> None:
        for length in range(len(self.runs), drafted + 1):
            self.runs.append([0] * (length + 1))
        self.runs[drafted][accepted] += num_rounds

    def _count_seconds(self, seconds: float, step_seconds: float, num_emitted: int, num_rounds: int) -> None:
        self.num_timed += num_rounds
        self.timed_emitted += num_emitted
        self.seconds += seconds
        self.step_seconds += step_seconds

    def _count_prediction(self, round_: Round, num_emitted: int, seconds: float, num_rounds: int) -> None:
        self.num_predicted += num_rounds
        self.predicted_emitted += round_.predicted_emitted * num_rounds
        self.predicted_seconds += round_.predicted_seconds * num_rounds
        self.emitted_of_predicted += num_emitted
        self.seconds_of_predicted += seconds

    def _count_regret(self, outlook: Outlook) -> None:
        self.num_regretted += 1
        self.expected += outlook.expected
        self._add_lost(outlook.lost)

    def merge(self, other: Tally) -> None:
        """Adds another's sums."""
        for length, counts in enumerate(other.runs):
            for accepted, num_rounds in enumerate(counts):
                self._count_run(length, accepted, num_rounds)
        for name in _PLAIN_SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        _add(self.tested, other.tested)
        _add(self.passed, other.passed)
        self._add_lost(other.lost)

    def _add_lost(self, lost: Sequence[float]) -> None:
        """A fixed γ beyond what a round could have had stands for the longest that it could."""
        if not lost:
            return
        depth = max(len(lost), len(self.lost))
        self.lost.extend([self.lost[-1] if self.lost else 0.0] * (depth - len(self.lost)))
        _add(self.lost, [*lost, *[lost[-1]] * (depth - len(lost))])

    def figures(self, label: FigureLabel) -> Figures:
        """What was counted so far."""
        return Figures(
            label=label,
            runs=tuple(map(tuple, self.runs)),
            num_emitted=self.num_emitted,
            num_recovered=self.num_recovered,
            num_cut=self.num_cut,
            num_fallbacks=self.num_fallbacks,
            tested=tuple(self.tested),
            passed=tuple(self.passed),
            reasons=tuple((reason.value, count) for reason, count in self.reasons.most_common()),
            num_timed=self.num_timed,
            timed_emitted=self.timed_emitted,
            seconds=self.seconds,
            draft_seconds=self.draft_seconds,
            step_seconds=self.step_seconds,
            target_flops=self.target_flops,
            predictions=Predictions(
                self.num_predicted,
                self.predicted_emitted,
                self.predicted_seconds,
                self.emitted_of_predicted,
                self.seconds_of_predicted,
            ),
            regret=Regret(self.num_regretted, self.expected, tuple(self.lost)),
        )


_PLAIN_SUMS = tuple(name for name, value in vars(Tally()).items() if isinstance(value, int | float))


def _add(sums: list[float], values: Iterable[float]) -> None:
    """Adds position by position; positions that were not there before start at 0."""
    values = tuple(values)
    sums.extend([0.0] * (len(values) - len(sums)))
    for position, value in enumerate(values):
        sums[position] += value


class ChoiceFigures:
    """Counts one choice's rounds, by who was asked for drafts.

    Args:
        temperature: of the request.
        traffic_class: of the request, "" without one.
        method: of verification.
    """

    def __init__(self, temperature: float, traffic_class: str, method: Method) -> None:
        self._bucket = bucket_name(temperature)
        self._traffic_class = traffic_class
        self._method = method
        self._tallies: dict[DrafterKind | None, Tally] = {}

    def count(
        self, result: StepResult, origins: tuple[Origin, ...], round_: Round, seconds: float | None
    ) -> None:
        """As `Tally.count`; a result of which nothing was kept is no round."""
        if not origins:
            return
        tally = self._tallies.get(round_.drafter)
        if tally is None:
            tally = self._tallies[round_.drafter] = Tally()
        tally.count(result, origins, round_, seconds)

    @property
    def tallies(self) -> list[tuple[FigureLabel, Tally]]:
        """What was counted so far, with its label."""
        return [
            (FigureLabel(self._bucket, self._traffic_class, drafter, self._method), tally)
            for drafter, tally in self._tallies.items()
        ]

    def report(self) -> tuple[Figures, ...]:
        """One entry for each drafter that was asked, and one for rounds that asked nobody."""
        return tuple(tally.figures(label) for label, tally in self.tallies)


class FigureBook:
    """Sums over choices, by label."""

    def __init__(self) -> None:
        self._tallies: dict[FigureLabel, Tally] = {}
        self._classes: set[str] = {""}

    def add(self, choice: ChoiceFigures) -> None:
        """Takes over what a choice counted, once it counts no more."""
        for label, tally in choice.tallies:
            self._tallies.setdefault(self._admit(label), Tally()).merge(tally)

    def figures(self, running: Iterable[ChoiceFigures] = ()) -> tuple[Figures, ...]:
        """All that was counted, also by choices that still run."""
        parts = {label: [tally] for label, tally in self._tallies.items()}
        for choice in running:
            for label, tally in choice.tallies:
                parts.setdefault(self._admit(label), []).append(tally)
        return tuple(merged(tallies).figures(label) for label, tallies in parts.items())

    def _admit(self, label: FigureLabel) -> FigureLabel:
        """The label itself, or that of classes which came too late to have one of their own."""
        if label.traffic_class not in self._classes:
            if len(self._classes) > MAX_TRAFFIC_CLASSES:
                return replace(label, traffic_class=OTHER_CLASS)
            self._classes.add(label.traffic_class)
        return label


def merged(tallies: Iterable[Tally]) -> Tally:
    """The sums of all."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total
