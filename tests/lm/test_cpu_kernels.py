"""Every compiled kernel computes what the torch expression does that it stands for."""

from __future__ import annotations

import logging
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from specdecode.lm.attention import LONGEST_WINDOW, AttentionPlan, LayerShape, PagedKV, Span
from specdecode.lm.cpu import Kernels, load_kernels
from specdecode.lm.cpu import build as building
from specdecode.lm.cpu.fused import FusedAttention, FusedGatedMLP, FusedRMSNorm
from specdecode.lm.cpu.kernels import MAX_BLOCK_SIZE, MAX_DIM, tiled
from specdecode.lm.model import adopt_model
from specdecode.lm.runner import Chunk, PagedLM
from tests.lm.tiny import CONFIGS, SHAPE, build, plain_logits, plain_model, random_prompt

DTYPES = [torch.float32, torch.bfloat16]
# One unit in the last place of bfloat16 is 1/128; float32's is 1e-7.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert loaded is not None, "the kernels can't be compiled here"
    return loaded


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 3, 64), (1, 70, 576), (5, 33)])
def test_rms_norm(kernels: Kernels, shape: tuple[int, ...]) -> None:
    x, weight = 30 * noise(*shape, dtype=kernels.dtype), noise(shape[-1], seed=1, dtype=kernels.dtype)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert_near(kernels.rms_norm(x, weight, 1e-5), weight * normed.to(kernels.dtype))


def test_rms_norm_of_next_to_nothing(kernels: Kernels) -> None:
    x, weight = 1e-3 * noise(3, 40, dtype=kernels.dtype), noise(40, seed=1, dtype=kernels.dtype)
    x[1] = 0.0
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert_near(kernels.rms_norm(x, weight, 1e-5), weight * normed.to(kernels.dtype))


def test_a_norm_is_rounded_before_it_is_weighted_as_transformers_does() -> None:
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    x, weight = noise(64, 192, dtype=torch.bfloat16), noise(192, seed=1, dtype=torch.bfloat16)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = weight * normed.bfloat16()
    # A sum's order leaves the last bits of a float32 open; that moves next to nothing to another bfloat16.
    assert (kernels.rms_norm(x, weight, 1e-5) == expected).float().mean() > 0.99


def test_numbers_are_rounded_as_torch_rounds_them(kernels: Kernels) -> None:
    """To the nearest, halves to the even one: always up or down would shift every layer the same way."""
    x, added = (noise(40, 200, seed=seed, dtype=kernels.dtype) for seed in range(2))
    total, weight = x + added, torch.ones(200, dtype=kernels.dtype)
    normed = kernels.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(x, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("rows", "size"), [(1, 5), (2, 96), (64, 1536)])
def test_silu_product(kernels: Kernels, rows: int, size: int) -> None:
    gate_up = 20 * noise(rows, 2 * size, dtype=kernels.dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        kernels.silu_product(gate_up).float(), expected, atol=1e-3, rtol=TOLERANCE[kernels.dtype]
    )


def test_what_is_no_number_stays_no_number(kernels: Kernels) -> None:
    x = noise(3, 64, dtype=kernels.dtype)
    x[1, 7] = torch.nan
    weight = torch.ones(64, dtype=kernels.dtype)
    assert kernels.rms_norm(x, weight, 1e-5).isnan().any(-1).tolist() == [False, True, False]
    assert kernels.silu_product(x).isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("rotated", [16, 8])
