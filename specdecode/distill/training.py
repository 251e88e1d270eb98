"""The training loop: deterministic by its seed, and resumed from its last checkpoint as if never stopped."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specdecode.distill.batches import batch_of, epoch_of
from specdecode.distill.corpus import Text
from specdecode.distill.losses import Measured, head_loss
from specdecode.distill.options import Optimiser, TrainingOptions
from specdecode.distill.student import Student
from specdecode.errors import FailedPreconditionError, NumericalError

_MAX_GRADIENT_NORM = 1.0
_CURVE_STEPS = 20
_FALLING_SHARE = 0.4
_OPTIMISER_SHARE = 1.15
"""What a whole step takes, in times of its loss and gradients."""


@dataclass
class State:
    """How far a run is.

    Attributes:
        done_in_epoch: batches of this epoch that were trained on.
        curve: [step, loss, α, agreement] means over the steps since the line before.
    """

    step: int = 0
    epoch: int = 0
    done_in_epoch: int = 0
    curve: list[list[float]] = field(default_factory=list)


def fall_begins(steps: int) -> int:
    """The step at which the learning rate of a run begins to fall."""
    return int(steps * (1 - _FALLING_SHARE))


def learning_rate(options: TrainingOptions, step: int) -> float:
    """At a step, the first being 0."""
    warmed = min(1.0, (step + 1) / max(options.warmup_steps, 1))
    begin = fall_begins(options.steps)
    share = min(1.0, max(0, step - begin) / max(options.steps - begin, 1))
    return options.learning_rate * warmed * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    """Trains a student on texts.

    Args:
        texts: those of an epoch, the first being 0.
    """

    def __init__(
        self,
        student: Student,
        texts: Callable[[int], Sequence[Text]],
        options: TrainingOptions,
        device: torch.device,
    ) -> None:
        self.student, self.options, self.state = student, options, State()
        self._texts_of, self._device = texts, device
        self._texts: Sequence[Text] = ()
        self._batches: list[list[int]] = []
        self._named = student.parameters()
        self._optimisers = _optimisers(self._named, options)
        self._sums: list[float] = [0, 0.0, 0.0, 0.0]
        self._dtype: torch.dtype = getattr(torch, options.dtype)

    @property
    def latest(self) -> str:
        """What the latest steps measured, in words."""
        if self._sums[0] == 0:
            return ""
        rows, loss, accepted, agreed = self._sums
        return f"loss {loss / rows:.3f}, α {accepted / rows:.3f}, agreement {agreed / rows:.3f}"

    def time_step(self) -> float:
        """Seconds that a step takes, from two whose results are thrown away."""
        texts, seconds = self._next_batch(), math.inf
        for _ in range(2):
            began = time.monotonic()
            self._measure(texts)
            seconds = min(seconds, time.monotonic() - began)
            for parameter in self._named.values():
                parameter.grad = None
        return seconds * _OPTIMISER_SHARE

    def advance(self) -> Measured:
        """One step.

        Raises:
            NumericalError: the loss or its gradient is not finite; the step was not taken.
        """
        measured = self._measure(self._next_batch())
        norm = nn.utils.clip_grad_norm_(self._named.values(), _MAX_GRADIENT_NORM)
        if not (math.isfinite(measured.loss) and bool(torch.isfinite(norm))):
            raise NumericalError(
                f"step {self.state.step}: the loss is {measured.loss}, its gradient {float(norm)}; the last "
                "checkpoint is kept: go on from it with a smaller --learning-rate, or with --dtype float32"
            )
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(self.options, self.state.step)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.done_in_epoch += 1
        self._note(measured)
        return measured

    def _measure(self, texts: Sequence[Text]) -> Measured:
        """Loss of the texts, and gradients of its mean."""
        batch = batch_of(texts, self.student, self._device)
        hidden = self.student.hidden(batch.token_ids, self._dtype).flatten(0, 1)[batch.rows]
        total, measured = head_loss(hidden, self.student.head, batch.teacher, self.options.loss, self._dtype)
        (total / max(measured.rows, 1)).backward()  # type: ignore[no-untyped-call]
        return measured

    def _note(self, measured: Measured) -> None:
        new = [measured.rows, measured.loss, measured.accepted, measured.agreed]
        fresh = self.state.step % _CURVE_STEPS == 1 or _CURVE_STEPS == 1
        self._sums = new if fresh else [a + b for a, b in zip(self._sums, new, strict=True)]
        if self.state.step % _CURVE_STEPS == 0 or self.state.step == self.options.steps:
            means = [value / max(self._sums[0], 1) for value in self._sums[1:]]
            self.state.curve.append([self.state.step, *(round(mean, 5) for mean in means)])

    def _next_batch(self) -> list[Text]:
        state = self.state
        if self._batches and state.done_in_epoch >= len(self._batches):
            state.epoch, state.done_in_epoch, self._batches = state.epoch + 1, 0, []
        if not self._batches:
            self._texts = self._texts_of(state.epoch)
            options = self.options
            self._batches = epoch_of(self._texts, options.num_positions, options.seed, state.epoch)
        return [self._texts[index] for index in self._batches[state.done_in_epoch]]

    def save(self, path: Path, recipe: dict[str, Any]) -> None:
        """Writes a checkpoint in one piece; the one before stays until then.

        Raises:
            FailedPreconditionError: it can't be written, the disk is full for example.
        """
        tensors = {f"student.{name}": value.detach() for name, value in self._named.items()}
        for number, optimiser in enumerate(self._optimisers):
            for index, values in optimiser.state_dict()["state"].items():
                tensors |= {f"optimiser.{number}.{index}.{key}": v for key, v in values.items()}
        state = json.dumps(asdict(self.state) | {"sums": self._sums, "steps": self.options.steps})
        meta = {"recipe": json.dumps(recipe, sort_keys=True), "state": state}
        partial = path.with_name(f".{path.name}.partial")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, meta)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise FailedPreconditionError(
                f"{path} can't be written: {error}; the checkpoint before is kept: make room, and the same "
                "command goes on from there"
            ) from error

    def load(self, path: Path, recipe: dict[str, Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            FailedPreconditionError: it is damaged, or of another run.
        """
        try:
            with safe_open(path, framework="pt") as file:
                meta: dict[str, str] = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise FailedPreconditionError(
                f"{path} can't be read: {error}; delete it to start anew"
            ) from error
        _require_same(path, json.loads(meta["recipe"]), recipe)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(tensors[f"student.{name}"])
        for number, optimiser in enumerate(self._optimisers):
            optimiser.load_state_dict(_optimiser_state(optimiser, number, tensors))
        state = json.loads(meta["state"])
        planned = state.pop("steps")
        begun = state["step"] > fall_begins(min(planned, self.options.steps))
        if planned != self.options.steps and begun:
            raise FailedPreconditionError(
                f"--steps: {path} is at step {state['step']} of a run of {planned}, whose learning rate "
                f"falls already: give --steps {planned} again, or delete the checkpoint"
            )
        self._sums = state.pop("sums")
        self.state = State(**state)
        self._batches = []


def _require_same(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    expected = json.loads(json.dumps(expected))
    different = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    if different:
        lines = ", ".join(f"{key} {found.get(key)} there, {expected.get(key)} now" for key in different)
        raise FailedPreconditionError(
            f"--out: {path} is the checkpoint of another run ({lines}); give the same options again, choose "
            "another directory, or delete the checkpoint"
        )


def _optimiser_state(
    optimiser: torch.optim.Optimizer, number: int, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, *rest = name.split(".")
        if kind == "optimiser" and int(rest[0]) == number:
            state.setdefault(int(rest[1]), {})[rest[2]] = tensor
    return optimiser.state_dict() | {"state": state}


def _optimisers(named: dict[str, nn.Parameter], options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the rest; or AdamW for all."""
    decay, rate = options.weight_decay, options.learning_rate
    matrices = [value for name, value in named.items() if value.ndim == 2 and name != "lm_head.rows"]
    others = [value for name, value in named.items() if value.ndim != 2 or name == "lm_head.rows"]
    if options.optimiser is not Optimiser.MUON:
        return [_adamw([*matrices, *others], rate, decay)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        _adamw(others, rate, decay),
    ]


def _adamw(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)
