"""Loading a causal LM of any architecture and putting its attention on the paged KV."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.logging import disable_progress_bar

from specdecode.cores import cores_id
from specdecode.errors import FailedPreconditionError
from specdecode.lm.attention import ATTENTION_NAME, LayerShape, register_attention
from specdecode.lm.cpu.fused import AttentionCall, fuse
from specdecode.lm.cpu.kernels import MAX_BLOCK_SIZE, MAX_DIM, Kernels, load_kernels
from specdecode.lm.cpu.stack import FusedStack
from specdecode.lm.draft_vocabulary import FILE_NAME, read_draft_vocabulary, reduce_head
from specdecode.lm.packing import can_pack, pack_linears
from specdecode.lm.ranks import Ranks
from specdecode.lm.sharding import load_shard
from specdecode.types import ModelInfo

_PROBE_NAME = "specdecode_probe"
# Rotary embeddings whose frequencies depend on a batch's longest position: one sequence would change another.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class LoadedModel:
    """A model whose attention is paged.

    Attributes:
        module: the transformers model, in eval mode.
        vocab_size: ids that may have mass; logits beyond are padding.
        max_length: longest sequence, prompt and output together.
        layers: what each layer stores for a token.
        num_parameters: weights, shared ones counted once.
        kernels: compiled ones that the model's layers run on; None: torch alone.
        stack: the whole model on them; None where `module` has to be called.
        draft_vocabulary: [K] int64, the only ids whose logits are computed, ascending; None: all are.
        ranks: processes that hold the other parts of it; None: it is whole.
    """

    module: Any
    name: str
    vocab_size: int
    max_length: int
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerShape, ...]
    num_parameters: int
    kernels: Kernels | None = None
    stack: FusedStack | None = None
    draft_vocabulary: Tensor | None = None
    ranks: Ranks | None = None

    def kernels_for(self, block_size: int) -> Kernels | None:
        """The attention's kernels, None where the model's or the pool's shape is beyond them."""
        fits = all(layer.key_dim == layer.value_dim <= MAX_DIM for layer in self.layers)
        return self.kernels if fits and block_size <= MAX_BLOCK_SIZE else None

    def block_bytes(self, block_size: int) -> int:
        """Memory of one KV block in all layers."""
        return block_size * self.dtype.itemsize * sum(layer.numbers for layer in self.layers)

    def info(self, fingerprint: str, eos_token_ids: tuple[int, ...]) -> ModelInfo:
        """What a peer needs to know of it; pool sizes are added by whoever has a pool."""
        return ModelInfo(
            name=self.name,
            fingerprint=fingerprint,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            eos_token_ids=eos_token_ids,
            num_parameters=self.num_parameters,
            cores=cores_id() if self.device.type == "cpu" else "",
        )

    @property
    def num_columns(self) -> int:
        """Ids whose logits are computed and may have mass."""
        return self.vocab_size if self.draft_vocabulary is None else len(self.draft_vocabulary)

    def limited(self, vocab_size: int | None = None, max_length: int | None = None) -> LoadedModel:
        """The same model with a smaller vocabulary or a shorter context, as given.

        Raises:
            FailedPreconditionError: nothing is left of its draft vocabulary.
        """
        size = min(self.vocab_size, vocab_size or self.vocab_size)
        drafted = self.draft_vocabulary
        if drafted is not None:
            drafted = drafted[drafted < size]
            if not len(drafted):
                raise FailedPreconditionError(
                    f"{self.name}: {FILE_NAME} has no id below {size}, the size of the tokenizer's vocabulary"
                )
        return replace(
            self,
            vocab_size=size,
            max_length=min(self.max_length, max_length or self.max_length),
            draft_vocabulary=drafted,
        )


def load_model(
    path: Path | str,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    use_kernels: bool = True,
) -> LoadedModel:
    """Loads a decoder-only model from a directory and checks that it can be served: safetensors, no remote
    code.

    `dtype` may also be a name, or "auto" for the checkpoint's own. Without `use_kernels` the layers run as
    transformers has them, on torch: the reference. A `draft_vocabulary.json` in the directory is heeded.

    Raises:
        FailedPreconditionError: the directory holds no such model, or an architecture that paged attention
            can't serve; the reason says which.
    """
    disable_progress_bar()  # it would tear the services' logs
    try:
        config = AutoConfig.from_pretrained(path)
        module, loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise FailedPreconditionError(
            f"{path}: not a causal language model that can be loaded: {error}"
        ) from error
    if missing := sorted(loaded["missing_keys"]):
        raise FailedPreconditionError(
            f"{path}: the checkpoint lacks {len(missing)} weights ({missing[0]}, …)"
        )
    token_ids = read_draft_vocabulary(Path(path), module.config.get_text_config().vocab_size)
    return adopt_model(module, Path(path).name, device, use_kernels, token_ids)


def load_part(path: Path, dtype: torch.dtype | str, device: torch.device | str, ranks: Ranks) -> LoadedModel:
    """This rank's part of a model, on paged attention; all ranks call it together.

    Raises:
        FailedPreconditionError: see `load_model`; also a model that can't be dealt out.
    """
    disable_progress_bar()
    shard = load_shard(path, dtype, ranks)
    model = adopt_model(shard.module, path.name, device, is_part=True)
    return replace(model, num_parameters=shard.num_parameters, ranks=ranks)


