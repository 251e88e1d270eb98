"""What was measured about speculation, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from specdecode.cli import show
from specdecode.figures import Figures, Speedup, speedups


def tables(found: Sequence[Figures]) -> Iterator[Table]:
    """What was counted, what it brought, how drafts fared, what was expected, and why γ was what it was; rows
    have the numbers of the first table.
    """
    yield _counts_table(found)
    yield _speed_table(found)
    if any(entry.num_speculated for entry in found):
        yield _runs_table(found)
    if any(entry.predictions.num_rounds or entry.regret.num_rounds for entry in found):
        yield _expectations_table(found)
    yield _reasons_table(found)


def _numbered(found: Sequence[Figures]) -> Iterator[tuple[str, Figures]]:
    return ((str(number), entry) for number, entry in enumerate(found, start=1))


def _counts_table(found: Sequence[Figures]) -> Table:
    texts = (("temperature", "left"), ("class", "left"), ("drafter", "left"), ("method", "left"))
    numbers = ("rounds", "drafted", "accepted", "fallback")
    shown = show.table(("#", "right"), *texts, *((name, "right") for name in numbers))
    for number, entry in _numbered(found):
        label = entry.label
        shown.add_row(
            number,
            label.temperature,
            label.traffic_class or "-",
            label.drafter.value if label.drafter else "-",
            label.method.value,
            str(entry.num_rounds),
            str(entry.num_drafted),
            _share(entry.acceptance),
            _share(entry.fallback_rate),
        )
    return shown


def _speed_table(found: Sequence[Figures]) -> Table:
    """Speedups over rounds without drafts: as observed, and by the formula for the α and c measured."""
    numbers = ("tok/round", "ms/tok", "speedup", "theory", "gap", "c", "tok/TFLOP")
    shown = show.table(("#", "right"), *((name, "right") for name in numbers))
    for (number, entry), fast in zip(_numbered(found), speedups(found), strict=True):
        shown.add_row(
            number,
            _number(entry.emitted_per_round, 2),
            _number(entry.seconds_per_token, 1, 1000),
            *_speedup_cells(fast),
            "-" if entry.tokens_per_teraflop is None else f"{entry.tokens_per_teraflop:.4g}",
        )
    return shown


def _speedup_cells(fast: Speedup | None) -> list[str]:
    if fast is None:
        return ["-"] * 4
    return [_number(value, 2) for value in (fast.observed, fast.theoretical, fast.gap, fast.draft_cost)]


def _runs_table(found: Sequence[Figures]) -> Table:
    """By γ, how many rounds accepted 0, 1, … tokens; and α by draft position."""
    shown = show.table(
        ("#", "right"), ("γ", "right"), ("rounds", "right"), ("rounds that accepted 0, 1, … γ", "left")
    )
    for number, entry in _numbered(found):
        for length, counts in enumerate(entry.runs):
            if length and any(counts):
                shown.add_row(number, str(length), str(sum(counts)), " ".join(map(str, counts)))
        if entry.alphas:
            alphas = " ".join(f"{alpha:.2f}" for alpha in entry.alphas)
            shown.add_row(number, "α", "", alphas)
    return shown


def _expectations_table(found: Sequence[Figures]) -> Table:
    """A round as it was predicted and as it was; and what always the same γ would have brought."""
    numbers = ("rounds", "tok", "predicted", "ms", "predicted")
    shown = show.table(
        ("#", "right"),
        *((name, "right") for name in numbers),
        ("tokens that fixed γ 0, 1, … would have emitted more", "left"),
    )
    for number, entry in _numbered(found):
        told, regret = entry.predictions, entry.regret
        if told.num_rounds or regret.num_rounds:
            per_round = 1 / max(told.num_rounds, 1)
            shown.add_row(
                number,
                str(told.num_rounds),
                f"{told.emitted * per_round:.2f}",
                f"{told.predicted_emitted * per_round:.2f}",
                f"{told.seconds * per_round * 1000:.1f}",
                f"{told.predicted_seconds * per_round * 1000:.1f}",
                " ".join(f"{share:+.1%}" for share in regret.shares),
            )
    return shown


def _reasons_table(found: Sequence[Figures]) -> Table:
    shown = show.table(("#", "right"), ("why γ was what it was, share of the rounds", "left"))
    for number, entry in _numbered(found):
        shares = (f"{reason.replace('_', ' ')} {share:.1%}" for reason, share in entry.reason_shares)
        shown.add_row(number, ", ".join(shares))
    return shown


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_DERIVED = (
    "num_rounds",
    "num_speculated",
    "num_drafted",
    "num_accepted",
    "drafted_by_position",
    "accepted_by_position",
    "acceptance",
    "alphas",
    "fallback_rate",
    "emitted_per_round",
    "seconds_per_token",
    "tokens_per_teraflop",
)


def figures_json(found: Sequence[Figures]) -> list[dict[str, Any]]:
    """The sums as they are kept, and what follows from them."""
    told = []
    for entry, fast in zip(found, speedups(found), strict=True):
        value = asdict(entry)
        drafter = entry.label.drafter
        value["label"] |= {"drafter": drafter and drafter.value, "method": entry.label.method.value}
        value["reasons"] = dict(entry.reasons)
        value["regret"]["shares"] = entry.regret.shares
        value |= {name: getattr(entry, name) for name in _DERIVED}
        told.append(value | {"speedup": fast and asdict(fast) | {"gap": fast.gap}})
    return told
