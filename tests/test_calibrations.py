"""Which kept calibration may be used for what."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode import calibrations
from specdecode.calibrations import (
    device_name,
    find,
    keep,
    kept_or_measured,
    key_of,
    of_this_machine,
    path_of,
)
from specdecode.cost_tables import Calibration, DraftCosts, StepCosts
from specdecode.errors import InvalidArgumentError
from tests.lm.tiny import paged_model

COSTS = StepCosts(0.01, 1e-3)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))


def measured(**key: str) -> Calibration:
    return Calibration({"role": "target", **key}, COSTS)


def never() -> Calibration:
    raise AssertionError("measured though a calibration is kept")


def test_what_is_kept_is_found_by_its_key_alone(tmp_path: Path) -> None:
    keep(measured(model="a"))
    assert path_of({"role": "target", "model": "a"}).parent == tmp_path / "calibration"
    assert find({"model": "a", "role": "target"}) == measured(model="a")
    assert find({"role": "target", "model": "b"}) is None


def test_a_kept_calibration_is_not_measured_again_unless_asked_for() -> None:
    assert kept_or_measured({"role": "target"}, measured) == measured()
    assert kept_or_measured({"role": "target"}, never) == measured()
    newer = replace(measured(), step=StepCosts(0.02, 1e-3))
    assert kept_or_measured({"role": "target"}, lambda: newer, refresh=True) == newer
    assert find({"role": "target"}) == newer


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "specdecode-calibration", "version": 0}'])
def test_a_damaged_file_is_refused_and_measured_again(content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = path_of({"role": "target"})
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=path.name):
        find({"role": "target"})
    with caplog.at_level(logging.WARNING):
        assert kept_or_measured({"role": "target"}, measured) == measured()
    assert path.name in caplog.text
    assert find({"role": "target"}) == measured()


def test_a_file_of_another_machine_is_refused_by_what_differs_and_measured_again() -> None:
    mine = {"role": "target", "device": "here"}
    path_of(mine).parent.mkdir()
    path_of(mine).write_text(json.dumps(measured(device="there").to_json()))
    with pytest.raises(InvalidArgumentError, match="device differ"):
        find(mine)
    assert kept_or_measured(mine, lambda: measured(device="here")).key["device"] == "here"
    assert find(mine) == measured(device="here")


def test_a_cache_that_can_not_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "file"))
    assert kept_or_measured({"role": "target"}, measured) == measured()
    assert "the calibration is not kept" in caplog.text


def test_the_key_tells_models_devices_and_settings_apart_but_not_where_a_model_lies() -> None:
    model = paged_model("llama")
    key = key_of("target", model, block_size=16)
    assert key == key_of("target", model, block_size=16)
    others = [
        key_of("draft", model, block_size=16),
        key_of("target", model, block_size=8),
        key_of("target", paged_model("qwen2"), block_size=16),
        key_of("target", replace(model, name="other"), block_size=16),
        key_of("target", model.limited(vocab_size=100), block_size=16),
        key_of("target", replace(model, kernels=None), block_size=16),
    ]
    assert len({json.dumps(k, sort_keys=True) for k in (key, *others)}) == 7
    before = model.module.config._name_or_path
    model.module.config._name_or_path = "/elsewhere"
    try:
        assert key_of("target", model, block_size=16) == key
    finally:
        model.module.config._name_or_path = before
    assert {"dtype", "device", "threads", "torch", "transformers", "specdecode"} <= key.keys()


def test_this_machines_newest_target_comes_with_the_newest_drafters() -> None:
    here = {"device": device_name("cpu")}
    kept = [
        measured(**here, model="old"),
        measured(**here, model="new"),
        Calibration(
            {"role": "draft", **here, "model": "x"},
            drafts={"model": DraftCosts(1.0), "ngram": DraftCosts(2.0)},
        ),
        Calibration({"role": "draft", **here, "model": "none"}, drafts={"ngram": DraftCosts(3.0)}),
        measured(device="elsewhere", model="newest"),
    ]
    for age, calibration in enumerate(reversed(kept)):
        keep(calibration)
        os.utime(path_of(calibration.key), (1e9 - age, 1e9 - age))
    (calibrations.calibration_dir() / "damaged.json").write_text("{")
    found = of_this_machine()
    assert found.key["model"] == "new"
    assert found.drafts == {"model": DraftCosts(1.0), "ngram": DraftCosts(3.0)}
    assert of_this_machine("old").key["model"] == "old"


def test_a_machine_without_calibrations_is_told_what_to_run() -> None:
    with pytest.raises(InvalidArgumentError, match="specdecode calibrate"):
        of_this_machine()
