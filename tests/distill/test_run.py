"""Whole runs on a tiny random Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdecode.delta import assemble, write_delta
from specdecode.distill import run
from specdecode.distill.corpus import Text
from specdecode.distill.options import DistillOptions, TrainingOptions
from specdecode.distill.prompts import Prompt, PromptKind
from specdecode.distill.run import CHECKPOINT_NAME, distill
from specdecode.distill.student import build_student, require_plain_head
from specdecode.distill.training import Trainer
from specdecode.distill.vocabulary import expected_counts, frequent_ids
from specdecode.errors import FailedPreconditionError, InvalidArgumentError, NumericalError
from tests.lm import tiny

VOCABULARY = 90


def silent(stage: str, done: float, total: float, note: str) -> None:
    """Shows nothing."""


def options(target: Path, out: Path, steps: int = 12, **changes: Any) -> DistillOptions:
    training = TrainingOptions(steps=steps, warmup_steps=2, num_positions=900, dtype="float32", seed=5)
    return replace(
        DistillOptions(
            target=target,
            out=out,
            layers=(0,),
            vocabulary=VOCABULARY,
            shards=(1, 3),
            shard_size=16,
            max_tokens=20,
            batch_size=8,
            training=training,
            steps_given=True,
        ),
        **changes,
    )


@pytest.fixture(scope="module")
def done(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run's directory and what it says of itself."""
    out = tmp_path_factory.mktemp("draft")
    return out, distill(options(target, out), silent)


def test_a_run_leaves_a_draft_that_transformers_loads(
    done: tuple[Path, dict[str, Any]], target: Path
) -> None:
    out, _ = done
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(model.model.layers) == 1
    assert str(target) not in (out / "config.json").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(target)
    rest = torch.ones(theirs.config.vocab_size, dtype=torch.bool)
    ids = json.loads((out / "draft_vocabulary.json").read_text())["token_ids"]
    assert len(ids) == VOCABULARY
    assert ids == sorted(set(ids))
    rest[ids] = False
    assert torch.equal(model.lm_head.weight[rest], theirs.lm_head.weight[rest])
    assert not torch.equal(model.lm_head.weight[~rest], theirs.lm_head.weight[~rest])
    assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(out)("the fox").input_ids == (
        AutoTokenizer.from_pretrained(target)("the fox").input_ids
    )


def test_a_run_says_what_it_did_and_measured(done: tuple[Path, dict[str, Any]]) -> None:
    out, recorded = done
    assert json.loads((out / "distill.json").read_text()) == json.loads(json.dumps(recorded))
    figures = recorded["metrics"]["teacher_forced"]["all"]
    assert 0 <= figures["alpha"] <= 1
    assert figures["greedy_emitted_per_round"] >= 1
    assert len(recorded["metrics"]["self_fed_alpha_by_position"]["temperature 1"]) == 4
    card = (out / "README.md").read_text()
    for words in ("held out", "licence", "specdecode distill", recorded["target"]["weights_sha256"]):
        assert words in card
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


def test_training_lowers_the_loss(target: Path, tmp_path: Path) -> None:
    recorded = distill(options(target, tmp_path, steps=60), silent)
    first, *_, last = [line[1] for line in recorded["curve"]]
    assert last < 0.95 * first


