"""The sweep's figures: luck does not choose what auto is compared with, and a slow cell breaks its bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.concurrency_sweep import parse_options, plan
from benchmarks.sweep_figures import AUTO, OFF, Load, Run, SweepFigures
from benchmarks.sweep_picture import draw_sweep

CONFIGURATIONS = (OFF, "γ=1", "γ=3", AUTO)


def runs_of(load: Load, concurrency: int, speeds: dict[str, list[float]]) -> list[Run]:
    """Turns 1, 2, … of every configuration."""
    return [
        Run(name, load, concurrency, turn, 1.0, speed, 30 if name == AUTO else 0, 12, 20)
        for name, own in speeds.items()
        for turn, speed in enumerate(own, start=1)
    ]


def figures_of(*cells: tuple[Load, int, dict[str, list[float]]]) -> SweepFigures:
    runs = [run for cell in cells for run in runs_of(*cell)]
    return SweepFigures(runs, CONFIGURATIONS, [(load, concurrency) for load, concurrency, _ in cells])


def bar(figures: SweepFigures, name: str) -> tuple[float, bool]:
    (found,) = [bar for bar in figures.bars() if name in bar.name]
    return found.value, found.holds


FAST = {OFF: [10, 10, 10, 10], "γ=1": [12, 9, 12, 9], "γ=3": [8, 20, 8, 20], AUTO: [15, 18, 15, 18]}
SLOW = {OFF: [10, 10, 10, 10], "γ=1": [9, 9, 9, 9], "γ=3": [8, 8, 8, 8], AUTO: [9, 9, 9, 9]}


def test_the_best_is_chosen_on_odd_turns_and_compared_on_even_ones() -> None:
    (cell,) = figures_of((Load.CHAT, 4, FAST)).cells
    assert cell.best == "γ=1"  # 12 on turns 1 and 3, although γ=3 is faster on the others
    assert cell.against_best.value == 2.0  # 18 / 9
    assert cell.against_off.value == 1.65  # the median of 1.5 and 1.8
    assert cell.draft_length == 1.5


def test_a_cell_that_is_slower_than_off_breaks_its_bars() -> None:
    figures = figures_of((Load.CHAT, 4, FAST), (Load.CHAT, 64, SLOW))
    assert bar(figures, "auto / best fixed lies below") == (1, False)
    assert bar(figures, "auto / off lies below") == (1, False)
    value, holds = bar(figures, "geometric mean")
    assert (value, holds) == (pytest.approx((2.0 * 0.9) ** 0.5), True)


def test_a_mixed_load_is_judged_by_what_beats_auto_most() -> None:
    figures = figures_of((Load.CHAT, 4, FAST), (Load.MIXED, 4, SLOW))
    assert bar(figures, "mixed load, 4 at once: auto / fastest other (off)") == (0.9, False)
    assert bar(figures, "auto / off lies below") == (0, True)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    cells = ((Load.CHAT, 4, FAST), (Load.CHAT, 64, SLOW), (Load.MIXED, 4, SLOW))
    draw_sweep(tmp_path / "sweep.png", "a model", figures_of(*cells))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_every_turn_runs_every_configuration_of_every_cell_and_the_first_is_another_each_time() -> None:
    options, _ = parse_options(["--quick"])
    runs = plan(options)
    assert len(runs) == 3 * len(options.cells) * len(options.configurations)
    firsts = [next(r for r in runs if r.repeat == turn).configuration for turn in range(3)]
    assert len(set(firsts)) == 3


def test_one_turn_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--repeats", "1"])
    assert "--repeats" in capsys.readouterr().err
