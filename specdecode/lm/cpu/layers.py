"""All layers of a stack as one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdecode.lm.attention import AttentionPlan
from specdecode.lm.cpu.fused import FusedLayer, FusedRMSNorm
from specdecode.lm.cpu.kernels import Kernels
from specdecode.lm.packing import TiledLinear

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Product(ctypes.Structure):
    _fields_ = (("tiles", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("epsilon", _DOUBLE))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "between")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _LONG) for name in ("heads", "kv_heads", "dim", "window")),
        ("scale", _DOUBLE),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("cosine", "sine", "slots", "spans", "tables")),
        *((name, _LONG) for name in ("num_spans", "tokens", "rotated", "block_size")),
    )


class CompiledLayers:
    """The layers of a stack, for bfloat16.

    Args:
        norm: after the last of them.
    """

    def __init__(self, layers: Sequence[FusedLayer], norm: FusedRMSNorm, kernels: Kernels) -> None:
        self._kernels = kernels
        self._kept = (layers, norm)  # their weights are known here by address alone
        self._layers = (_Layer * len(layers))(*map(_layer_of, layers))
        self._norm = _norm_of(norm)
        products = [p for own in self._layers for p in (own.qkv, own.output, own.gate_up, own.down)]
        self._width = max(product.outputs for product in products)
        self._indices = [layer.attention.layer_idx for layer in layers]

    @classmethod
    def of(cls, layers: Sequence[FusedLayer], norm: FusedRMSNorm, kernels: Kernels) -> CompiledLayers | None:
        """None where some product of theirs is not on tiles."""
        tiled = all(isinstance(p, TiledLinear) for layer in layers for p in layer.products)
        return cls(layers, norm, kernels) if layers and tiled else None

    def run(
        self,
        x: Tensor,  # [n, size], contiguous; changed in place
        cosine: Tensor,  # [n, head_dim], contiguous
        sine: Tensor,  # [n, head_dim], contiguous
        plan: AttentionPlan,
    ) -> Tensor:
        """The norm of what the layers make of x: [n, size]. The plan's spans are windows all."""
        assert plan.windows is not None
        spans, tables = plan.windows
        tokens, size = x.shape
        for own, index in zip(self._layers, self._indices, strict=True):
            keys = plan.kv.keys[index]
            own.keys, own.values = keys.data_ptr(), plan.kv.values[index].data_ptr()
            own.kv_heads, own.dim = keys.shape[2], keys.shape[3]
        step = _Step(
            *(t.data_ptr() for t in (cosine, sine, plan.slots, spans, tables)),
            *(len(spans), tokens, cosine.shape[1], plan.kv.block_size),
        )
        normed, scratch = torch.empty_like(x), x.new_empty(2, tokens, self._width)
        self._kernels.layers(
            *(self._layers, len(self._layers), self._norm, step, x, normed, scratch[0], scratch[1], size)
        )
        return normed


def _norm_of(norm: FusedRMSNorm) -> _Norm:
    return _Norm(norm.weight.data_ptr(), norm.epsilon)


def _product_of(product: nn.Module) -> _Product:
    assert isinstance(product, TiledLinear)
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Product(product.tiles.data_ptr(), bias, product.in_features, product.out_features)


def _layer_of(layer: FusedLayer) -> _Layer:
    attention = layer.attention
    return _Layer(
        *(_norm_of(layer.before), _norm_of(layer.between)),
        *map(_product_of, layer.products),
        *(None, None),
        *(attention.heads, 0, 0, attention.call.window or 0, attention.call.scaling),
    )
