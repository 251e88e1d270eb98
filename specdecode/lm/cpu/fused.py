"""Parts of transformers models whose computation is known, replaced by few calls that compute the same.

Only classes named here are touched, everything else stays as it is: what they compute was read, and the
self-test at start compares the whole model with its own plain forward afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdecode.lm.attention import PLAN_KEYWORD, AttentionPlan
from specdecode.lm.cpu.kernels import MAX_DIM, Kernels
from specdecode.lm.packing import packed

# Rotation by halves over the whole head, no norms of queries and keys, no sinks.
_ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention"})
# weight · rounded(x / √(mean x² + ε)), sums in float32.
_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm"})
# down(act(gate) · up)
_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})

# x += attention(input_layernorm(x)); x += mlp(post_attention_layernorm(x))
_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})
_SILU = frozenset({"SiLU", "SiLUActivation"})


@dataclass(frozen=True)
class AttentionCall:
    """What a layer hands to its attention besides tensors."""

    scaling: float
    window: int | None = None


def fuse(module: nn.Module, kernels: Kernels, calls: Mapping[int, AttentionCall]) -> None:
    """Replaces what is known below `module`; `calls` is what the layers were seen to hand over."""
    for name, child in list(module.named_children()):
        replaced = _fused(child, kernels, calls)
        if replaced is None:
            fuse(child, kernels, calls)
            replaced = _fused_layer(child)
        if replaced is not None:
            setattr(module, name, replaced)


def _fused(module: nn.Module, kernels: Kernels, calls: Mapping[int, AttentionCall]) -> nn.Module | None:
    kind: Any = module
    name = type(module).__name__
    if not type(module).__module__.startswith("transformers.models."):
        return None
    if name in _NORMS:
        return FusedRMSNorm(kind, kernels)
    if name in _GATED and type(kind.act_fn).__name__ in _SILU:
        return FusedGatedMLP(kind, kernels)
    if name in _ATTENTIONS and kind.head_dim <= MAX_DIM and kind.head_dim % 2 == 0:
        return FusedAttention(kind, kernels, calls[kind.layer_idx])
    return None


def _fused_layer(module: nn.Module) -> nn.Module | None:
    """A known layer of fused parts as one."""
    if type(module).__name__ not in _LAYERS or not type(module).__module__.startswith("transformers.models."):
        return None
    layer: Any = module
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if (
        isinstance(layer.self_attn, FusedAttention)
        and isinstance(layer.mlp, FusedGatedMLP)
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
    ):
        return FusedLayer(layer.self_attn, layer.mlp, *norms)
    return None


def joined_linear(linears: Sequence[nn.Linear], kernels: Kernels) -> nn.Module:
    """One product instead of several of the same input; outputs one after another."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return packed(joined, kernels)


class FusedRMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) in one pass."""

    def __init__(self, norm: Any, kernels: Kernels) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        return self._kernels.rms_norm(x, self.weight, self.epsilon)

    def add(
        self,
        x: Tensor,  # [n, size], changed in place
        added: Tensor,  # [n, size]
    ) -> Tensor:
        """x += added, and the norm of that: [n, size]."""
        return self._kernels.add_rms_norm(x, added, self.weight, self.epsilon)


class FusedGatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) with one product for gate and up (Shazeer 2020)."""

    def __init__(self, mlp: Any, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up = joined_linear([mlp.gate_proj, mlp.up_proj], kernels)
        self.down = joined_linear([mlp.down_proj], kernels)
        self._kernels = kernels

    def run(
        self,
        x: Tensor,  # [n, size]
    ) -> Tensor:
        """[n, size]."""
        gate_up: Tensor = self.gate_up.forward(x)
        output: Tensor = self.down.forward(self._kernels.silu_product(gate_up))
        return output

    def forward(self, x: Tensor) -> Tensor:
        """[1, n, size] → [1, n, size]."""
        return self.run(x[0])[None]


class FusedAttention(nn.Module):
    """One product for q, k and v; rotation and storing in one pass; attention over the blocks in place."""

    def __init__(self, attention: Any, kernels: Kernels, call: AttentionCall) -> None:
        super().__init__()
        self.layer_idx = int(attention.layer_idx)
        self.call = call
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.qkv = joined_linear([attention.q_proj, attention.k_proj, attention.v_proj], kernels)
        self.output = joined_linear([attention.o_proj], kernels)
        self._kernels = kernels

    def run(
        self,
        x: Tensor,  # [n, size]
        cosine: Tensor,  # [n, head_dim]
        sine: Tensor,  # [n, head_dim]
        plan: AttentionPlan,
    ) -> Tensor:
        """[n, size]."""
        keys, values = plan.kv.keys[self.layer_idx], plan.kv.values[self.layer_idx]
        qkv: Tensor = self.qkv.forward(x)
        query = self._kernels.rotate_and_store(qkv, cosine, sine, plan.slots, keys, values, self.heads)
        attended = plan.attend(query, keys, values, self.call.scaling, self.call.window, None)
        output: Tensor = self.output.forward(attended.flatten(1))
        return output

    def forward(
        self,
        hidden_states: Tensor,  # [1, n, size]
        position_embeddings: tuple[Tensor, Tensor],  # cosine and sine, each [1, n, head_dim]
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[1, n, size], and None for the weights."""
        cosine, sine = position_embeddings
        return self.run(hidden_states[0], cosine[0], sine[0], kwargs[PLAN_KEYWORD])[None], None


class FusedLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)): a layer of fused parts, without what lies between them."""

    def __init__(self, attention: FusedAttention, mlp: FusedGatedMLP, before: Any, between: Any) -> None:
        super().__init__()
        self.attention, self._mlp = attention, mlp
        self.before, self.between = before, between

    @property
    def products(self) -> tuple[nn.Module, ...]:
        """Of q, k and v; after attention; of gate and up; down."""
        return self.attention.qkv, self.attention.output, self._mlp.gate_up, self._mlp.down

    def run(
        self,
        x: Tensor,  # [n, size], changed in place: the attention is added
        normed: Tensor,  # [n, size], before(x)
        cosine: Tensor,  # [n, head_dim]
        sine: Tensor,  # [n, head_dim]
        plan: AttentionPlan,
    ) -> Tensor:
        """What is to be added to x after it: [n, size]."""
        attended = self.attention.run(normed, cosine, sine, plan)
        return self._mlp.run(self.between.add(x, attended))

    def forward(
        self,
        hidden_states: Tensor,  # [1, n, size]
        position_embeddings: tuple[Tensor, Tensor],  # cosine and sine, each [1, n, head_dim]
        **kwargs: Any,
    ) -> Tensor:
        """[1, n, size]."""
        cosine, sine = position_embeddings
        x = hidden_states[0]
        output = self.run(x, self.before.forward(x), cosine[0], sine[0], kwargs[PLAN_KEYWORD])
        return (x + output)[None]
