"""Step times of a deployment from peak rates: FLOPs, bytes of weights and KV, all-reduces."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from specdecode.cost import DraftCosts, StepCosts
from specdecode.cost_tables import Floats
from specdecode.errors import InvalidArgumentError
from specdecode.planner.hardware import DTYPE_BYTES, HardwareProfile
from specdecode.planner.shapes import ModelShape

_ACTIVATION_BYTES = 2.0
_GRID = 128
"""Points of a step table beside the batches' multiples."""


class Form(Enum):
    """How memory and compute time make a step."""

    SUM = "sum"
    """One after the other: what fits of real servers look like."""
    MAX = "max"
    """Perfectly overlapped: the textbook's roofline."""


@dataclass(frozen=True)
class StepParts:
    """What a step's seconds go to."""

    weights: float
    compute: float
    kv: float
    links: float
    overhead: float

    @property
    def fixed(self) -> float:
        """Whatever is in flight."""
        return self.weights + self.links + self.overhead

    def total(self, form: Form) -> float:
        """Seconds of the step."""
        return float(_total(form, self.weights, self.compute, self.kv) + self.links + self.overhead)


def _total(
    form: Form, weights: Floats | float, compute: Floats | float, kv: Floats | float
) -> Floats | float:
    memory = weights + kv
    return memory + compute if form is Form.SUM else np.maximum(memory, compute)


@dataclass(frozen=True)
class Replica:
    """One model on a group of GPUs.

    Attributes:
        shape: of the model.
        hardware: of each GPU.
        tensor_parallel: GPUs in the group.
        dtype: of the weights.
        kv_dtype: of the cache.
    """

    shape: ModelShape
    hardware: HardwareProfile
    tensor_parallel: int = 1
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise InvalidArgumentError.of("tp", f"{self.tensor_parallel} is below 1")
        for field, value in (("dtype", self.dtype), ("kv_dtype", self.kv_dtype)):
            if value not in DTYPE_BYTES:
                raise InvalidArgumentError.of(field, f"{value!r} is none of {', '.join(DTYPE_BYTES)}")

    @property
    def weight_bytes(self) -> float:
        """On each GPU."""
        return self.shape.num_parameters * DTYPE_BYTES[self.dtype] / self.tensor_parallel

    def kv_bytes(self, context: float) -> float:
        """Of one sequence on each GPU; heads are not cut, so more GPUs than KV heads hold copies."""
        share = min(self.tensor_parallel, self.shape.num_kv_heads)
        return self.shape.kv_bytes(context, DTYPE_BYTES[self.kv_dtype]) / share

    def parts(self, tokens: float, rows: float, batch: float, context: float) -> StepParts:
        """Of one step: tokens in flight, rows that need logits, sequences, cached tokens of each."""
        shape, gpu, group = self.shape, self.hardware, self.tensor_parallel
        active = (
            shape.shared_parameters + shape.num_layers * shape.experts_per_token * shape.expert_parameters
        )
        touched = shape.num_layers * shape.experts_touched(tokens) * shape.expert_parameters
        flops = 2 * active * tokens + 2 * shape.head_parameters * rows
        flops += 4 * shape.num_heads * shape.head_dim * shape.attended(context) * tokens
        read = (shape.shared_parameters + touched + shape.head_parameters) * DTYPE_BYTES[self.dtype]
        return StepParts(
            weights=read / group / (gpu.memory_bandwidth * gpu.weight_efficiency),
            compute=flops / group / gpu.flops_of(self.dtype),
            kv=batch * self.kv_bytes(context) / (gpu.memory_bandwidth * gpu.kv_efficiency),
            links=self._link_seconds(tokens),
            overhead=gpu.overhead_seconds,
        )

    def _link_seconds(self, tokens: float) -> float:
        """Two all-reduces of the activations a layer."""
        group = self.tensor_parallel
        if group == 1:
            return 0.0
        moved = 2 * (group - 1) / group * tokens * self.shape.hidden_size * _ACTIVATION_BYTES
        each = self.hardware.link_seconds + moved / self.hardware.link_bandwidth
        return 2 * self.shape.num_layers * each

    def step_seconds(self, tokens: float, rows: float, batch: float, context: float, form: Form) -> float:
        """Of one step; see `parts`."""
        return self.parts(tokens, rows, batch, context).total(form)

    def prefill_seconds(self, context: float, form: Form) -> float:
        """Of one prompt; its tokens attend to half of it on average."""
        return self.step_seconds(context, 1, 1, context / 2, form)


