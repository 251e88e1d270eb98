"""Paged attention computes what the model's own attention computes, and refuses what it can't."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FalconConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from specdecode.errors import FailedPreconditionError, Reason
from specdecode.lm.model import LoadedModel, adopt_model, load_model
from specdecode.lm.runner import Chunk, PagedLM
from tests.lm.tiny import (
    CONFIGS,
    MORE_CONFIGS,
    SHAPE,
    VOCAB_SIZE,
    build,
    paged_model,
    plain_logits,
    plain_model,
    random_prompt,
)

PROMPT_LENGTHS = (1, 5, 15, 16, 17, 200)
# Ids from BROKEN on occur in no prompt.
BROKEN = VOCAB_SIZE - 1
PROMPTS = [random_prompt(length, seed, BROKEN) for seed, length in enumerate(PROMPT_LENGTHS)]


def scattered_lm(model: LoadedModel, num_blocks: int = 40) -> PagedLM:
    """A pool that hands out its blocks in no order, with KV of somebody else in them."""
    lm = PagedLM(model, num_blocks)
    blocks = lm.pool.allocate(num_blocks)
    random.Random(7).shuffle(blocks)
    for block in blocks:
        lm.pool.release([block])
    for stored in (*lm.kv.keys, *lm.kv.values):
        stored.normal_(generator=torch.Generator().manual_seed(1))
    return lm


def logits_in_chunks(lm: PagedLM, prompts: list[list[int]], sizes: Callable[[], int]) -> list[torch.Tensor]:
    """All logits of every prompt, fed together in ragged batches of chunks of `sizes()` tokens."""
    sequences = [lm.new_sequence(prompt) for prompt in prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while True:
        chunks = [(i, s.missing[: sizes()]) for i, s in enumerate(sequences) if s.missing]
        if not chunks:
            return [torch.cat(part) for part in parts]
        rows = lm.forward([Chunk(sequences[i], tokens, len(tokens)) for i, tokens in chunks])
        for (i, _), part in zip(chunks, rows.split([len(tokens) for _, tokens in chunks]), strict=True):
            parts[i].append(part)
        lm.pool.check_integrity([sequence.block_table for sequence in sequences])


@pytest.mark.parametrize("name", [*CONFIGS, *MORE_CONFIGS])
def test_logits_of_mixed_ragged_batches_equal_the_plain_models(name: str) -> None:
    sizes = random.Random(3)
    paged = logits_in_chunks(scattered_lm(paged_model(name)), PROMPTS, lambda: sizes.randint(1, 33))
    for prompt, logits in zip(PROMPTS, paged, strict=True):
        torch.testing.assert_close(logits, plain_logits(name, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", [*CONFIGS, *MORE_CONFIGS])
def test_whole_prompts_beside_each_other_equal_the_plain_models(name: str) -> None:
    paged = logits_in_chunks(scattered_lm(paged_model(name)), PROMPTS, lambda: 1000)
    for prompt, logits in zip(PROMPTS, paged, strict=True):
        torch.testing.assert_close(logits, plain_logits(name, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_window_after_a_rollback_equals_the_plain_models(name: str) -> None:
    lm = scattered_lm(paged_model(name))
    prompt = PROMPTS[-1][:40]
    sequence = lm.new_sequence(prompt)
    lm.forward([Chunk(sequence, prompt[:-1], 0)])
    lm.forward([Chunk(sequence, [prompt[-1], *[9] * 12], 13)])
    sequence.commit([9, 9, 5])
    sequence.rollback(sequence.committed_length - 1)
    logits = lm.forward([Chunk(sequence, [5, *range(20)], 21)])
    expected = plain_logits(name, [*prompt, 9, 9, 5, *range(20)])[-21:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


def test_a_shared_prefix_is_attended_to_by_everyone_who_adopted_it() -> None:
    lm = scattered_lm(paged_model("gemma3"))
    first = lm.new_sequence(PROMPTS[-1])
    lm.forward([Chunk(first, PROMPTS[-1][:100], 0)])
    first.publish()
    others = [lm.new_sequence([*PROMPTS[-1][:length], 3, 4]) for length in (96, 50, 17)]
    assert [other.adopt_prefix() for other in others] == [96, 48, 16]
    logits = lm.forward([Chunk(other, other.missing, 1) for other in others])
    for other, row in zip(others, logits, strict=True):
        torch.testing.assert_close(row, plain_logits("gemma3", other.token_ids)[-1], atol=1e-4, rtol=0.0)


def test_nan_in_one_sequence_reaches_no_other() -> None:
    module = deepcopy(plain_model("llama"))
    lm = PagedLM(adopt_model(module, "llama"), num_blocks=40)
    module.get_input_embeddings().weight[BROKEN] = torch.nan
    # 32 and 33 tokens are attended to in one dense batch, the first of them padded by a block.
    prompts = [[BROKEN] * 40, PROMPTS[-1][:32], PROMPTS[-1][:33], *PROMPTS]
    broken, *others = logits_in_chunks(lm, prompts, lambda: 1000)
    assert broken.isnan().all()
    for prompt, logits in zip(prompts[1:], others, strict=True):
        torch.testing.assert_close(logits, plain_logits("llama", prompt), atol=1e-4, rtol=0.0)


def test_blocks_that_held_nan_are_clean_for_their_next_owner() -> None:
    module = deepcopy(plain_model("llama"))
    lm = scattered_lm(adopt_model(module, "llama"), num_blocks=4)
    module.get_input_embeddings().weight[BROKEN] = torch.nan
    broken = lm.new_sequence([BROKEN] * 64)
    lm.forward([Chunk(broken, broken.token_ids, 1)])
    broken.release()
    prompts = [[1, 2, 3], [4] * 17]
    for prompt, logits in zip(prompts, logits_in_chunks(lm, prompts, lambda: 1000), strict=True):
        torch.testing.assert_close(logits, plain_logits("llama", prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptneox"])
def test_bfloat16_stays_near_the_plain_models(name: str) -> None:
    plain = deepcopy(plain_model(name)).to(torch.bfloat16)
    lm = scattered_lm(adopt_model(deepcopy(plain), name))
    sizes = random.Random(3)
    for prompt, logits in zip(
        PROMPTS, logits_in_chunks(lm, PROMPTS, lambda: sizes.randint(1, 33)), strict=True
    ):
        with torch.inference_mode():
            expected = plain(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
        assert logits.dtype == torch.bfloat16
        assert float((logits.float() - expected).abs().max()) < 0.1 * float(expected.abs().max())


def test_forward_advances_nothing_when_blocks_run_out() -> None:
    lm = PagedLM(paged_model("llama"), num_blocks=2)
    fits, too_long = lm.new_sequence([1] * 16), lm.new_sequence([1] * 33)
    with pytest.raises(Exception, match="blocks asked for"):
        lm.forward([Chunk(fits, fits.token_ids, 1), Chunk(too_long, too_long.token_ids, 1)])
    assert (fits.kv_len, too_long.kv_len) == (0, 0)


LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(**SHAPE), 512),
        (Phi3Config(**SHAPE, rope_parameters=LONG_ROPE, original_max_position_embeddings=64), 64),
        (
            LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            512,
        ),
    ],
    ids=["plain", "longrope", "dynamic"],
)
def test_the_context_ends_where_rotary_frequencies_would_depend_on_the_batch(
    config: PreTrainedConfig, longest: int
) -> None:
    assert adopt_model(build(config), "model").max_length == longest


MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent": (
        lambda: build(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4)),
        "MambaForCausalLM takes no position_ids",
    ),
    "attention of its own": (
        lambda: build(
            FalconConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        ),
        "FalconForCausalLM has 2 layers, of which only 0",
    ),
    "attention sinks": (
        lambda: build(GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
        "attention sinks",
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB_SIZE, d_model=32, num_layers=2, num_heads=2, d_kv=16, d_ff=32)
        ),
        "encoder-decoder",
    ),
    "encoder-decoder with position ids": (
        lambda: BartForConditionalGeneration(
            BartConfig(vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=1, decoder_layers=1)
        ),
        "encoder-decoder",
    ),
    "a window in the mask alone": (
        lambda: build(
            Qwen2MoeConfig(
                **SHAPE,
                **MOE,
                shared_expert_intermediate_size=32,
                use_sliding_window=True,
                sliding_window=32,
                max_window_layers=1,
            )
        ),
        r"bounds what layers \[0\] attend to",
    ),
    "chunks in the mask alone": (
        lambda: build(
            Llama4TextConfig(
                **SHAPE, head_dim=16, num_local_experts=2, attention_chunk_size=32, intermediate_size_mlp=64
            )
        ),
        r"bounds what layers \[0, 1\] attend to",
    ),
    "no stated context": (
        lambda: build(
            RecurrentGemmaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                lru_width=32,
            )
        ),
        "max_position_embeddings",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_architecture_that_cannot_be_served_is_refused_with_the_reason(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(FailedPreconditionError, match=reason) as caught:
        adopt_model(make(), "some-model")
    assert caught.value.reason is Reason.MODEL_NOT_SUPPORTED
    assert "some-model" in caught.value.message


def save(path: Path) -> Path:
    build(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


def test_a_saved_model_is_loaded_and_served(tmp_path: Path) -> None:
    model = load_model(save(tmp_path / "tiny"), torch.float32)
    assert (model.name, model.vocab_size, model.max_length) == ("tiny", VOCAB_SIZE, 512)
    (logits,) = logits_in_chunks(PagedLM(model, 4), [PROMPTS[1]], lambda: 2)
    torch.testing.assert_close(logits, plain_logits("llama", PROMPTS[1]), atol=1e-4, rtol=0.0)


def no_directory(path: Path) -> None:
    pass


def an_empty_directory(path: Path) -> None:
    path.mkdir()


def a_configuration_alone(path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(path)


def a_broken_configuration(path: Path) -> None:
    (save(path) / "config.json").write_text("{")


def pickled_weights(path: Path) -> None:
    weights = save(path) / "model.safetensors"
    torch.save(load_file(weights), path / "pytorch_model.bin")
    weights.unlink()


def cut_weights(path: Path) -> None:
    weights = save(path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def missing_weights(path: Path) -> None:
    weights = save(path) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "layers.1.mlp.up" not in name}
    save_file(kept, weights, metadata={"format": "pt"})


def another_shape(path: Path) -> None:
    LlamaConfig(**SHAPE | {"intermediate_size": 80}).save_pretrained(save(path))


@pytest.mark.parametrize(
    "prepare",
    [
        no_directory,
        an_empty_directory,
        a_configuration_alone,
        a_broken_configuration,
        pickled_weights,
        cut_weights,
        missing_weights,
        another_shape,
    ],
)
def test_what_holds_no_whole_safe_model_is_refused(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    path = tmp_path / "model"
    prepare(path)
    with pytest.raises(FailedPreconditionError, match=str(path)):
        load_model(path, torch.float32)
