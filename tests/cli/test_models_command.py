"""`specdecode models` on a cache of its own, with a known model that pip finds in a folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdecode import models
from specdecode.cli.app import app
from tests.cli.running import run
from tests.test_models import delta, known, tiny_dir, tiny_gguf, write_snapshot  # noqa: F401  (fixtures)

RUNNER = CliRunner()


def invoke(*args: str) -> Any:
    return RUNNER.invoke(app, ("models", *args), env={"COLUMNS": "120"}, prog_name="specdecode")


def states() -> dict[str, str]:
    listed = json.loads(invoke("list", "--json").stdout)
    assert listed["cache"] == str(models.cache_dir())
    return {entry["name"]: entry["state"] for entry in listed["models"]}


@pytest.mark.usefixtures("known")
def test_fetch_prints_where_the_model_lies_and_nothing_else_on_stdout() -> None:
    assert states()["tiny"] == states()["tiny-draft"] == "absent"
    fetched = invoke("fetch", "tiny-draft")
    assert fetched.exit_code == 0, fetched.output
    assert fetched.stdout.split() == [str(models.cache_dir() / "tiny-draft")]
    assert "tiny: downloading" in fetched.stderr
    assert states()["tiny"] == states()["tiny-draft"] == "complete"
    again = invoke("fetch", "tiny", "tiny-draft")
    assert again.stdout.split() == [str(models.cache_dir() / name) for name in ("tiny", "tiny-draft")]
    assert again.stderr == ""


def test_fetch_takes_a_hub_id_and_looks_into_the_hubs_own_cache_first(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, "model.safetensors")
    fetched = run("models", "fetch", "org/name", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert (fetched.returncode, fetched.stdout.strip()) == (0, str(snapshot)), fetched.stderr
    absent = run("models", "fetch", "org/other", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert absent.returncode == 1
    assert "'org/other' is no known model" in absent.stderr


@pytest.mark.usefixtures("known")
def test_list_shows_state_and_size() -> None:
    invoke("fetch", "tiny")
    shown = invoke("list").stdout
    assert re.search(r"^ *tiny +complete +[\d.]+ [kM]B", shown, re.MULTILINE)
    assert re.search(r"^ *smollm2-135m-instruct +absent *$", shown, re.MULTILINE)


@pytest.mark.usefixtures("known")
def test_convert_says_how_the_model_is_served(tiny_gguf: Path, tmp_path: Path) -> None:  # noqa: F811
    mine = shutil.copy(tiny_gguf, tmp_path / "My-Model.gguf")
    in_cache = invoke("convert", str(mine))
    assert in_cache.exit_code == 0, in_cache.output
    *_, directory, hint = in_cache.stdout.splitlines()
    assert directory == str(models.cache_dir() / "my-model")
    assert hint == "serve it with: specdecode up --model my-model"
    assert models.resolve("my-model") == Path(directory)
    elsewhere = invoke("convert", str(tiny_gguf), f"--output={tmp_path / 'mine'}")
    assert elsewhere.stdout.splitlines()[-1] == f"serve it with: specdecode up --model {tmp_path / 'mine'}"
    assert models.resolve(str(tmp_path / "mine")) == tmp_path / "mine"


@pytest.mark.usefixtures("known")
def test_convert_never_replaces_a_known_model(tiny_gguf: Path) -> None:  # noqa: F811
    refused = invoke("convert", str(tiny_gguf))
    assert refused.exit_code == 1
    assert "tiny is a known model's name" in refused.stderr
    assert states()["tiny"] == "absent"


def test_convert_refuses_what_is_no_gguf(tmp_path: Path) -> None:
    absent = invoke("convert", str(tmp_path / "absent.gguf"))
    assert absent.exit_code == 2
    assert "absent.gguf" in absent.stderr
    other = tmp_path / "other.gguf"
    other.write_bytes(b"nothing")
    refused = invoke("convert", str(other), f"--output={tmp_path / 'out'}")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: ")
    assert "other.gguf" in refused.stderr
