"""A calibration as a picture: step time against tokens in flight."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specdecode.cost_tables import StepCosts, StepSample
from specdecode.errors import FailedPreconditionError


def draw(costs: StepCosts, title: str, path: Path) -> None:
    """Write a PNG with what was measured, the table, the fit and the ridge.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FailedPreconditionError(
            "a picture needs matplotlib: pip install 'specdecode[bench]', or --out none"
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    largest = max(costs.tokens)
    counts = range(1, largest + 1)
    axes.plot(costs.tokens, 1e3 * np.array(costs.seconds), "C0-", label="table, nothing cached")
    axes.plot(counts, [1e3 * costs.fitted(n, n, 0) for n in counts], "k--", linewidth=1, label="fit")
    for name, style, chosen in _groups(costs.samples):
        if chosen:
            axes.plot([s.tokens for s in chosen], [1e3 * s.seconds for s in chosen], style, label=name)
    if costs.ridge <= largest:
        axes.axvline(costs.ridge, color="grey", linestyle=":")
        axes.annotate(f" ridge {costs.ridge:.0f}", (costs.ridge, 0.02), xycoords=("data", "axes fraction"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in flight")
    axes.set_ylabel("ms a step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _groups(samples: tuple[StepSample, ...]) -> list[tuple[str, str, list[StepSample]]]:
    """Names, styles and members."""
    prompts = [s for s in samples if s.rows < s.tokens]
    decoding = [s for s in samples if s.rows == s.tokens]
    short = [s for s in decoding if s.cached_tokens <= 64 * max(s.sequences, 1)]
    long = [s for s in decoding if s not in short]
    return [("short contexts", "C0o", short), ("long contexts", "C1^", long), ("prompts", "C2s", prompts)]
