"""What every figure rests on: ratios, intervals, bars, and the files they are written to."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import bars
from benchmarks.results import Bar, Session, begin, median_of, paired_ratio, rate_of, read_bars


def test_what_slows_both_runs_of_a_pair_does_not_move_their_ratio() -> None:
    below = [10.0, 50.0, 2.0, 31.0, 7.0]
    ratio = paired_ratio([1.5 * speed for speed in below], below)
    assert (ratio.value, ratio.low, ratio.high, ratio.num_samples) == pytest.approx((1.5, 1.5, 1.5, 5))


def test_the_interval_of_a_median_holds_it_and_lies_within_the_runs() -> None:
    runs = [3.0, 1.0, 2.0, 10.0, 4.0]
    estimate = median_of(runs)
    assert estimate.value == 3.0
    assert min(runs) <= estimate.low < estimate.value < estimate.high <= max(runs)


def test_no_runs_have_no_median() -> None:
    with pytest.raises(ValueError, match="no runs"):
        median_of([])


def test_pairs_must_be_complete() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("count", "total", "low", "high"), [(0, 100, 0.0, 0.0370), (5, 100, 0.0215, 0.1118), (100, 100, 0.963, 1)]
)
def test_a_rate_has_wilsons_interval(count: int, total: int, low: float, high: float) -> None:
    rate = rate_of(count, total, per=1000)
    assert rate.value == pytest.approx(1000 * count / total)
    assert (rate.low, rate.high) == pytest.approx((1000 * low, 1000 * high), abs=0.1)


@pytest.mark.parametrize(
    ("value", "direction", "holds"),
    [
        (1.0, "at_least", True),
        (0.99, "at_least", False),
        (1.0, "at_most", True),
        (1.01, "at_most", False),
        (math.nan, "at_least", False),
        (math.nan, "at_most", False),
    ],
)
def test_a_bar_holds_on_its_side_of_the_bound(value: float, direction: str, holds: bool) -> None:
    assert Bar("", value, 1.0, direction).holds is holds  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with the result `sample` of two bars, of which one fails."""
    all_bars = [Bar("fast", 2.0, 1.2, "at_least", (1.9, 2.1)), Bar("small", 3.0, 1.0, "at_most")]
    session = begin("sample", {"repeats": 2})
    runs = [{"seconds": 1.0, "texts": [1, 2]}, {"seconds": 2.0, "texts": []}]
    summary = {"cells": [{"kind": "a"}, {"kind": "b"}], "nothing": {}}
    session.write(tmp_path, runs, summary, all_bars, lambda png: png.touch())
    return tmp_path


def test_a_result_says_where_it_comes_from_and_keeps_its_runs(written: Path) -> None:
    content = json.loads((written / "sample.json").read_text())
    assert (written / "sample.png").exists()
    assert {"cpu", "cores", "memory_gib", "gpu"} <= content["machine"].keys()
    assert {"python", "torch", "transformers", "grpcio", "specdecode", "commit"} <= content["versions"].keys()
    assert content["settings"] == {"repeats": 2}
    assert content["runs"] == [{"seconds": 1.0, "texts": [1, 2]}, {"seconds": 2.0, "texts": []}]
    assert content["summary"] == {"cells": [{"kind": "a"}, {"kind": "b"}], "nothing": {}}
    assert [bar["holds"] for bar in content["bars"]] == [True, False]


def test_bars_are_read_as_they_were_written(written: Path) -> None:
    assert read_bars(written) == [
        ("sample", Bar("fast", 2.0, 1.2, "at_least", (1.9, 2.1))),
        ("sample", Bar("small", 3.0, 1.0, "at_most")),
    ]


def test_a_bar_that_does_not_hold_is_printed_and_fails_the_command(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bars", "--results", str(written)])
    assert bars.main() == 1
    printed = capsys.readouterr().out
    assert "sample: FAILS  small: 3, bar ≤ 1" in printed
    assert "fast" not in printed


def test_all_bars_are_printed_when_asked_for(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bars", "--results", str(written), "--all"])
    assert bars.main() == 1
    assert "sample: holds  fast: 2 [1.9, 2.1], bar ≥ 1.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["bf16_identity", "concurrency_sweep", "decision", "load_step", "step", "throughput"]
)
def test_help_measures_and_writes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a result is written")

    monkeypatch.setattr(Session, "write", refuse)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
