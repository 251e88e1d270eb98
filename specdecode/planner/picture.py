"""A plan as a picture: throughput and speed of one user against the batch (or the context)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdecode.errors import FailedPreconditionError
from specdecode.planner.plan import Row, Speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[Row], title: str, path: Path, break_even: int | None, slots: int | None) -> None:
    """Write a PNG with both curves for off, fixed γ and the policy.

    Args:
        rows: along one axis; where contexts differ, the largest batch along the contexts is drawn.
        title: of the picture.
        path: to write to.
        break_even: batch to mark.
        slots: batch at which the KV cache is full.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FailedPreconditionError(
            "a picture needs matplotlib: pip install 'specdecode[bench]', or --png none"
        ) from error
    along_contexts = len({row.context for row in rows}) > 1
    if along_contexts:
        largest = max(row.batch for row in rows)
        rows = [row for row in rows if row.batch == largest]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    total, user = figure.subplots(1, 2)
    places = [row.context if along_contexts else row.batch for row in rows]
    for axes, name, of in (
        (total, "tokens/s of the batch", lambda speed: speed.throughput),
        (user, "tokens/s of one user", lambda speed: speed.per_user),
    ):
        _curves(axes, rows, places, of)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.set_xlabel(f"context at batch {rows[0].batch}" if along_contexts else "batch")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if not along_contexts:
            _marks(axes, break_even, slots, max(places))
    total.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _curves(axes: Axes, rows: Sequence[Row], places: Sequence[int], of: Callable[[Speed], float]) -> None:
    axes.plot(places, [of(row.off) for row in rows], "k--", label="off")
    for length in rows[0].fixed:
        axes.plot(places, [of(row.fixed[length]) for row in rows], alpha=0.7, label=f"γ = {length}")
    axes.plot(places, [of(row.auto) for row in rows], "C3o-", linewidth=2, label="policy")


def _marks(axes: Axes, break_even: int | None, slots: int | None, largest: int) -> None:
    for place, name in ((break_even, "break-even"), (slots, "KV full")):
        if place is not None and place <= largest:
            axes.axvline(place, color="grey", linewidth=1, linestyle=":")
            axes.annotate(
                f"{name} {place}",
                (place, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                horizontalalignment="right",
                fontsize="small",
            )