@dataclass(frozen=True)
class RooflineSystem:
    """A target and a draft model on the same GPUs; a `System` of the planner.

    Attributes:
        target: the verifying model.
        draft: the drafting model, on `draft.tensor_parallel` of the target's GPUs.
        form: of both.
    """

    target: Replica
    draft: Replica
    form: Form = Form.SUM

    def __post_init__(self) -> None:
        hardware = self.target.hardware
        if self.draft.tensor_parallel > self.target.tensor_parallel:
            raise InvalidArgumentError.of("draft_tp", f"is above tp, {self.target.tensor_parallel}")
        if self._memory_left(with_draft=True) <= 0:
            need = (self.target.weight_bytes + self.draft.weight_bytes) / 1e9
            have = hardware.memory_bytes * hardware.memory_share / 1e9
            what = f"{self.target.shape.name} and {self.draft.shape.name}"
            raise InvalidArgumentError.of(
                "tp", f"{what} need {need:.0f} GB of weights on one GPU, which has {have:.0f} GB for them"
            )

    @property
    def title(self) -> str:
        """Both models and where they run."""
        target, draft = self.target, self.draft
        gpus = f"{target.tensor_parallel} × {target.hardware.name}"
        return f"{target.shape.name} ({target.dtype}) with {draft.shape.name} ({draft.dtype}) on {gpus}"

    def other_form(self) -> RooflineSystem:
        """The same with memory and compute put together the other way."""
        return replace(self, form=Form.MAX if self.form is Form.SUM else Form.SUM)

    def parts(self, tokens: int, batch: int, context: int) -> StepParts:
        """Of the target's step."""
        return self.target.parts(tokens, tokens, batch, context)

    def steps(self, batch: int, context: int, max_draft_tokens: int) -> StepCosts:
        """T for this batch and context: a table, because experts and the max form bend it."""
        largest = batch * (max_draft_tokens + 1) + 1
        grid = np.linspace(batch, largest, _GRID).round()
        multiples = batch * np.arange(1, max_draft_tokens + 2)
        sizes = np.unique(np.concatenate((grid, multiples))).astype(int).tolist()
        seconds = [self.target.step_seconds(size, size, batch, context, self.form) for size in sizes]
        ends = [self.target.parts(size, size, batch, context) for size in (batch, largest)]
        return StepCosts(
            base_seconds=ends[0].weights,
            token_seconds=ends[1].compute / largest,
            overhead_seconds=ends[0].overhead,
            tokens=tuple(sizes),
            seconds=tuple(seconds),
        )

    def drafts(self, batch: int, context: int) -> DraftCosts:
        """A pass of the draft for the whole batch."""
        return DraftCosts(pass_seconds=self.draft.step_seconds(batch, batch, batch, context, self.form))

    def slots(self, context: int, with_draft: bool) -> int:
        """Sequences of this context that the KV cache holds."""
        each = self.target.kv_bytes(context) + (self.draft.kv_bytes(context) if with_draft else 0.0)
        return math.floor(self._memory_left(with_draft) / each)

    def prefill_seconds(self, context: int, with_draft: bool) -> float:
        """Until the KV of one prompt is there, the draft's too."""
        draft = self.draft.prefill_seconds(context, self.form) if with_draft else 0.0
        return self.target.prefill_seconds(context, self.form) + draft

    def _memory_left(self, with_draft: bool) -> float:
        """For KV, on the fullest GPU."""
        hardware = self.target.hardware
        weights = self.target.weight_bytes + (self.draft.weight_bytes if with_draft else 0.0)
        return hardware.memory_bytes * hardware.memory_share - weights
