"""Known causal LMs of fused layers, from token ids to logits without what transformers does between them.

At one token in flight a model of few layers spends as long in that (configurations, masks, outputs) as in its
layers. The self-test at start compares the result with the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdecode.lm.attention import AttentionPlan
from specdecode.lm.cpu.fused import FusedLayer, FusedRMSNorm
from specdecode.lm.cpu.kernels import Kernels
from specdecode.lm.cpu.layers import CompiledLayers

# head(norm(layers(embedding)))
_MODELS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_FIRST_POSITIONS = 1024


class FusedStack:
    """A causal LM all of whose parts are known.

    Args:
        module: whose layers are fused.
        max_length: longest sequence.
        kernels: that they are fused on.

    Attributes:
        compiled: its layers in one call, where they can be had.
    """

    def __init__(self, module: Any, max_length: int, kernels: Kernels) -> None:
        self._embedding = module.model.embed_tokens.weight
        self._layers: list[FusedLayer] = list(module.model.layers)
        # Each norm follows the sum of the layer before it.
        self._norms = [layer.before for layer in self._layers] + [module.model.norm]
        self._head = module.lm_head
        self.compiled = CompiledLayers.of(self._layers, self._norms[-1], kernels)
        self._angles = _Angles(module.model.rotary_emb, self._embedding.dtype, max_length)

    @classmethod
    def of(cls, module: Any, max_length: int, kernels: Kernels) -> FusedStack | None:
        """The stack of a module; None where some part of it is not known."""
        if type(module).__name__ not in _MODELS or not type(module).__module__.startswith(
            "transformers.models."
        ):
            return None
        model = module.model
        known = type(model.embed_tokens) is nn.Embedding and isinstance(model.norm, FusedRMSNorm)
        return (
            cls(module, max_length, kernels)
            if known and all(isinstance(layer, FusedLayer) for layer in model.layers)
            else None
        )

    def run(
        self,
        token_ids: Tensor,  # [n] int64
        rows: Tensor,  # [R] int64
        plan: AttentionPlan,
    ) -> Tensor:
        """Logits of the tokens at `rows`: [R, size of the head]."""
        cosine, sine = self._angles.at(plan.positions)
        x = self._embedding.index_select(0, token_ids)
        if self.compiled is not None and plan.has_windows_alone:
            normed = self.compiled.run(x, cosine, sine, plan)
        else:
            normed = self._norms[0].forward(x)
            for layer, following in zip(self._layers, self._norms[1:], strict=True):
                normed = following.add(x, layer.run(x, normed, cosine, sine, plan))
        if len(rows) != len(normed):
            normed = normed.index_select(0, rows)
        # Called, not run: what the head saw is noted by a hook (specdecode.distill.generation).
        logits: Tensor = self._head(normed)
        return logits


class _Angles:
    """Cosines and sines of a rotary embedding by position, computed by its own code, once.

    No further than the longest sequence: beyond it frequencies may be others (`dynamic`, `longrope`).
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, max_length: int) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._max_length = max_length
        self._cosine = self._sine = torch.empty(0, 0, dtype=dtype)

    def at(
        self,
        positions: Tensor,  # [n] int64
    ) -> tuple[Tensor, Tensor]:
        """[n, dim] each."""
        last = int(positions.max())
        if last >= len(self._cosine):
            self._extend(min(max(_FIRST_POSITIONS, 1 << last.bit_length()), self._max_length))
        return self._cosine.index_select(0, positions), self._sine.index_select(0, positions)

    def _extend(self, length: int) -> None:
        x, positions = torch.empty(1, dtype=self._dtype), torch.arange(length)
        cosine, sine = self._rotary(x, position_ids=positions[None])
        self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()
