"""Pictures of results: panels of grouped bars with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from benchmarks.results import Estimate

# Okabe and Ito: told apart by everyone, and in grey.
COLOURS = ("#7f7f7f", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7")


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        groups: for each label on the x axis, each series' estimate.
    """

    title: str
    groups: Mapping[str, Mapping[str, Estimate]]


def draw_panels(
    path: Path,
    title: str,
    panels: Sequence[Sequence[Panel]],
    y_label: str,
    x_label: str = "",
    value_format: str = "{:.0f}",
    first: Sequence[str] = (),
) -> None:
    """Rows of panels; one legend for all series, `first` ones first."""
    rows, columns = len(panels), max(len(row) for row in panels)
    present = [s for row in panels for panel in row for group in panel.groups.values() for s in group]
    series = list(dict.fromkeys([*(s for s in first if s in present), *present]))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(series)}
    width = max(3.4 * columns, 7.5)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, 3.1 * rows + 1.0), squeeze=False, layout="constrained"
    )
    for row, line in zip(panels, axes, strict=True):
        for axis in line[len(row) :]:
            axis.set_visible(False)
        for panel, axis in zip(row, line, strict=False):
            _draw_panel(axis, panel, colours, value_format)
            axis.set_xlabel(x_label)
        line[0].set_ylabel(y_label)
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in series]
    figure.legend(
        handles, series, loc="outside lower center", ncols=max(int(width / 2.4), 1), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_panel(axis: Axes, panel: Panel, colours: Mapping[str, str], value_format: str) -> None:
    width = 0.8 / max(map(len, panel.groups.values()))
    top = max(e.high for group in panel.groups.values() for e in group.values())
    for index, group in enumerate(panel.groups.values()):
        present = [name for name in colours if name in group]
        for offset, name in enumerate(present):
            x = index + (offset - (len(present) - 1) / 2) * width
            _draw_bar(axis, x, width * 0.94, group[name], colours[name], value_format, top)
    axis.set_xticks(range(len(panel.groups)), list(panel.groups))
    axis.tick_params(axis="x", length=0)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylim(0, (top or 1.0) * 1.15)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def _draw_bar(
    axis: Axes, x: float, width: float, estimate: Estimate, colour: str, value_format: str, top: float
) -> None:
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    axis.bar(x, estimate.value, width, color=colour, yerr=[[below], [above]], capsize=3, ecolor="#333333")
    axis.text(
        x,
        estimate.high + 0.02 * top,
        value_format.format(estimate.value),
        ha="center",
        va="bottom",
        fontsize=8,
    )
