"""The draft benchmark: rounds as they are counted, and bars that break where they should."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.draft import in_process_plan, parse_options, service_plan
from benchmarks.draft_figures import AUTO, OFF, AcceptanceRun, DraftFigures, Kind, Load, ServiceRun, StepRun
from benchmarks.draft_in_process import Pair
from benchmarks.pictures import draw_panels
from benchmarks.prompts import CODE_WANTED
from benchmarks.results import pooled_ratio
from tests.router import tiny


def accepted(kind: Kind, temperature: float, *rounds: tuple[int, int, list[float]]) -> list[AcceptanceRun]:
    """(rounds, emitted, passed) of each prompt; each position was tested once a round."""
    return [
        AcceptanceRun(kind, temperature, prompt, n, emitted, [float(n)] * len(passed), passed)
        for prompt, (n, emitted, passed) in enumerate(rounds)
    ]


ACCEPTANCE = [
    run
    for kind in Kind
    for heat in (0.0, 1.0)
    for run in accepted(kind, heat, (10, 18, [6.0, 2.0]), (30, 62, [18.0, 6.0]))
]
STEPS = [StepRun("greedy", turn, 1.0 + turn, 10.0 * (1 + turn)) for turn in range(3)]


def served(load: Load, off: list[float], auto: list[float]) -> list[ServiceRun]:
    return [
        ServiceRun(name, load, turn, 1.0, speed, 20, 30, 12)
        for name, speeds in ((OFF, off), (AUTO, auto))
        for turn, speed in enumerate(speeds, start=1)
    ]


SERVED = [run for load in Load for run in served(load, [10, 20, 30], [17, 34, 51])]


def bar(figures: DraftFigures, name: str) -> tuple[float, bool]:
    (found,) = [bar for bar in figures.bars() if name in bar.name]
    return found.value, found.holds


def test_rounds_are_pooled_over_prompts() -> None:
    figures = DraftFigures(ACCEPTANCE, STEPS, SERVED)
    assert bar(figures, "emitted a round") == (2.0, True)  # 80 in 40 rounds, not the mean of 1.8 and 2.07
    assert bar(figures, "α of the first draft") == (0.6, True)
    assert [alpha.value for alpha in figures.alphas(Kind.CODE, 0.0)] == [0.6, 0.2]


def test_a_position_that_no_draft_reached_has_no_alpha() -> None:
    runs = [replace(run, tested=[*run.tested, 0.0], passed=[*run.passed, 0.0]) for run in ACCEPTANCE]
    assert len(DraftFigures(runs, STEPS, SERVED).alphas(Kind.CHAT, 1.0)) == 2
    with pytest.raises(ValueError, match="nothing to divide by"):
        pooled_ratio([0.0, 0.0], [0.0, 0.0])


def test_steps_and_speeds_are_compared_turn_by_turn() -> None:
    figures = DraftFigures(ACCEPTANCE, STEPS, SERVED)
    assert bar(figures, "greedy: a draft step") == (0.1, True)
    assert bar(figures, "copy-heavy, temperature 0, 1 at once") == (1.7, True)
    assert all(bar.holds for bar in figures.bars())


@pytest.mark.parametrize(("load", "least"), [(Load.CHAT, 1.25), (Load.COPY_HEAVY, 1.6), (Load.CODE, 0.98)])
def test_each_load_has_its_own_bar(load: Load, least: float) -> None:
    for factor, holds in ((1.01, True), (0.99, False)):
        others = [run for run in SERVED if run.load != load]
        figures = DraftFigures(ACCEPTANCE, STEPS, [*others, *served(load, [10.0], [10 * least * factor])])
        assert bar(figures, f"{load}, 1 at once")[1] is holds


def test_the_plans_run_everything_as_often_and_first_ones_take_turns() -> None:
    options, _ = parse_options(["--repeats", "3", "--step-turns", "2"])
    runs = service_plan(options)
    counts = Counter((step.load, step.configuration) for step in runs)
    assert set(counts.values()) == {4}
    assert [step.configuration for step in runs if step.load is Load.CHAT] == [AUTO, OFF, OFF, AUTO] * 2
    assert len(in_process_plan(options)) == len(Kind) * 2 + 3 * 3


def test_there_are_different_code_prompts() -> None:
    assert len(set(CODE_WANTED)) == len(CODE_WANTED) >= 16


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    figures = DraftFigures(ACCEPTANCE, STEPS, SERVED)
    draw_panels(tmp_path / "draft.png", "a draft", figures.panels(), "", value_format="{:.2f}")
    assert (tmp_path / "draft.png").stat().st_size > 10_000


def test_a_draft_that_is_the_target_is_never_wrong(tmp_path: Path) -> None:
    tiny.save_byte_level_tokenizer(tmp_path)
    tiny.save_llama(tmp_path, 400)
    other = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-draft")
    pair = Pair(str(tmp_path), str(other), torch.float32, "cpu", ())
    prompts = [(3, 4, 5), (7, 8)]
    for run in pair.accept(Kind.CHAT, prompts, 0.0, 4, 32):
        assert run.num_emitted == 5 * run.num_rounds
        assert run.passed == run.tested
    for run in pair.accept(Kind.CHAT, prompts, 1.0, 4, 32):
        # What q's 64 tokens have of p.
        assert 0.5 < run.passed[0] / run.tested[0] < 1.0
    step = pair.step("sampled", 1, 4)
    assert step.draft > 0
    assert step.target > 0
