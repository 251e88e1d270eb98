"""`specdecode distill` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdecode.cli.app import app


def distill(*args: str) -> Result:
    return CliRunner().invoke(app, ["distill", *args], env={"COLUMNS": "140"})


def test_logged_requests_become_a_draft(target: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "requests.jsonl", tmp_path / "draft"
    lines = [
        {"messages": [{"role": "user", "content": f"tell me of fox {i}"}], "temperature": (i % 3) / 2}
        for i in range(40)
    ]
    log.write_text("\n".join(json.dumps(line) for line in lines) + "\nno JSON\n")
    options = ("--layers=1", "--vocabulary=0", "--steps=2", "--dtype=float32", "--threads=1")
    result = distill(f"--target={target}", f"--out={out}", f"--from-log={log}", *options)
    assert result.exit_code == 0, result.output
    for words in ("held-out prompts", "logged, temperature", "feeding on itself, temperature 0.7: α"):
        assert words in result.output
    recorded = json.loads((out / "distill.json").read_text())
    assert recorded["corpus"]["texts"] == 40
    assert recorded["corpus"]["prompts"] == "requests.jsonl"
    assert not (out / "draft_vocabulary.json").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--layers=0",), "'0' is refused; allowed: a number of layers, or indices"),
        (("--layers=2,1",), "ascending indices"),
        (("--layers=one",), "'one' is refused"),
        (("--minutes=0",), "above 0"),
        (("--loss=mse",), "lk, kl, reverse-kl, tv, ce"),
        (("--steps=0",), "1 or more"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    target: Path, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    result = distill(f"--target={target}", f"--out={tmp_path}", *args)
    assert result.exit_code == 2
    assert args[0].partition("=")[0] in result.output
    assert words in " ".join(result.output.replace("│", " ").split())


def test_prompts_of_no_use_are_refused(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": ""}\n[1, 2]\n{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    result = distill(f"--target={target}", f"--out={tmp_path / 'out'}", f"--data={data}")
    assert result.exit_code == 1
    assert "--data" in result.output
    assert "none of its 3 lines" in result.output


def test_two_sources_of_prompts_are_refused(target: Path, tmp_path: Path) -> None:
    result = distill(f"--target={target}", f"--out={tmp_path}", "--data=a", "--from-log=b")
    assert result.exit_code == 1
    assert "--from-log: give --data or --from-log, not both" in result.output


def test_a_target_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    result = distill(f"--target={tmp_path / 'nothing'}", f"--out={tmp_path}")
    assert result.exit_code == 1
    assert "nothing" in result.output
