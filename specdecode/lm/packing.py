"""Weights laid out once for the CPU's 16-bit matrix products, instead of at every product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode.lm.cpu.kernels import Kernels, can_tile, tiled


class PackedLinear(nn.Module):
    """A linear layer whose weight has oneDNN's blocked layout: 0.65–0.8 of the time of `F.linear` in
    bfloat16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]."""
        # The product of one row takes twice as long as that of two.
        single = inputs.numel() == inputs.shape[-1]
        rows = inputs.expand(*inputs.shape[:-2], 2, -1) if single else inputs
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return outputs[..., :1, :] if single else outputs


class TiledLinear(nn.Module):
    """A linear layer in the layout of our own kernel.

    Of the time of `PackedLinear` it takes, on tile registers, 0.65 up to 16 rows, 0.7 at 64, 0.8 at 128; on
    dot products of pairs half up to 2 rows, 0.75 up to 16, 0.95 above.
    """

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.tiles = tiled(linear.weight.detach())
        self._kernels = kernels

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features]."""
        if inputs.ndim == 2:
            return self._kernels.linear(inputs.contiguous(), self.tiles, self.bias, self.out_features)
        return self.forward(inputs.flatten(0, -2)).view(*inputs.shape[:-1], self.out_features)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing is possible and worth it; in float32 no layout gains anything."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def packed(linear: nn.Linear, kernels: Kernels | None) -> nn.Module:
    """The same linear layer in the fastest layout there is; its own weight is no longer needed."""
    if not can_pack(linear.weight.dtype, linear.weight.device):
        return linear
    if kernels is not None and kernels.has_linear and can_tile(linear.weight):
        return TiledLinear(linear, kernels)
    return PackedLinear(linear)


def pack_linears(module: nn.Module, kernels: Kernels | None) -> None:
    """Replaces every linear layer below `module`; weights that nothing else uses are freed."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, packed(child, kernels))
        else:
            pack_linears(child, kernels)
