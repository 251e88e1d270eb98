"""One rank's part of a model, by the model's own tensor-parallel plan.

The part is the same architecture with fewer heads and a narrower MLP. Its weights are read as slices, so that
no rank ever holds the whole model. Heads are dealt out in blocks; where there are fewer KV heads than ranks
each KV head is held by several. What has no plan, or one that can't be followed, is refused.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from specdecode.errors import FailedPreconditionError
from specdecode.lm.ranks import Ranks, gathered, summed

_COLUMNS, _ROWS, _HEAD = "colwise", "rowwise", ("colwise_gather_output", "colwise_rep")
# Embeddings too: looking a row up takes no time, and summing parts of it would.
_WHOLE = ("replicated", "replicated_with_grad_allreduce", "embedding_rowwise")


def split_config(config: Any, size: int, name: str) -> Any:
    """The configuration of one rank's part.

    Raises:
        FailedPreconditionError: it can't be dealt out to `size` ranks.
    """
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    kv_heads = kv_heads or heads
    if heads % size:
        raise _refusal(name, f"{heads} attention heads can't be dealt out to {size} ranks")
    if kv_heads % size and size % kv_heads:
        raise _refusal(name, f"{kv_heads} KV heads can't be dealt out to {size} ranks, nor ranks to KV heads")
    if config.intermediate_size % size:
        raise _refusal(name, f"an MLP of {config.intermediate_size} can't be dealt out to {size} ranks")
    part = copy.deepcopy(config)
    part.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    part.num_attention_heads = heads // size
    part.num_key_value_heads = max(kv_heads // size, 1)
    part.intermediate_size = config.intermediate_size // size
    # The head is dealt out by id, whatever it shares with the embedding.
    part.tie_word_embeddings = False
    return part


def _refusal(name: str, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"{name}: tensor_parallel: {reason}; set another number of ranks")


@dataclass(frozen=True)
class Shard:
    """One rank's part, its weights loaded.

    Attributes:
        module: as transformers has it; its forward is a collective call of all ranks.
        num_parameters: of the whole model.
    """

    module: Any
    num_parameters: int


def load_shard(path: Path, dtype: torch.dtype | str, ranks: Ranks) -> Shard:
    """Reads this rank's part of the model in a directory.

    Raises:
        FailedPreconditionError: no such model, or one that can't be dealt out; the reason says why.
    """
    config, part = read_configs(path, ranks.size)
    module = AutoModelForCausalLM.from_config(part, dtype=_dtype_of(dtype, config))
    plan = _plan_of(module, path.name)
    with _Checkpoint(path) as checkpoint:
        num_parameters = _fill(module, plan, checkpoint, ranks, path.name)
    _join(module, plan, ranks)
    return Shard(module, num_parameters)


def read_configs(path: Path, size: int) -> tuple[Any, Any]:
    """The configuration of a model and that of one rank's part.

    Raises:
        FailedPreconditionError: it can't be dealt out to `size` ranks.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        if not getattr(config, "base_model_tp_plan", None):
            kind = type(config).__name__.removesuffix("Config")
            raise FailedPreconditionError(
                f"{path.name}: {kind} has no tensor-parallel plan; serve it with tensor_parallel 1"
            )
        return config, split_config(config, size, path.name)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise FailedPreconditionError(f"{path}: not a model that can be dealt out: {error}") from error