def test_the_difference_and_the_target_give_the_draft_bit_for_bit(
    done: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    out, _ = done
    delta = write_delta(target, out, tmp_path / "delta")
    whole = assemble(target, delta, tmp_path / "whole", {"from": "a test"})
    mine, theirs = load_file(whole / "model.safetensors"), load_file(out / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert (whole / "draft_vocabulary.json").read_bytes() == (out / "draft_vocabulary.json").read_bytes()
    assert "model.embed_tokens.weight" not in load_file(delta / "trained.safetensors")


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    done: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop_at(stage: str, done: float, total: float, note: str) -> None:
        if stage == "training" and done == 5:
            raise Stopped

    monkeypatch.setattr(run, "_CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(Stopped):
        distill(options(target, tmp_path), stop_at)
    assert (tmp_path / "work" / CHECKPOINT_NAME).is_file()
    distill(options(target, tmp_path), silent)
    mine, theirs = load_file(tmp_path / "model.safetensors"), load_file(done[0] / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_another_run_is_refused(
    done: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    out, _ = done
    with pytest.raises(FailedPreconditionError, match=r"--out.*learning_rate 0.002 there, 0.5 now"):
        distill(
            replace(options(target, out), training=replace(options(target, out).training, learning_rate=0.5)),
            silent,
        )


def test_texts_of_another_target_are_refused(
    done: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    out, _ = done
    other = tmp_path / "other"
    other.mkdir()
    for path in target.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(target)
    model.lm_head.weight.data *= 1.01
    model.save_pretrained(other)
    with pytest.raises(FailedPreconditionError, match=r"--out.*another target"):
        distill(options(other, out), silent)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_CHECKPOINT_SECONDS", 0.0)

    def poison(stage: str, done: float, total: float, note: str) -> None:
        if stage == "training" and done == 3:
            trainer.student.head.data[0, 0] = torch.nan

    def remembered(self: Trainer, *args: Any) -> None:
        nonlocal trainer
        original(self, *args)
        trainer = self

    trainer: Any = None
    original = Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", remembered)
    with pytest.raises(NumericalError, match=r"step 3.*--learning-rate"):
        distill(options(target, tmp_path), poison)
    state = load_file(tmp_path / "work" / CHECKPOINT_NAME)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 10_000}, "--vocabulary: 10000 must be from 1 to"),
        ({"layers": (0, 2)}, "--layers: 0,2: the target has layers 0 to 1"),
        ({"prompts": (Prompt(PromptKind.LOGGED, 0.0, False, text="one"),), "shards": None}, "--data"),
    ],
)
def test_what_cannot_be_done_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        distill(options(target, tmp_path, **changes), silent)


def test_a_target_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="--target"):
        distill(options(tmp_path, tmp_path / "out"), silent)


def test_a_target_with_capped_logits_is_refused(tmp_path: Path) -> None:
    config = tiny.CONFIGS["llama"]()
    target = AutoModelForCausalLM.from_config(config)
    hidden = torch.randn(5, config.hidden_size)
    logits = hidden @ target.lm_head.weight.T
    require_plain_head(target, hidden, logits.logsumexp(1))
    with pytest.raises(FailedPreconditionError, match=r"--target.*capped"):
        require_plain_head(target, hidden, (5 * torch.tanh(logits / 5)).logsumexp(1))


@pytest.mark.parametrize("name", ["qwen3", "gptneox"])
def test_a_student_of_fresh_layers_starts_from_other_weights(name: str) -> None:
    """Also of architectures that name their parts differently."""
    target = AutoModelForCausalLM.from_config(tiny.CONFIGS[name]())
    before = {key: value.clone() for key, value in target.state_dict().items()}
    student = build_student(target, (1,), torch.arange(50), fresh=True, train_head=False, seed=3)
    trained = student.parameters()
    assert "lm_head.rows" not in trained
    matrices = [key for key, value in trained.items() if value.ndim == 2]
    assert matrices
    assert all(".0." in key for key in matrices)
    assert not any(torch.equal(trained[key], before[key.replace(".0.", ".1.")]) for key in matrices)
    assert student.hidden(torch.zeros(1, 3, dtype=torch.int64), torch.float32).shape == (1, 3, 64)


def test_the_vocabulary_is_what_was_written_and_what_was_expected_to_be() -> None:
    torch.manual_seed(6)
    head, hidden = torch.randn(40, 8), torch.randn(5, 8)
    answer = (7, 7, 7, 9, 11)
    text = Text(PromptKind.CHAT, 0.0, False, (1, 2, *answer), 2, hidden, (hidden @ head.T).logsumexp(1))
    expected = torch.softmax(hidden @ head.T, dim=1).sum(dim=0)
    torch.testing.assert_close(expected_counts([text], head), expected)
    counts = expected + torch.bincount(torch.tensor(answer), minlength=40)
    ids = frequent_ids([text], 12, [30, 39], head)
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert {30, 39, 7, 9, 11} <= set(ids.tolist())
    rest = counts.clone()
    rest[[30, 39]] = 0
    assert set(ids.tolist()) == {30, 39, *rest.topk(10).indices.tolist()}
