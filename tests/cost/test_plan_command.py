from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdecode.cli.app import app
from specdecode.cost import Calibration, DraftCosts, StepCosts


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are written to the working directory; calibrations of this machine are not used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))


def plan(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "120"})


def cells(result: Result, first: str) -> list[str]:
    """The table row that begins with this cell."""
    rows = (line.split() for line in result.output.splitlines())
    return next(row for row in rows if row[:1] == [first])


def test_the_formula_table_names_the_best_length_and_a_shorter_one_that_is_as_good() -> None:
    result = plan("--alphas", "0.80,0.72,0.66,0.60,0.55", "--draft-cost", "0.1")
    assert result.exit_code == 0
    assert [cells(result, str(length))[2] for length in (2, 3, 4, 5)] == ["2.376", "2.756", "2.984", "3.110"]
    assert [cells(result, str(length))[3] for length in (2, 3, 4, 5)] == ["1.98", "2.12", "2.13", "2.07"]
    assert "best: γ = 4" in result.output
    assert "γ = 3 is within 1 %" in result.output


def test_one_acceptance_stands_for_all_positions() -> None:
    result = plan("--alphas", "0.8", "--draft-cost", "0.1", "--max-draft-tokens", "4")
    assert cells(result, "4")[2] == "3.362"
    assert plan("--alphas", "0.1", "--draft-cost", "0.5").output.endswith("than decoding plainly\n")


def test_drafts_are_compared_by_batch() -> None:
    result = plan("--drafts", "1B:0.65,7B:0.85", "--batch", "1,256")
    assert result.exit_code == 0
    assert cells(result, "1")[-1] == "7B"
    assert cells(result, "256")[-1] == "1B"
    assert "KV slots" in result.output


def test_a_target_and_draft_on_a_gpu_give_tables_a_picture_and_two_sentences(tmp_path: Path) -> None:
    result = plan(
        *("--target", "70B", "--draft", "1B", "--gpu", "h100", "--tp", "4"),
        *("--context", "2000", "--batch", "1..256"),
    )
    assert result.exit_code == 0
    assert "70B (bf16) with 1B (bf16) on 4 × H100" in result.output
    assert "acceptance 0.8 at every position is assumed" in result.output
    assert [line.split()[0] for line in result.output.splitlines() if line.split()[:1] == ["128"]] == [
        "128"
    ] * 2
    for words in ("γ = 7", "policy", "ms sum", "ms max", "gain max", "KV slots 224", "time to first token"):
        assert words in result.output
    assert "Drafting pays at every batch up to 224" in result.output
    assert (tmp_path / "specdecode-plan.png").read_bytes().startswith(b"\x89PNG")


def test_contexts_are_planned_side_by_side_and_the_picture_can_be_left_out(tmp_path: Path) -> None:
    result = plan(
        *("--target", "32B", "--draft", "0.6B", "--gpu", "h100-nvl", "--dtype", "fp8", "--alphas", "0.6"),
        *("--context", "400,1900", "--batch", "64", "--fixed", "3", "--png", "none"),
    )
    assert result.exit_code == 0
    assert "KV reads are the cause" in result.output
    assert cells(result, "400")[1] == "64"
    assert not list(tmp_path.iterdir())


def test_this_machine_is_planned_with_from_its_calibration(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    drafts = {"model": DraftCosts(1e-3, 6e-3, 0.0, 2e-4), "ngram": DraftCosts(2e-4, single_pass=True)}
    Calibration({"model": "m", "dtype": "float32", "device": "cpu"}, StepCosts(0.03, 9e-4), drafts).save(path)
    args = ("--gpu", "this", "--calibration", str(path), "--batch", "1,64", "--png", "none")
    result = plan(*args, "--draft", "ngram", "--alphas", "0.5")
    assert result.exit_code == 0
    assert "m (float32) on cpu with ngram" in result.output
    both = plan(*args, "--drafts", "ngram:0.3,model:0.8")
    assert [cells(both, batch)[-1] for batch in ("1", "64")] == ["model", "off"]
    assert plan(*args).exit_code == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give --alphas and --draft-cost"),
        (("--alphas", "0.8"), "draft-cost"),
        (("--alphas", "0.8,1.2", "--draft-cost", "0.1"), "alphas[1]: 1.2 is outside [0, 1]"),
        (("--alphas", "0.8,x", "--draft-cost", "0.1"), "alphas: 'x' can't be read"),
        (("--alphas", "0.8", "--draft-cost", "0"), "draft_cost: 0.0 is not a finite number above 0"),
        (("--alphas", "0.8", "--draft-cost", "-0.1"), "draft_cost"),
        (("--alphas", "0.8", "--draft-cost", "0.1", "--max-draft-tokens", "0"), "0 is outside [1, 32]"),
        (("--gpu", "h100", "--draft-cost", "0"), "draft_cost"),
        (("--gpu", "h101"), "gpu"),
        (("--gpu", "this"), "--calibration"),
        (("--calibration", "nowhere.json"), "nowhere.json can't be read"),
        (("--target", "71B"), "target"),
        (("--draft", "2B"), "draft"),
        (("--drafts", "1B"), "is not MODEL:ACCEPTANCE"),
        (("--drafts", "1B:2"), "outside [0, 1]"),
        (("--batch", "8..2"), "runs backwards"),
        (("--batch", "0"), "batch: 0 is outside"),
        (("--context", "0"), "context: 0 is outside"),
        (("--gpu", "h100", "--tp", "1"), "144 GB"),
        (("--gpu", "h100", "--form", "mean"), "form"),
        (("--gpu", "h100", "--idle-share", "2"), "idle-share"),
        (("--gpu", "h100", "--fixed", "9"), "fixed"),
        (("--gpu", "h100", "--batch", "1", "--png", "/proc/no/plan.png"), "can't be written"),
    ],
)
def test_what_can_not_be_planned_is_refused_by_name(args: tuple[str, ...], says: str) -> None:
    result = plan(*args)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_a_drafter_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    Calibration({}, StepCosts(0.03, 9e-4)).save(path)
    result = plan("--calibration", str(path), "--draft", "model", "--png", "none")
    assert result.exit_code == 2
    assert "'model' was not measured" in result.output