def _dtype_of(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert isinstance(found, torch.dtype)
    return found


def _plan_of(module: Any, name: str) -> dict[str, str]:
    """Style of each module that is dealt out, by a pattern of its name."""
    base = module.config.base_model_tp_plan
    plan = {f"{module.base_model_prefix}.{key}": style for key, style in base.items()}
    plan |= getattr(module, "_tp_plan", None) or {}
    head = _name_of(module, module.get_output_embeddings())
    gathered_inside = {style for key, style in plan.items() if style in _HEAD and key != head}
    unknown = (set(plan.values()) - {_COLUMNS, _ROWS, *_HEAD, *_WHOLE}) | gathered_inside
    if unknown:
        raise FailedPreconditionError(
            f"{name}: the plan of {type(module).__name__} has {sorted(unknown)}, which is not followed here; "
            "serve it with tensor_parallel 1"
        )
    return plan


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """Of a module, by its full name."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(name) or plan.get(generic)


class _Checkpoint:
    """The weights in a directory, read slice by slice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Checkpoint:
        index = self._path / "model.safetensors.index.json"
        try:
            names = ["model.safetensors"]
            if index.exists():
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            for name in names:
                file = self._stack.enter_context(safe_open(self._path / name, "pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise FailedPreconditionError(f"{self._path}: its weights can't be read: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Of all weights."""
        return list(self._files)

    def slice_of(self, name: str) -> Any:
        """A weight that is not read yet.

        Raises:
            KeyError: there is none.
        """
        return self._files[name].get_slice(name)


def _fill(module: Any, plan: Mapping[str, str], checkpoint: _Checkpoint, ranks: Ranks, name: str) -> int:
    """Copies this rank's slices into the part; the number of parameters of the whole."""
    embedding = _name_of(module, module.get_input_embeddings()) + ".weight"
    with torch.no_grad():
        for key, parameter in list(module.named_parameters()):
            owner, _, kind = key.rpartition(".")
            source = key
            if key not in checkpoint.names and module.get_output_embeddings() is module.get_submodule(owner):
                source = embedding
            try:
                whole = checkpoint.slice_of(source)
            except KeyError:
                raise FailedPreconditionError(f"{name}: the checkpoint lacks {key}") from None
            style = _style(plan, owner)
            if style in _HEAD:
                rows = _head_rows(whole, ranks)
                module.get_submodule(owner).register_parameter(kind, _fixed(rows.to(parameter.dtype)))
            else:
                parameter.copy_(_slice(whole, parameter, style, kind, ranks, f"{name}: {key}"))
    return sum(_size(checkpoint.slice_of(key).get_shape()) for key in checkpoint.names)


def _name_of(module: Any, wanted: nn.Module) -> str:
    names: list[str] = [name for name, found in module.named_modules() if found is wanted]
    return names[0]


def _size(shape: list[int]) -> int:
    return math.prod(shape)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _head_rows(whole: Any, ranks: Ranks) -> Tensor:
    """This rank's ids of the head, padded so that all ranks have as many: [⌈V / size⌉, …]."""
    count = whole.get_shape()[0]
    each = -(-count // ranks.size)
    rows: Tensor = whole[min(ranks.rank * each, count) : min((ranks.rank + 1) * each, count)]
    padding = rows.new_zeros(each - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding])


def _slice(whole: Any, local: Tensor, style: str | None, kind: str, ranks: Ranks, name: str) -> Tensor:
    """What of a weight belongs into `local`."""
    full, own = whole.get_shape(), list(local.shape)
    if full == own:
        found: Tensor = whole[:]
        # Summed over the ranks, a bias must be added once.
        return torch.zeros_like(found) if style == _ROWS and kind == "bias" and ranks.rank else found
    dim = {_COLUMNS: 0, _ROWS: 1}.get(style or "", len(full))
    if full[:dim] + full[dim + 1 :] != own[:dim] + own[dim + 1 :]:
        raise FailedPreconditionError(
            f"{name}: {full} does not become {own} by its plan ({style}); serve it with tensor_parallel 1"
        )
    # Blocks of heads in order; with fewer KV heads than ranks, neighbours hold the same.
    start = ranks.rank * full[dim] // ranks.size // own[dim] * own[dim]
    end = start + own[dim]
    part: Tensor = whole[start:end] if dim == 0 else whole[:, start:end]
    return part


def _join(module: Any, plan: Mapping[str, str], ranks: Ranks) -> None:
    """Has the parts' products summed and their logits gathered."""
    size = module.config.vocab_size
    for name, layer in module.named_modules():
        style = _style(plan, name)
        if style == _ROWS:
            layer.register_forward_hook(lambda _layer, _inputs, output: summed(output))
        elif style in _HEAD:
            layer.register_forward_hook(
                lambda _layer, _inputs, output: gathered(output, ranks.size)[..., :size]
            )
