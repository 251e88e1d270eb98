"""Models as a roofline sees them: what a token multiplies, and what a step reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode.errors import InvalidArgumentError


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers, dense or with experts.

    Attributes:
        name: shown.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size: as in the model's
        configuration.
        intermediate_size: of one feed-forward block (of one expert, if there are experts).
        num_experts: of a layer; 1 is dense.
        experts_per_token: that a token is routed to.
        shared_intermediate_size: of the feed-forward block that every token passes beside its experts.
        tied: whether the head shares its weights with the embedding.
        sliding_window: tokens that a windowed layer attends to; 0 for none.
        num_windowed_layers: how many are.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 1
    experts_per_token: int = 1
    shared_intermediate_size: int = 0
    tied: bool = False
    sliding_window: int = 0
    num_windowed_layers: int = 0

    def __post_init__(self) -> None:
        optional = ("shared_intermediate_size", "sliding_window", "num_windowed_layers", "tied", "name")
        for field, value in vars(self).items():
            if field not in optional and value < 1:
                raise InvalidArgumentError.of(field, f"{value} is below 1")
        if self.experts_per_token > self.num_experts:
            raise InvalidArgumentError.of("experts_per_token", f"is above num_experts, {self.num_experts}")
        if self.num_windowed_layers > self.num_layers:
            raise InvalidArgumentError.of("num_windowed_layers", f"is above num_layers, {self.num_layers}")

    @property
    def expert_parameters(self) -> int:
        """Of one expert (of the feed-forward block, if dense) in one layer."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def shared_parameters(self) -> int:
        """That every token multiplies and every step reads, the head apart."""
        queries = self.num_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * self.num_kv_heads * self.head_dim)
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        shared = 3 * self.hidden_size * self.shared_intermediate_size
        return self.num_layers * (attention + router + shared)

    @property
    def head_parameters(self) -> int:
        """Of the head, which rows that need logits multiply."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All, embedding included."""
        experts = self.num_layers * self.num_experts * self.expert_parameters
        return self.shared_parameters + experts + self.head_parameters * (1 if self.tied else 2)

    def experts_touched(self, tokens: float) -> float:
        """Expected experts of a layer that at least one of the tokens is routed to, routing being uniform."""
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return float(self.num_experts * (1 - missed))

    def attended(self, context: float) -> float:
        """Cached tokens that one query attends to, summed over layers."""
        windowed = min(context, self.sliding_window) * self.num_windowed_layers
        return windowed + context * (self.num_layers - self.num_windowed_layers)

    def kv_bytes(self, context: float, bytes_per_value: float) -> float:
        """Of one sequence with this context; GQA and windows counted."""
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_value * self.attended(context)


_LLAMA_VOCABULARY, _QWEN_VOCABULARY = 128_256, 151_936

SHAPES = {
    shape.name.lower(): shape
    for shape in (
        ModelShape("135M", 576, 30, 9, 3, 64, 1536, 49_152, tied=True),
        ModelShape("360M", 960, 32, 15, 5, 64, 2560, 49_152, tied=True),
        ModelShape("0.6B", 1024, 28, 16, 8, 128, 3072, _QWEN_VOCABULARY, tied=True),
        ModelShape("1B", 2048, 16, 32, 8, 64, 8192, _LLAMA_VOCABULARY, tied=True),
        ModelShape("3B", 3072, 28, 24, 8, 128, 8192, _LLAMA_VOCABULARY, tied=True),
        ModelShape("7B", 4096, 32, 32, 8, 128, 14_336, 32_768),
        ModelShape("8B", 4096, 32, 32, 8, 128, 14_336, _LLAMA_VOCABULARY),
        ModelShape("14B", 5120, 40, 40, 8, 128, 17_408, _QWEN_VOCABULARY),
        ModelShape(
            "27B",
            5376,
            62,
            32,
            16,
            128,
            21_504,
            262_144,
            tied=True,
            sliding_window=1024,
            num_windowed_layers=52,
        ),
        ModelShape("32B", 5120, 64, 64, 8, 128, 25_600, _QWEN_VOCABULARY),
        ModelShape("70B", 8192, 80, 64, 8, 128, 28_672, _LLAMA_VOCABULARY),
        ModelShape("405B", 16_384, 126, 128, 8, 128, 53_248, _LLAMA_VOCABULARY),
        ModelShape("8x7B", 4096, 32, 32, 8, 128, 14_336, 32_000, num_experts=8, experts_per_token=2),
        ModelShape("30B-A3B", 2048, 48, 32, 4, 128, 768, _QWEN_VOCABULARY, 128, 8),
        ModelShape("235B-A22B", 4096, 94, 64, 4, 128, 1536, _QWEN_VOCABULARY, 128, 8),
    )
}
"""By size: SmolLM2 (135M, 360M), Llama 3 (1B, 3B, 8B, 70B, 405B), Mistral (7B, 8x7B), Qwen 3 (0.6B, 14B,
32B, 30B-A3B, 235B-A22B), Gemma 3 (27B)."""


def model_shape(name: str, field: str = "target") -> ModelShape:
    """A shape by size (`70B`), or from a Hugging Face `config.json` or the directory it lies in."""
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        sizes = ", ".join(shape.name for shape in SHAPES.values())
        raise InvalidArgumentError.of(
            field, f"{name!r} is none of {sizes}, nor a config.json or its directory"
        )
    try:
        return _of_config(json.loads(path.read_text()), path.parent.name or name)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.of(field, f"{path} can't be read: {error}") from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError.of(field, f"{path}: {error.message}") from error


def _of_config(document: Any, name: str) -> ModelShape:
    if not isinstance(document, dict):
        raise InvalidArgumentError.of("config", "must be an object")
    config = document.get("text_config", document)
    if "kv_lora_rank" in config:
        raise InvalidArgumentError.of("kv_lora_rank", "multi-head latent attention is not planned for")
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    layers = _integer(config, "num_hidden_layers")
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts"), 1)
    is_moe = experts > 1
    intermediate = _first(config, ("moe_intermediate_size",) if is_moe else (), None)
    window, windowed = _windows(config, layers)
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_first(config, ("num_key_value_heads",), heads),
        head_dim=_first(config, ("head_dim",), hidden // heads),
        intermediate_size=_integer(config, "intermediate_size") if intermediate is None else intermediate,
        vocab_size=_integer(config, "vocab_size"),
        num_experts=experts,
        experts_per_token=_integer(config, "num_experts_per_tok") if is_moe else 1,
        shared_intermediate_size=_first(config, ("shared_expert_intermediate_size",), 0),
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=window,
        num_windowed_layers=windowed,
    )


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """Window and how many layers have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    return int(window), num_layers if kinds is None else sum(kind == "sliding_attention" for kind in kinds)


def _first(config: Mapping[str, Any], names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        if config.get(name) is not None:
            return _integer(config, name)
    return default


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError.of(name, f"{value!r} is not an integer")
    return value
