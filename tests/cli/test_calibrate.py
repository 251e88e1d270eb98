"""`specdecode calibrate` on a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdecode.cli.app import app
from specdecode.cost_tables import Calibration


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a directory of its own for the picture."""
    for name in [name for name in os.environ if name.startswith("SPECDECODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "calibration"


def calibrate(*args: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *args], env={"COLUMNS": "120"})


def options(model: Path, *more: str) -> tuple[str, ...]:
    return (
        f"--model={model}",
        "--dtype=float32",
        "--num-threads=1",
        "--num-blocks=128",
        "--seconds=0.4",
        *more,
    )


def test_the_table_the_fit_and_the_ridge_are_shown_kept_and_drawn(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    result = calibrate(*options(model, f"--draft-model={model}"))
    assert result.exit_code == 0, result.output
    for words in (
        "tokens",
        "rows",
        "cached",
        "fit ms",
        "ridge: ",
        "typical error",
        "drafting by ngram",
        "drafting by model",
    ):
        assert words in result.output
    assert (tmp_path / "specdecode-calibration.png").read_bytes().startswith(b"\x89PNG")
    kept = [Calibration.load(path) for path in cache.glob("*.json")]
    assert {found.key["role"] for found in kept} == {"target", "draft"}
    shown = [line.split()[:4] for line in result.output.splitlines()]
    (target,) = (found for found in kept if found.step is not None)
    for sample in target.step.samples if target.step else ():
        counts = (sample.tokens, sample.rows, sample.sequences, sample.cached_tokens)
        assert list(map(str, counts)) in shown


def test_json_holds_what_is_kept_and_a_second_call_measures_nothing(model: Path, cache: Path) -> None:
    first = calibrate(*options(model, "--json", "--out=none"))
    assert first.exit_code == 0, first.output
    again = calibrate(*options(model, "--json", "--out=none"))
    refreshed = calibrate(*options(model, "--json", "--out=none", "--refresh"))
    documents = [json.loads(result.stdout) for result in (first, again, refreshed)]
    assert documents[0] == documents[1] != documents[2]
    target = Calibration.from_json(documents[2]["target"])
    assert target in [Calibration.load(path) for path in cache.glob("*.json")]
    assert target.step is not None
    assert documents[2]["ridge"] == pytest.approx(target.step.ridge)
    assert Calibration.from_json(documents[2]["draft"]).drafts.keys() == {"ngram"}


def test_a_damaged_file_is_measured_again(model: Path, cache: Path) -> None:
    assert calibrate(*options(model, "--out=none")).exit_code == 0
    for path in cache.glob("*.json"):
        path.write_text("{")
    result = calibrate(*options(model, "--out=none"))
    assert result.exit_code == 0
    assert result.stderr.count("measured and kept in") == 2
    assert all(Calibration.load(path) for path in cache.glob("*.json"))


def test_this_machine_is_planned_with_from_what_is_kept(model: Path, cache: Path) -> None:
    assert calibrate(*options(model, "--out=none")).exit_code == 0
    result = CliRunner().invoke(
        app, ["plan", "--gpu=this", "--alphas=0.7", "--batch=1,4", "--png=none"], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    assert f"{model.name} (float32) on " in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--seconds=-1",), "--seconds: '-1' is refused; allowed: 0.1 to 3600 seconds"),
        (("--dtype=int3",), "--dtype"),
        (("--num-threads=-2",), "--num-threads"),
        (("--device=tpu",), "--device"),
    ],
)
def test_what_can_not_be_measured_by_is_refused_by_name(
    cache: Path, args: tuple[str, ...], says: str
) -> None:
    result = calibrate(*args)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_a_model_that_is_not_there_and_a_pool_too_small_fail_in_one_message(model: Path, cache: Path) -> None:
    missing = calibrate("--model=/nowhere/at/all")
    assert (missing.exit_code, "no model directory" in missing.output) == (1, True)
    small = calibrate(*options(model, "--num-blocks=2", "--out=none"))
    assert (small.exit_code, "2 KV blocks" in small.output) == (1, True)
