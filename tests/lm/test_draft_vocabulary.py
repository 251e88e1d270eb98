"""Reduced heads: the same logits at the ids they have, −∞ elsewhere, and nothing beyond that is noticed."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from specdecode.errors import FailedPreconditionError
from specdecode.lm import draft_vocabulary
from specdecode.lm.cpu.kernels import load_kernels
from specdecode.lm.draft_vocabulary import read_draft_vocabulary, write_draft_vocabulary
from specdecode.lm.model import LoadedModel, adopt_model, load_model
from specdecode.lm.runner import Chunk, PagedLM
from specdecode.sampling import Window, greedy_tokens, probabilities, restrict_top_k
from specdecode.types import SamplingParams
from target_service.engine import Engine
from tests.lm.tiny import CONFIGS, MORE_CONFIGS, SHAPE, VOCAB_SIZE, build, plain_model, random_prompt

TOKEN_IDS = sorted(set(random_prompt(70, seed=3)))


def logits_of(model: LoadedModel, prompt: list[int]) -> Tensor:
    """[len(prompt), vocab_size]."""
    lm = PagedLM(model, num_blocks=8)
    logits = lm.forward([Chunk(lm.new_sequence(prompt), prompt, len(prompt))])
    columns = lm.forward_columns([Chunk(lm.new_sequence(prompt), prompt, len(prompt))])
    assert columns.shape[1] == model.num_columns
    assert torch.equal(lm.spread(columns), logits)
    return logits


def assert_reduced(found: Tensor, full: Tensor, token_ids: list[int], atol: float) -> None:
    """The same at `token_ids`, −∞ elsewhere."""
    outside = torch.ones(full.shape[1], dtype=torch.bool)
    outside[token_ids] = False
    assert found.shape == full.shape
    torch.testing.assert_close(found[:, token_ids], full[:, token_ids], atol=atol, rtol=0)
    assert bool((found[:, outside] == -torch.inf).all())


@pytest.mark.parametrize("name", [*CONFIGS, *MORE_CONFIGS])
@pytest.mark.parametrize("use_kernels", [True, False])
def test_logits_are_those_of_the_full_head_and_nothing_elsewhere(name: str, use_kernels: bool) -> None:
    ids = torch.tensor(TOKEN_IDS)
    reduced = adopt_model(deepcopy(plain_model(name)), name, "cpu", use_kernels, ids)
    full = adopt_model(deepcopy(plain_model(name)), name, "cpu", use_kernels)
    prompt = random_prompt(19)
    assert_reduced(logits_of(reduced, prompt), logits_of(full, prompt), TOKEN_IDS, atol=1e-5)
    assert reduced.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("tied", [True, False])
def test_16_bit_logits_are_those_of_the_full_head(tied: bool) -> None:
    module = build(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).bfloat16()
    reduced = adopt_model(deepcopy(module), "tiny", draft_vocabulary=torch.tensor(TOKEN_IDS))
    prompt = random_prompt(19)
    full = logits_of(adopt_model(module, "tiny"), prompt)
    assert_reduced(logits_of(reduced, prompt), full, TOKEN_IDS, atol=float(full.abs().max()) * 0.01)


def test_a_smaller_vocabulary_cuts_a_reduced_head_too() -> None:
    model = adopt_model(deepcopy(plain_model("llama")), "llama", draft_vocabulary=torch.tensor(TOKEN_IDS))
    prompt = [token % 90 for token in random_prompt(9)]
    cut = logits_of(model.limited(vocab_size=90), prompt)
    assert torch.equal(cut, logits_of(model, prompt)[:, :90])


def test_a_vocabulary_without_any_of_its_ids_is_refused() -> None:
    model = adopt_model(deepcopy(plain_model("llama")), "llama", draft_vocabulary=torch.tensor([50, 60]))
    with pytest.raises(FailedPreconditionError, match=r"draft_vocabulary\.json has no id below 50"):
        model.limited(vocab_size=50)
    assert model.limited(vocab_size=51).num_columns == 1


def test_only_the_rows_of_the_draft_vocabulary_are_kept() -> None:
    full = adopt_model(deepcopy(plain_model("llama")), "llama")
    reduced = adopt_model(deepcopy(plain_model("llama")), "llama", draft_vocabulary=torch.tensor(TOKEN_IDS))
    missing = VOCAB_SIZE - len(TOKEN_IDS)
    assert full.num_parameters - reduced.num_parameters == missing * SHAPE["hidden_size"]


def test_rows_in_the_wrong_place_are_noticed_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = draft_vocabulary.reduce_head
    shifted = torch.tensor([max(token - 1, 0) for token in TOKEN_IDS])
    monkeypatch.setattr("specdecode.lm.model.reduce_head", lambda m, ids, name: gathered(m, shifted, name))
    with pytest.raises(FailedPreconditionError, match="differs from its own attention"):
        adopt_model(deepcopy(plain_model("llama")), "llama", draft_vocabulary=torch.tensor(TOKEN_IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(rows=st.integers(1, 5), ids=st.sets(st.integers(0, 299), min_size=1, max_size=300))
@settings(deadline=None, max_examples=30)
def test_spreading_is_a_copy_by_index(dtype: torch.dtype, rows: int, ids: set[int]) -> None:
    kernels = load_kernels(dtype)
    assert kernels is not None
    token_ids = torch.tensor(sorted(ids))
    logits = torch.randn(rows, len(ids)).to(dtype)
    expected = torch.full((rows, 300), -torch.inf, dtype=dtype).index_copy(1, token_ids, logits)
    assert torch.equal(kernels.spread(logits, token_ids, 300), expected)


# What is made of them


@pytest.mark.parametrize("use_kernels", [True, False])
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    penalty=st.sampled_from([1.0, 1.4]),
)
@settings(deadline=None, max_examples=60)
def test_p_is_that_of_a_model_without_the_other_tokens(
    use_kernels: bool, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    """Of 20 ids fewer than top-k may be left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(300, generator=generator)[:20].sort().values
    own = 3 * torch.randn(1, 20, generator=generator)
    logits = torch.full((1, 300), -torch.inf).index_copy(1, ids, own)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    seen = [3, 7, 12]
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    used = kernels.sampling if use_kernels else None
    p = probabilities(logits, [Window(params, ids[seen].tolist(), 1)], used)
    expected = probabilities(own, [Window(params, seen, 1)])
    torch.testing.assert_close(p[:, ids], expected, atol=1e-6, rtol=1e-5)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    assert not p.index_fill(1, ids, 0.0).any()
    assert greedy_tokens(logits, [Window(params, [], 0)]).tolist() == ids[own.argmax(1)].tolist()
    token_ids, q = restrict_top_k(p, 64)
    assert set(token_ids[q > 0].tolist()) <= set(ids.tolist())
    assert float(q.sum()) == pytest.approx(1.0, abs=1e-5)


