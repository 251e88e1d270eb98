"""The picture of the concurrency sweep: speed over that of speculation off, for each load."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.sweep_figures import AUTO, OFF, Load, SweepFigures


def draw_sweep(path: Path, title: str, figures: SweepFigures) -> None:
    """One panel a load: lines for every fixed γ in shades of grey, auto in colour with its interval."""
    loads = list(dict.fromkeys(cell.load for cell in figures.cells))
    figure, axes = plt.subplots(
        1, len(loads), figsize=(3.6 * len(loads), 3.8), squeeze=False, layout="constrained", sharey=True
    )
    for load, axis in zip(loads, axes[0], strict=True):
        _draw_load(axis, load, figures)
    axes[0][0].set_ylabel("tokens a second / speculation off")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_load(axis: Axes, load: Load, figures: SweepFigures) -> None:
    cells = sorted((c for c in figures.cells if c.load is load), key=lambda c: c.concurrency)
    counts = [cell.concurrency for cell in cells]
    fixed = [name for name in figures.configurations if name not in (AUTO, OFF)]
    for index, name in enumerate(fixed):
        shade = str(0.8 - 0.6 * index / max(len(fixed) - 1, 1))
        ratios = [cell.speeds[name].value / cell.speeds[OFF].value for cell in cells]
        axis.plot(counts, ratios, color=shade, linewidth=1, marker=".", markersize=4, label=name)
    values = [cell.against_off for cell in cells]
    axis.errorbar(
        counts,
        [value.value for value in values],
        yerr=[[v.value - v.low for v in values], [v.high - v.value for v in values]],
        color="#d55e00",
        linewidth=2,
        marker="o",
        markersize=4,
        capsize=3,
        label=AUTO,
    )
    axis.axhline(1, color="#009e73", linewidth=1.2, label=OFF)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_title(load, fontsize=10)
    axis.set_xlabel("requests at once")
    axis.spines[["top", "right"]].set_visible(False)
