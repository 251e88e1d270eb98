"""A draft taken apart and put together is the same draft; what does not belong together is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdecode.checkpoints import MANIFEST_NAME, Manifest, Weights, keep_only
from specdecode.delta import HEAD_ROWS, RECORD_NAME, TRAINED_NAME, assemble, write_delta
from specdecode.errors import FailedPreconditionError
from specdecode.lm.draft_vocabulary import write_draft_vocabulary
from specdecode.lm.model import load_model
from tests.router import tiny

VOCAB_SIZE = 300
TOKEN_IDS = list(range(5, 200, 4))
RECIPE = {"what": "a test"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def target_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of three layers and its tokenizer, with the head tied to the embedding or not."""
    path = tmp_path_factory.mktemp("target")
    tiny.save_byte_level_tokenizer(path, num_merges=VOCAB_SIZE - 258)
    tiny.save_llama(path, VOCAB_SIZE, layers=3)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if request.param:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(path)
    return path


def save_draft(target_dir: Path, path: Path, change: Callable[[Any], None] = lambda model: None) -> Path:
    """Layers 0 and 2 with trained parts and trained head rows."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)
    keep_only(model, (0, 2))
    model.config.tie_word_embeddings = False
    head = model.lm_head.weight.detach().clone()
    head[TOKEN_IDS] += 0.5
    model.lm_head.weight = torch.nn.Parameter(head)
    model.model.norm.weight.data *= 1.5
    model.model.layers[1].mlp.down_proj.weight.data += 0.25
    change(model)
    model.save_pretrained(path)
    write_draft_vocabulary(path, TOKEN_IDS)
    return path


@pytest.fixture
def draft_dir(target_dir: Path, tmp_path: Path) -> Path:
    return save_draft(target_dir, tmp_path / "draft")


@pytest.fixture
def delta_dir(target_dir: Path, draft_dir: Path, tmp_path: Path) -> Path:
    (draft_dir / "README.md").write_text("A card.")
    (draft_dir / "curves.png").write_bytes(b"A picture.")
    record = {"command": "specdecode distill", "target": {"name": "tiny"}}
    (draft_dir / RECORD_NAME).write_text(json.dumps(record))
    return write_delta(target_dir, draft_dir, tmp_path / "delta")


def state_of(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    return state


def test_the_assembled_draft_is_the_draft(
    target_dir: Path, draft_dir: Path, delta_dir: Path, tmp_path: Path
) -> None:
    out = assemble(target_dir, delta_dir, tmp_path / "out", RECIPE)
    expected, found = state_of(draft_dir), state_of(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    manifest = Manifest.read(out)
    assert manifest is not None
    assert manifest.recipe == RECIPE
    assert manifest.checksums_match(out)
    loaded = load_model(out, torch.float32)
    assert loaded.draft_vocabulary is not None
    assert loaded.draft_vocabulary.tolist() == TOKEN_IDS


def test_a_delta_holds_what_was_trained_and_nothing_else(delta_dir: Path) -> None:
    trained = load_file(delta_dir / TRAINED_NAME)
    assert set(trained) == {"model.norm.weight", "model.layers.1.mlp.down_proj.weight", HEAD_ROWS}
    assert trained[HEAD_ROWS].shape == (len(TOKEN_IDS), 32)
    record = json.loads((delta_dir / RECORD_NAME).read_text())
    assert record["command"] == "specdecode distill"
    assert record["target"]["name"] == "tiny"
    unchanged = record["unchanged"]
    assert unchanged["model.layers.1.self_attn.q_proj.weight"] == "model.layers.2.self_attn.q_proj.weight"
    assert unchanged["model.embed_tokens.weight"] == "model.embed_tokens.weight"


def test_the_assembled_directory_has_the_targets_tokenizer_and_the_card(
    target_dir: Path, delta_dir: Path, tmp_path: Path
) -> None:
    out = assemble(target_dir, delta_dir, tmp_path / "out", RECIPE)
    names = {path.name for path in out.iterdir()}
    assert {
        "README.md",
        "curves.png",
        RECORD_NAME,
        "draft_vocabulary.json",
        "config.json",
        MANIFEST_NAME,
    } <= names
    assert TRAINED_NAME not in names
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (target_dir / name).read_bytes()


def test_a_head_that_was_not_trained_is_the_targets(target_dir: Path, tmp_path: Path) -> None:
    def untrained(model: Any) -> None:
        model.lm_head.weight.data[TOKEN_IDS] -= 0.5
        own = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).lm_head.weight
        model.lm_head.weight.data.copy_(own)

    draft = save_draft(target_dir, tmp_path / "draft", untrained)
    delta = write_delta(target_dir, draft, tmp_path / "delta")
    assert HEAD_ROWS not in load_file(delta / TRAINED_NAME)
    out = assemble(target_dir, delta, tmp_path / "out", RECIPE)
    assert torch.equal(state_of(out)["lm_head.weight"], state_of(draft)["lm_head.weight"])


def test_a_head_trained_outside_the_draft_vocabulary_has_no_delta(target_dir: Path, tmp_path: Path) -> None:
    def trained_elsewhere(model: Any) -> None:
        model.lm_head.weight.data[4] += 1

    draft = save_draft(target_dir, tmp_path / "draft", trained_elsewhere)
    with pytest.raises(FailedPreconditionError, match=r"rows that draft_vocabulary\.json lacks"):
        write_delta(target_dir, draft, tmp_path / "delta")


def test_another_target_is_refused_with_both_fingerprints(
    target_dir: Path, delta_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype="auto")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(other)
    own, found = Weights(target_dir).sha256(), Weights(other).sha256()
    assert own != found
    with pytest.raises(FailedPreconditionError, match=rf"distill\.json: .*{own}, those in .*{found}"):
        assemble(other, delta_dir, tmp_path / "out", RECIPE)
    assert not (tmp_path / "out").exists()


def test_a_target_may_be_named_by_the_digest_of_its_file(
    target_dir: Path, delta_dir: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256((target_dir / "model.safetensors").read_bytes()).hexdigest()
    recorded(delta_dir, target={"weights_sha256": digest})
    assert assemble(target_dir, delta_dir, tmp_path / "out", RECIPE).is_dir()


def test_the_fingerprint_does_not_depend_on_how_weights_are_spread_over_files(
    target_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(target_dir / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "a.safetensors", {"by": "a test"})
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    assert Weights(tmp_path).sha256() == Weights(target_dir).sha256()


def retrained(delta_dir: Path, **changes: Tensor | None) -> None:
    tensors = load_file(delta_dir / TRAINED_NAME)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, delta_dir / TRAINED_NAME)


def recorded(delta_dir: Path, **changes: Any) -> None:
    record = json.loads((delta_dir / RECORD_NAME).read_text())
    (delta_dir / RECORD_NAME).write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / RECORD_NAME).write_text("{"), r"distill\.json: can't be read"),
        (lambda d: (d / RECORD_NAME).unlink(), r"distill\.json: can't be read"),
        (lambda d: (d / RECORD_NAME).write_text("{}"), r"distill\.json: can't be read.*target"),
        (lambda d: recorded(d, target={"weights_sha256": 5}), "must be text"),
        (lambda d: recorded(d, unchanged={"model.norm.weight": "nothing"}), r"safetensors: can't be read"),
        (lambda d: recorded(d, unchanged={}), "is missing, its config.json expects"),
        (lambda d: (d / TRAINED_NAME).write_bytes(b"half"), r"trained\.safetensors: can't be read"),
        (lambda d: (d / TRAINED_NAME).unlink(), r"trained\.safetensors: can't be read"),
        (lambda d: retrained(d, **{"model.norm.weight": None}), "model.norm.weight is missing"),
        (lambda d: retrained(d, **{"model.norm.weight": torch.ones(31)}), r"is \[31\].*expects \[32\]"),
        (lambda d: retrained(d, extra=torch.ones(2)), "extra is .*expects no such tensor"),
        (lambda d: retrained(d, **{HEAD_ROWS: torch.ones(7, 32)}), r"lm_head\.rows is \[7, 32\].*\[49, 32\]"),
        (lambda d: (d / "draft_vocabulary.json").unlink(), "draft_vocabulary.json says nothing"),
        (lambda d: write_draft_vocabulary(d, [3, VOCAB_SIZE]), "draft_vocabulary.json: token_ids"),
    ],
)
def test_a_damaged_delta_is_refused_by_file_and_reason(
    target_dir: Path, delta_dir: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(delta_dir)
    with pytest.raises(FailedPreconditionError, match=reason):
        assemble(target_dir, delta_dir, tmp_path / "out", RECIPE)
    assert not (tmp_path / "out").exists()


def test_a_draft_may_take_everything_from_its_target(target_dir: Path, tmp_path: Path) -> None:
    """Layers left out and nothing trained."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype="auto")
    keep_only(model, (1,))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "draft")
    delta = write_delta(target_dir, tmp_path / "draft", tmp_path / "delta")
    assert not load_file(delta / TRAINED_NAME)
    out = assemble(target_dir, delta, tmp_path / "out", RECIPE)
    assert AutoConfig.from_pretrained(out).num_hidden_layers == 1
    expected, found = state_of(tmp_path / "draft"), state_of(out)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
