"""Two ranks emit what one does: greedy text of `generate`, under rollback and preemption."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from specdecode.cli.stack import free_port
from specdecode.errors import FailedPreconditionError
from specdecode.lm.attention import Span
from specdecode.lm.model import load_part
from specdecode.lm.ranks import Ranks, StepPlan
from specdecode.lm.runner import PagedLM
from specdecode.lm.sharding import load_shard, split_config
from target_service.engine import Engine
from tests.lm.tiny import CONFIGS, MORE_CONFIGS, SHAPE, build, random_prompt
from tests.target.driver import Client, Drafter, opening

NUM_TOKENS = 24
NUM_BLOCKS = 22
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 200))]
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, one KV head and a shared head": LlamaConfig(
        **(SHAPE | {"num_key_value_heads": 1, "vocab_size": 201}), tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in MODELS.items():
        found[name] = tmp_path_factory.mktemp("part")
        build(config).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> Iterator[Ranks]:
    """Rank 0 of two, and a process that is the other one."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.target.rank", address, str(NUM_BLOCKS), *map(str, paths.values())]
    )
    own = Ranks.meet(0, 2, address, torch.device("cpu"))
    try:
        yield own
        assert other.wait(60) == 0
    finally:
        other.kill()
        own.close()


def generated(path: Path) -> list[list[int]]:
    """What `generate` continues each prompt with."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    texts = [reference.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]
    return [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts, strict=True)]


@pytest.mark.parametrize("name", MODELS)  # in the order in which the other rank takes them
def test_two_ranks_emit_what_one_does(name: str, paths: dict[str, Path], ranks: Ranks) -> None:
    model = load_part(paths[name], "float32", "cpu", ranks)
    whole = sum(p.numel() for p in build(MODELS[name]).parameters())
    assert model.num_parameters == whole
    assert sum(p.numel() for p in model.module.parameters()) < whole
    texts = generated(paths[name])
    num_preemptions = 0
    try:
        for kind in ("half right", "random"):
            client = Client(Engine(PagedLM(model, NUM_BLOCKS)))
            drafter = Drafter(client, dict(enumerate(texts)), kind)
            client.send(*(opening(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
            client.run(drafter.any_order)
            assert [client.tokens(i) for i in range(len(PROMPTS))] == texts, kind
            num_preemptions += sum(client.last(i).num_preemptions for i in range(len(PROMPTS)))
    finally:
        ranks.stop()
    assert num_preemptions > 0


@pytest.mark.parametrize("length", [1, 5000])
def test_a_plan_arrives_as_it_was_sent(length: int) -> None:
    plan = StepPlan([Span([3, 1], 16, 2), Span([], 0, length - 2)], list(range(length)), [0, length - 1])
    assert StepPlan.of_numbers(plan.numbers()) == plan


@pytest.mark.parametrize(
    ("shape", "size", "reason"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, 2, "9 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}, 2, "3 KV heads"),
        ({}, 8, "4 attention heads"),
        ({"intermediate_size": 97}, 2, "an MLP of 97"),
    ],
)
def test_what_can_not_be_dealt_out_is_refused(shape: dict[str, int], size: int, reason: str) -> None:
    with pytest.raises(FailedPreconditionError, match=reason):
        split_config(LlamaConfig(**(SHAPE | shape)), size, "tiny")


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    build((CONFIGS | MORE_CONFIGS)["gpt2 (learned positions)"]()).save_pretrained(tmp_path)
    with pytest.raises(FailedPreconditionError, match="tensor-parallel plan"):
        load_shard(tmp_path, "float32", Ranks(0, 2, None))


def test_a_plan_that_gathers_inside_the_model_is_refused(tmp_path: Path) -> None:
    build(CONFIGS["phi3"]()).save_pretrained(tmp_path)
    with pytest.raises(FailedPreconditionError, match="which is not followed here"):
        load_shard(tmp_path, "float32", Ranks(0, 2, None))