def test_rotate_and_store(kernels: Kernels, rotated: int) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 16, 9
    qkv = noise(tokens, (heads + 2 * kv_heads) * dim, dtype=kernels.dtype)
    angles = torch.arange(tokens)[:, None] * torch.linspace(0.1, 1, rotated)
    cosine, sine = angles.cos().to(kernels.dtype), angles.sin().to(kernels.dtype)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:tokens]
    keys, values = (torch.zeros(10, 4, kv_heads, dim, dtype=kernels.dtype) for _ in range(2))
    query = kernels.rotate_and_store(qkv, cosine, sine, slots, keys, values, heads)

    def turned(x: Tensor) -> Tensor:
        part = x[..., :rotated]
        half = torch.cat((-part[..., rotated // 2 :], part[..., : rotated // 2]), dim=-1)
        return torch.cat((part * cosine[:, None] + half * sine[:, None], x[..., rotated:]), dim=-1)

    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    assert_near(query, turned(q.view(tokens, heads, dim)))
    assert_near(keys.flatten(0, 1)[slots], turned(k.view(tokens, kv_heads, dim)))
    assert torch.equal(values.flatten(0, 1)[slots], v.view(tokens, kv_heads, dim))
    untouched = torch.ones(40, dtype=torch.bool).index_fill(0, slots, False)
    assert not keys.flatten(0, 1)[untouched].any()
    assert not values.flatten(0, 1)[untouched].any()


SPANS = [(0, 1), (15, 1), (16, 1), (200, 1), (31, 5), (63, 33), (0, 64), (7, 9)]


@pytest.mark.parametrize("dim", [8, 64, 80, 128, MAX_DIM])
@pytest.mark.parametrize("window", [None, 1, 8, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("block_size", [4, 16, MAX_BLOCK_SIZE])
def test_attention_over_blocks_in_place_is_that_of_the_dense_batch(
    kernels: Kernels, dim: int, window: int | None, softcap: float | None, block_size: int
) -> None:
    heads, kv_heads = 6, 2
    kv = PagedKV([LayerShape(kv_heads, dim, dim)], 600, block_size, kernels.dtype, torch.device("cpu"))
    for seed, stored in enumerate((kv.keys[0], kv.values[0])):
        stored.copy_(noise(*stored.shape, seed=seed))
    order = torch.randperm(600, generator=torch.Generator().manual_seed(2)).tolist()
    spans = [Span([order.pop() for _ in range((s + n) // block_size + 1)], s, n) for s, n in SPANS]
    query = noise(sum(span.num_tokens for span in spans), heads, dim, seed=3, dtype=kernels.dtype)
    stored = kv.keys[0], kv.values[0]
    in_place = AttentionPlan(kv, spans, torch.device("cpu"), kernels).attend(
        query, *stored, dim**-0.5, window, softcap
    )
    # In the narrower dtypes the dense batch rounds as much as the kernel, or more.
    dense = AttentionPlan(kv, spans, torch.device("cpu")).attend(
        query.double(), *(tensor.double() for tensor in stored), dim**-0.5, window, softcap
    )
    assert_near(in_place, dense.to(kernels.dtype))


def attended(kv: PagedKV, span: Span, query: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """One token after another, by the definition, in float64; query [num_tokens, heads, dim]."""
    rows = []
    for index, q in enumerate(query.double()):
        position = span.start + index
        seen = range(0 if window is None else max(position - window + 1, 0), position + 1)
        block, place = zip(*(divmod(p, kv.block_size) for p in seen), strict=True)
        at = torch.tensor([span.block_table[b] for b in block]), torch.tensor(place)
        repeat = query.shape[1] // kv.keys[0].shape[2]
        key, value = (
            stored[at].double().repeat_interleave(repeat, 1) for stored in (kv.keys[0], kv.values[0])
        )
        scores = torch.einsum("hd,khd->hk", q, key) * query.shape[2] ** -0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(1), value))
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_reads_what_each_token_may_see_and_nothing_else(data: st.DataObject) -> None:
    """Any shape, on the kernel and in a dense batch; whatever lies beyond a sequence is NaN."""
    dtype, is_dense = data.draw(
        st.sampled_from([*((dtype, False) for dtype in DTYPES), (torch.float32, True)])
    )
    dim = data.draw(st.sampled_from([2, 32, 64, 80, 96, 128, 255, MAX_DIM]))
    kv_heads, repeat = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 13))
    block_size = data.draw(st.sampled_from([1, 3, 4, 16, 17, MAX_BLOCK_SIZE]))
    window = data.draw(st.sampled_from([None, 1, 2, 16, 17]))
    softcap = data.draw(st.sampled_from([None, 5.0]))
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 14)), max_size=4))
    loaded = None if is_dense else load_kernels(dtype)
    assert is_dense or loaded is not None
    num_blocks = sum((start + count) // block_size + 1 for start, count in shapes)
    kv = PagedKV([LayerShape(kv_heads, dim, dim)], num_blocks, block_size, dtype, torch.device("cpu"))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    spans = [Span([order.pop() for _ in range((s + n) // block_size + 1)], s, n) for s, n in shapes]
    for seed, stored in enumerate((kv.keys[0], kv.values[0])):
        stored.fill_(torch.nan)
        for span in spans:
            places = torch.arange(span.start + span.num_tokens)
            slots = torch.tensor(span.block_table)[places // block_size] * block_size + places % block_size
            filled = noise(len(places), kv_heads, dim, seed=seed + len(places), dtype=dtype)
            stored.flatten(0, 1)[slots] = filled
    query = noise(sum(span.num_tokens for span in spans), kv_heads * repeat, dim, seed=3, dtype=dtype)
    actual = AttentionPlan(kv, spans, torch.device("cpu"), loaded).attend(
        query, kv.keys[0], kv.values[0], None, window, softcap
    )
    parts = query.split([span.num_tokens for span in spans])
    for span, part, own in zip(spans, parts, actual.split([len(p) for p in parts]), strict=True):
        assert_near(own, attended(kv, span, part, window, softcap).to(dtype))


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_later_draft_is_nothing_to_the_tokens_before_it(kernels: Kernels, block_size: int) -> None:
    kv = PagedKV([LayerShape(2, 64, 64)], 20, block_size, kernels.dtype, torch.device("cpu"))
    for seed, stored in enumerate((kv.keys[0], kv.values[0])):
        stored.copy_(noise(*stored.shape, seed=seed))
    span = Span(list(range(20)), 10, 9)
    query = noise(9, 6, 64, seed=3, dtype=kernels.dtype)
    plan = AttentionPlan(kv, [span], torch.device("cpu"), kernels)
    before = plan.attend(query, kv.keys[0], kv.values[0], 0.3, None, None)
    for index in range(8, 0, -1):
        block, place = divmod(span.start + index, block_size)
        kv.keys[0][block, place] = kv.values[0][block, place] = torch.nan
        after = plan.attend(query, kv.keys[0], kv.values[0], 0.3, None, None)
        assert torch.equal(after[:index], before[:index])
        assert after[index:].isnan().all()


def test_longer_spans_take_the_dense_path_beside_windows(kernels: Kernels) -> None:
    kv = PagedKV([LayerShape(1, 16, 16)], 40, 16, kernels.dtype, torch.device("cpu"))
    for seed, stored in enumerate((kv.keys[0], kv.values[0])):
        stored.copy_(noise(*stored.shape, seed=seed))
    spans = [Span([3], 4, 1), Span(list(range(10, 20)), 0, LONGEST_WINDOW + 1), Span([4, 5], 16, 2)]
    query = noise(LONGEST_WINDOW + 4, 2, 16, seed=3, dtype=kernels.dtype)
    plans = [AttentionPlan(kv, spans, torch.device("cpu"), used) for used in (kernels, None)]
    assert_near(*(plan.attend(query, kv.keys[0], kv.values[0], None, None, None) for plan in plans))


def test_a_sequence_is_computed_to_the_bit_whatever_is_beside_it(kernels: Kernels) -> None:
    kv = PagedKV([LayerShape(2, 64, 64)], 80, 16, kernels.dtype, torch.device("cpu"))
    for seed, stored in enumerate((kv.keys[0], kv.values[0])):
        stored.copy_(noise(*stored.shape, seed=seed))
    spans = [Span(list(range(5 * i, 5 * i + 5)), 60 + i, 1) for i in range(12)]
    query = noise(12, 6, 64, seed=3, dtype=kernels.dtype)
    together = AttentionPlan(kv, spans, torch.device("cpu"), kernels).attend(
        query, kv.keys[0], kv.values[0], 0.3, None, None
    )
    for index, span in enumerate(spans):
        alone = AttentionPlan(kv, [span], torch.device("cpu"), kernels).attend(
            query[index : index + 1], kv.keys[0], kv.values[0], 0.3, None, None
        )
        assert torch.equal(alone[0], together[index])


def test_best_tokens_takes_the_lowest_of_equals_and_names_rows_that_are_not_finite(kernels: Kernels) -> None:
    logits = noise(6, 1003, dtype=kernels.dtype)[:, :1000]
    logits[0, [17, 900]] = 50.0
    logits[1, 999] = 60.0
    logits[2, 3] = torch.nan
    logits[3, 4] = -torch.inf
    logits[4, 5] = torch.inf
    best, finite = kernels.best_tokens(logits)
    assert finite.tolist() == [True, True, False, False, False, True]
    assert best[[0, 1, 4]].tolist() == [17, 999, 5]
    assert best[5] == logits[5].max(0).indices
    nothing = torch.full((1, 10), torch.nan, dtype=kernels.dtype)
    assert not kernels.best_tokens(nothing)[1].any()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 48, 70])
@pytest.mark.parametrize(("out_features", "in_features"), [(8, 32), (16, 64), (47, 96), (200, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows: int, out_features: int, in_features: int, has_bias: bool) -> None:
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    if not kernels.has_linear:
        pytest.skip("this processor multiplies neither tiles nor pairs")
    x = noise(rows, in_features, dtype=torch.bfloat16)
    weight = noise(out_features, in_features, seed=1, dtype=torch.bfloat16)
    bias = noise(out_features, seed=2, dtype=torch.bfloat16) if has_bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    actual = kernels.linear(x, tiled(weight), bias, out_features)
    torch.testing.assert_close(actual.double(), expected, atol=0.02, rtol=2**-7)


def test_a_row_of_a_product_is_the_same_to_the_bit_whatever_is_beside_it() -> None:
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    if not kernels.has_linear:
        pytest.skip("this processor multiplies neither tiles nor pairs")
    x, weight = noise(70, 96, dtype=torch.bfloat16), noise(50, 96, seed=1, dtype=torch.bfloat16)
    together = kernels.linear(x, tiled(weight), None, 50)
    for row in range(70):
        assert torch.equal(kernels.linear(x[row : row + 1], tiled(weight), None, 50)[0], together[row])


@pytest.mark.parametrize("out_features", [8, 50, 200, 4096])
def test_a_product_is_the_same_to_the_bit_however_many_threads_share_it(out_features: int) -> None:
    """Also where there are more of them than cores, so that some do the work of others."""
    kernels = load_kernels(torch.bfloat16)
    assert kernels is not None
    if not kernels.has_linear:
        pytest.skip("this processor multiplies neither tiles nor pairs")
    x, weight = noise(7, 96, dtype=torch.bfloat16), noise(out_features, 96, seed=1, dtype=torch.bfloat16)
    before, tiles, results = torch.get_num_threads(), tiled(weight), []
    try:
        for num_threads in (1, 2, 3, 70):
            torch.set_num_threads(num_threads)
            results += [kernels.linear(x, tiles, None, out_features) for _ in range(50)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_on_kernels_equal_the_plain_model_in_float32(name: str) -> None:
    """Windows small enough for the kernel, prompts longer than a sliding window."""
    model = adopt_model(deepcopy(plain_model(name)), name)
    assert model.kernels is not None
    lm = PagedLM(model, 40)
    prompts = [random_prompt(length, length) for length in (1, 17, 60)]
    sequences = [lm.new_sequence(prompt) for prompt in prompts]
    logits = lm.forward([Chunk(s, s.token_ids, len(s.token_ids)) for s in sequences])
    for prompt, rows in zip(prompts, logits.split([len(prompt) for prompt in prompts]), strict=True):
        torch.testing.assert_close(rows, plain_logits(name, prompt), atol=1e-4, rtol=0.0)


def test_what_is_replaced_is_what_is_known() -> None:
    kinds = {
        name: {type(m) for m in adopt_model(deepcopy(plain_model(name)), name).module.modules()}
        for name in CONFIGS
    }
    for name in ("llama", "mistral", "qwen2"):
        assert {FusedAttention, FusedGatedMLP, FusedRMSNorm} <= kinds[name]
    assert FusedAttention not in kinds["qwen3"]  # norms its queries and keys
    assert FusedRMSNorm not in kinds["gemma3"]  # scales by 1 + weight
    assert not {FusedAttention, FusedGatedMLP, FusedRMSNorm} & kinds["gptneox"]


def test_models_of_known_parts_run_as_one_stack() -> None:
    stacked = {name for name in CONFIGS if adopt_model(deepcopy(plain_model(name)), name).stack is not None}
    assert stacked == {"llama", "mistral", "qwen2"}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_layers_in_one_call_are_the_layers_one_by_one_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than a sliding window, several sequences, then a token of each."""
    model = adopt_model(deepcopy(plain_model(name)).bfloat16(), name)
    assert model.kernels is not None
    if not model.kernels.has_linear:
        pytest.skip("this processor multiplies neither tiles nor pairs")
    assert model.stack is not None
    assert model.stack.compiled is not None
    prompts = [random_prompt(length, length) for length in (1, 17, 60)]

    def run() -> list[Tensor]:
        lm = PagedLM(model, 40)
        sequences = [lm.new_sequence(prompt) for prompt in prompts]
        first = lm.forward([Chunk(s, s.token_ids, len(s.token_ids)) for s in sequences])
        return [first, lm.forward([Chunk(s, [7 + s.kv_len], 1) for s in sequences])]

    together = run()
    monkeypatch.setattr(model.stack, "compiled", None)
    for one_call, one_by_one in zip(together, run(), strict=True):
        assert torch.equal(one_call, one_by_one)


def test_a_stack_turns_by_the_same_angles_far_into_the_context() -> None:
    """Beyond the positions that are prepared at first, and from one step to the next."""
    module = build(LlamaConfig(**(SHAPE | {"max_position_embeddings": 4096})))
    with torch.inference_mode():
        prompt = random_prompt(2100)
        expected = module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, [4, 1200, 2099]]
    model = adopt_model(module, "llama")
    lm = PagedLM(model, 200)
    sequence = lm.new_sequence(prompt)
    ends = (5, 1201, 2100)
    rows = [lm.forward([Chunk(sequence, prompt[sequence.kv_len : end], 1)])[0] for end in ends]
    torch.testing.assert_close(torch.stack(rows), expected, atol=1e-3, rtol=0.0)


def test_without_kernels_the_model_is_as_transformers_has_it() -> None:
    model = adopt_model(deepcopy(plain_model("llama")), "llama", use_kernels=False)
    assert model.kernels is None
    assert model.stack is None
    assert not any(isinstance(m, FusedAttention | FusedRMSNorm) for m in model.module.modules())


# Building


def test_a_build_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))
    library = building.build_library()
    assert library.is_relative_to(tmp_path)
    assert building.build_library().stat() == library.stat()
    assert list(library.parent.iterdir()) == [library]
    assert Kernels(library, torch.float32).rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [
        [1] * 4
    ]


def test_without_a_compiler_torch_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert load_kernels(torch.float32) is None
        assert "no C++ compiler" in caplog.text
    finally:
        load_kernels.cache_clear()


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'internal error' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert subprocess.run([broken, "--version"]).returncode == 0
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(building.BuildError, match="internal error"):
        building.build_library()
    assert not list((tmp_path / "kernels").iterdir())
