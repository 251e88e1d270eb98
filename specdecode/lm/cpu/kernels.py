"""The compiled kernels as functions of tensors; each says which torch expression it stands for."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode.lm.cpu.build import BuildError, build_library
from specdecode.lm.cpu.sampling import SamplingKernels

log = logging.getLogger(__name__)

MAX_DIM = 256
MAX_BLOCK_SIZE = 64
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "rms_norm": (*[_POINTER] * 3, _LONG, _LONG, _FLOAT),
    "add_rms_norm": (*[_POINTER] * 4, _LONG, _LONG, _FLOAT),
    "silu_product": (*[_POINTER] * 2, _LONG, _LONG),
    "rotate_and_store": (*[_POINTER] * 7, _LONG, *[_INT] * 4),
    "attend": (*[_POINTER] * 5, _LONG, _POINTER, *[_INT] * 4, _FLOAT, _FLOAT, _INT),
    "best_tokens": (_POINTER, *[_LONG] * 3, *[_POINTER] * 2),
    "spread": (*[_POINTER] * 3, *[_LONG] * 3),
    "linear": (*[_POINTER] * 4, *[_LONG] * 3),
    "layers": (_POINTER, _LONG, *[_POINTER] * 6, _LONG),
}
# Calls of milliseconds let other threads run; the rest is over sooner than the interpreter's lock is back.
_LONG_CALLS = frozenset({"attend", "linear", "layers"})
_BFLOAT16_ONLY = frozenset({"linear", "layers"})
_TILE_OUTPUTS, _TILE_INPUTS = 16, 32


class Kernels:
    """Functions of one compiled library, for contiguous CPU tensors of one dtype.

    Args:
        library: from `build_library`.
        dtype: float32 or bfloat16.

    Attributes:
        digest: of the sources and of what compiled them.
        sampling: the passes over the vocabulary.
    """

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.digest = library.stem
        self.sampling = SamplingKernels(library)
        releasing, keeping = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
        found = {}
        for name, arguments in _ARGUMENTS.items():
            if name not in _BFLOAT16_ONLY or dtype == torch.bfloat16:
                loaded = releasing if name in _LONG_CALLS else keeping
                found[name] = getattr(loaded, f"{name}_{_SUFFIXES[dtype]}")
                found[name].argtypes, found[name].restype = arguments, None
        self._rms_norm, self._add_rms_norm = found["rms_norm"], found["add_rms_norm"]
        self._silu_product = found["silu_product"]
        self._rotate_and_store, self._attend = found["rotate_and_store"], found["attend"]
        self._best_tokens, self._spread = found["best_tokens"], found["spread"]
        self._linear, self._layers = found.get("linear"), found.get("layers")
        self.has_linear = self._linear is not None and bool(keeping.has_linear())
        """Whether this processor multiplies tiles or pairs."""

    def rms_norm(
        self,
        x: Tensor,  # [..., size]
        weight: Tensor,  # [size]
        epsilon: float,
    ) -> Tensor:
        """weight · (x / √(mean x² + ε)), the quotient rounded to the dtype: [..., size]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = weight.shape[0]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // size, size, epsilon)
        return y

    def add_rms_norm(
        self,
        x: Tensor,  # [n, size], contiguous
        added: Tensor,  # [n, size], contiguous
        weight: Tensor,  # [size]
        epsilon: float,
    ) -> Tensor:
        """x += added; then as `rms_norm`: [n, size]."""
        y = torch.empty_like(x)
        rows, size = x.shape
        self._add_rms_norm(
            x.data_ptr(), added.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, size, epsilon
        )
        return y

    def silu_product(
        self,
        gate_up: Tensor,  # [n, 2 * size], contiguous
    ) -> Tensor:
        """silu(gate) · up: [n, size]."""
        rows, width = gate_up.shape
        y = gate_up.new_empty(rows, width // 2)
        self._silu_product(gate_up.data_ptr(), y.data_ptr(), rows, width // 2)
        return y

    def rotate_and_store(
        self,
        qkv: Tensor,  # [n, (heads + 2 * kv_heads) * dim], contiguous
        cosine: Tensor,  # [n, rotated], contiguous
        sine: Tensor,  # [n, rotated], contiguous
        slots: Tensor,  # [n] int64
        keys: Tensor,  # [num_blocks, block_size, kv_heads, dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, dim]
        heads: int,
    ) -> Tensor:
        """Rotates queries and keys by halves, stores keys and values; queries [n, heads, dim]."""
        kv_heads, dim = keys.shape[2:]
        query = qkv.new_empty(qkv.shape[0], heads, dim)
        self._rotate_and_store(
            *(qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(), slots.data_ptr(), query.data_ptr()),
            *(keys.data_ptr(), values.data_ptr()),
            *(qkv.shape[0], heads, kv_heads, dim, cosine.shape[1]),
        )
        return query

    def attend(
        self,
        query: Tensor,  # [n, heads, dim], contiguous
        keys: Tensor,  # [num_blocks, block_size, kv_heads, dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, dim]
        output: Tensor,  # [n, heads, dim], contiguous
        spans: Tensor,  # [S, 4] int32: first token, its position, number of tokens, offset of the block table
        tables: Tensor,  # [T] int32
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Attention of every span's tokens to the keys of its blocks up to each token, into `output`."""
        heads, dim = query.shape[1:]
        self._attend(
            *(query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(), spans.data_ptr()),
            *(spans.shape[0], tables.data_ptr(), heads, keys.shape[2], dim, keys.shape[1]),
            *(scale, softcap or 0.0, window or 0),
        )

    def best_tokens(
        self,
        logits: Tensor,  # [R, vocab_size], rows contiguous
    ) -> tuple[Tensor, Tensor]:
        """The highest logit's id, the lowest of several, [R] int64; whether all are finite, [R] bool."""
        rows, size = logits.shape
        best = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._best_tokens(logits.data_ptr(), rows, logits.stride(0), size, best.data_ptr(), finite.data_ptr())
        return best, finite

    def spread(
        self,
        logits: Tensor,  # [R, K]
        token_ids: Tensor,  # [K] int64, contiguous, below size
        size: int,
    ) -> Tensor:
        """full(−∞).index_copy(1, token_ids, logits): [R, size]."""
        logits = logits.contiguous()
        rows, count = logits.shape
        y = logits.new_empty(rows, size)
        self._spread(logits.data_ptr(), token_ids.data_ptr(), y.data_ptr(), rows, count, size)
        return y

    def linear(
        self,
        x: Tensor,  # [n, in_features], contiguous
        tiles: Tensor,  # from `tiled`
        bias: Tensor | None,  # [out_features]
        out_features: int,
    ) -> Tensor:
        """x · weightᵀ + bias: [n, out_features]; only where `has_linear`."""
        assert self._linear is not None
        rows, in_features = x.shape
        y = x.new_empty(rows, out_features)
        self._linear(
            *(x.data_ptr(), tiles.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
            *(rows, in_features, out_features),
        )
        return y

    def layers(
        self,
        layers: ctypes.Array[Any],
        count: int,
        last_norm: ctypes.Structure,
        step: ctypes.Structure,
        x: Tensor,  # [n, size], contiguous; changed in place
        normed: Tensor,  # [n, size], contiguous; written
        wide: Tensor,  # [n, widest output], contiguous; scratch
        narrow: Tensor,  # the same
        size: int,
    ) -> None:
        """All layers of a model, and the norm after them (`specdecode.lm.cpu.layers`); where `has_linear`."""
        assert self._layers is not None
        self._layers(
            *(ctypes.addressof(layers), count, ctypes.addressof(last_norm), ctypes.addressof(step)),
            *(x.data_ptr(), normed.data_ptr(), wide.data_ptr(), narrow.data_ptr(), size),
        )


def tiled(
    weight: Tensor,  # [out_features, in_features], in_features a multiple of 32
) -> Tensor:
    """The weight as `Kernels.linear` reads it: [out / 16, in / 32, 16 pairs of inputs, 16 outputs, 2]."""
    out_features, in_features = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -out_features % _TILE_OUTPUTS))
    shape = (-1, _TILE_OUTPUTS, in_features // _TILE_INPUTS, _TILE_INPUTS // 2, 2)
    return padded.view(shape).permute(0, 2, 3, 1, 4).contiguous()


def can_tile(weight: Tensor) -> bool:  # [out_features, in_features]
    """Whether `tiled` takes the weight."""
    return weight.shape[1] % _TILE_INPUTS == 0


@cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels of a dtype; None, with a line in the log, where they can't be had: torch does it then."""
    if dtype not in _SUFFIXES:
        return None
    try:
        return Kernels(build_library(), dtype)
    except (BuildError, OSError) as error:
        log.warning("no compiled kernels, steps will take longer: %s", error)
        return None