# The file


def save(directory: Path, token_ids: Any = None, **content: Any) -> Path:
    build(LlamaConfig(**SHAPE)).save_pretrained(directory)
    if content or token_ids is not None:
        raw = content or {"format": 1, "token_ids": token_ids}
        (directory / "draft_vocabulary.json").write_text(json.dumps(raw))
    return directory


def test_the_file_in_a_models_directory_is_heeded(tmp_path: Path) -> None:
    full = load_model(save(tmp_path / "full"), torch.float32)
    write_draft_vocabulary(save(tmp_path / "reduced"), TOKEN_IDS)
    reduced = load_model(tmp_path / "reduced", torch.float32)
    assert full.draft_vocabulary is None
    assert reduced.draft_vocabulary is not None
    assert reduced.draft_vocabulary.tolist() == TOKEN_IDS
    prompt = random_prompt(9)
    assert_reduced(logits_of(reduced, prompt), logits_of(full, prompt), TOKEN_IDS, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "can't be read"),
        ("[1, 2]", "format is 'list'"),
        ('{"token_ids": [1]}', "format is None; this version reads format 1"),
        ('{"format": 2, "token_ids": [1]}', "format is 2"),
        ('{"format": 1}', "token_ids must be a list"),
        ('{"format": 1, "token_ids": []}', "at least 1 integer"),
        ('{"format": 1, "token_ids": [1, true]}', "list of at least 1 integer"),
        ('{"format": 1, "token_ids": [1, 2.0]}', "list of at least 1 integer"),
        ('{"format": 1, "token_ids": [1, 3, 2]}', "ascending, none twice"),
        ('{"format": 1, "token_ids": [1, 2, 2]}', "ascending, none twice"),
        ('{"format": 1, "token_ids": [-1, 2]}', "-1 to 2 are not within 0 to 199"),
        ('{"format": 1, "token_ids": [1, 200]}', "1 to 200 are not within 0 to 199"),
    ],
)
def test_a_file_that_is_no_such_list_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "draft_vocabulary.json").write_text(text)
    with pytest.raises(FailedPreconditionError, match=r"draft_vocabulary\.json") as caught:
        read_draft_vocabulary(tmp_path, VOCAB_SIZE)
    assert reason in caught.value.message


def test_a_damaged_file_stops_the_model_from_loading(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"draft_vocabulary\.json.*ascending"):
        load_model(save(tmp_path, [5, 4]), torch.float32)


def test_a_target_with_a_draft_vocabulary_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = load_model(save(tmp_path, [3, 4, 9]), torch.float32)
    with pytest.raises(FailedPreconditionError, match=r"draft_vocabulary\.json leaves 3 of 200 ids"):
        Engine(PagedLM(model, num_blocks=8))
