"""Tiny random-weight models of the architectures that are served, built from configurations."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from specdecode.lm.model import LoadedModel, adopt_model

VOCAB_SIZE = 200
MAX_LENGTH = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    # Spreads the logits: no two are close enough for rounding to swap them.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8, layer_types=ALTERNATING),
    "phi3": lambda: Phi3Config(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "gptneox": lambda: GPTNeoXConfig(**SHAPE, rotary_pct=0.25),
}
"""The architectures that are promised."""

MORE_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2 (learned positions)": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_LENGTH, initializer_range=0.2
    ),
    "gemma2 (capped scores)": lambda: Gemma2Config(
        **SHAPE, head_dim=16, sliding_window=8, layer_types=ALTERNATING, attn_logit_softcapping=5.0
    ),
}


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids below `vocab_size`."""
    chosen = random.Random(seed)
    return [chosen.randrange(vocab_size) for _ in range(length)]


def build(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A float32 model with the weights of this seed, on transformers' own attention."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@cache
def plain_model(name: str) -> Any:
    """The reference: transformers' model, untouched."""
    return build((CONFIGS | MORE_CONFIGS)[name]())


@cache
def paged_model(name: str) -> LoadedModel:
    """The same weights on paged attention."""
    return adopt_model(deepcopy(plain_model(name)), name)


@torch.inference_mode()
def plain_logits(name: str, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size] by the reference."""
    logits: torch.Tensor = plain_model(name)(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