def adopt_model(
    module: Any,
    name: str,
    device: torch.device | str = "cpu",
    use_kernels: bool = True,
    draft_vocabulary: Tensor | None = None,  # [K] int64, ascending
    is_part: bool = False,
) -> LoadedModel:
    """Puts a transformers model on paged attention, after a self-test against its own attention.

    With a `draft_vocabulary` only the head's rows of its ids are kept and computed. What is part of a model
    stays as transformers has it, with the hooks that put the parts together.

    Raises:
        FailedPreconditionError: see `load_model`.
    """
    from specdecode.lm.selftest import PlainLogits, check_paged_equals_plain

    register_attention()
    module = module.eval().requires_grad_(False).to(device)
    config = module.config.get_text_config()
    _require_supported(module, config, name)
    longest = _max_length(config, name)
    plain = PlainLogits.of(module, _plain_attention(module), config.vocab_size, name)
    probed = _probe_layers(module, config, name)
    if draft_vocabulary is not None:
        reduce_head(module, draft_vocabulary, name)
    model = LoadedModel(
        module=module,
        name=name,
        vocab_size=config.vocab_size,
        max_length=longest,
        dtype=module.dtype,
        device=torch.device(device),
        layers=tuple(layer.shape for layer in probed),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        draft_vocabulary=None if draft_vocabulary is None else draft_vocabulary.to(device),
    )
    module.set_attn_implementation(ATTENTION_NAME)
    check_paged_equals_plain(model, plain)
    if is_part:
        return model
    kernels = load_kernels(model.dtype) if use_kernels and model.device.type == "cpu" else None
    if kernels is not None:
        fuse(module, kernels, {index: layer.call for index, layer in enumerate(probed)})
    if can_pack(model.dtype, model.device):
        pack_linears(module, kernels)
    model = replace(
        model, kernels=kernels, stack=None if kernels is None else FusedStack.of(module, longest, kernels)
    )
    check_paged_equals_plain(model, plain)
    return model


def _plain_attention(module: Any) -> str:
    """The model's own attention; its eager one where it has no other."""
    name = module.config._attn_implementation
    return name if name in ("eager", "sdpa") else "eager"


def _require_supported(module: Any, config: Any, name: str) -> None:
    parameters = inspect.signature(module.forward).parameters
    if getattr(config, "is_encoder_decoder", False):
        raise FailedPreconditionError(
            f"{name}: an encoder-decoder model; only decoder-only models are served"
        )
    if "logits_to_keep" not in parameters or "position_ids" not in parameters:
        raise FailedPreconditionError(
            f"{name}: {type(module).__name__} takes no position_ids or logits_to_keep"
        )


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield rope
    yield from (value for value in rope.values() if isinstance(value, Mapping))


def _max_length(config: Any, name: str) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not longest:
        raise FailedPreconditionError(f"{name}: its configuration states no max_position_embeddings")
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return int(longest)


@dataclass(frozen=True)
class _Probed:
    """What a layer stores for a token, and how it calls its attention."""

    shape: LayerShape
    call: AttentionCall


def _probe_layers(module: Any, config: Any, name: str) -> tuple[_Probed, ...]:
    """Runs one token and notes what each layer would store.

    Raises:
        FailedPreconditionError: some layer has no attention of the usual kind.
    """
    seen: dict[int, _Probed] = {}
    masked: list[int] = []

    def probe(
        layer: Any,
        query: Tensor,  # [1, heads, n, key_dim]
        key: Tensor,  # [1, kv_heads, n, key_dim]
        value: Tensor,  # [1, kv_heads, n, value_dim]
        mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        index = int(layer.layer_idx)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        seen[index] = _Probed(shape, AttentionCall(scale, sliding_window))
        if mask is not None and mask.dim() == 0 and int(mask) != (sliding_window or 0):
            masked.append(index)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def probe_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor:
        """Stands for the mask: the window or chunk asked of it, which must reach the attention too."""
        return torch.tensor(local_size or 0)

    AttentionInterface.register(_PROBE_NAME, probe)
    AttentionMaskInterface.register(_PROBE_NAME, probe_mask)
    before = _plain_attention(module)
    try:
        module.set_attn_implementation(_PROBE_NAME)
        with torch.inference_mode():
            module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=module.device), use_cache=False)
        module.set_attn_implementation(before)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise FailedPreconditionError(
            f"{name}: {type(module).__name__} can't run on paged attention: {error}"
        ) from error
    if sorted(seen) != list(range(config.num_hidden_layers)):
        raise FailedPreconditionError(
            f"{name}: {type(module).__name__} has {config.num_hidden_layers} layers, of which only "
            f"{len(seen)} go through transformers' attention interface with keys and values to store; "
            "recurrent and hybrid models, and those with an attention of their own, are not served"
        )
    if masked:
        raise FailedPreconditionError(
            f"{name}: {type(module).__name__} bounds what layers {masked} attend to (a window or chunks) "
            "in its mask alone, where paged attention can't see it"
        )
    return tuple(seen[layer] for layer in range(config.num_hidden_layers))
