"""A draft in training: layers of the target, or fresh ones, on the target's embeddings, and its own head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdecode.checkpoints import keep_only
from specdecode.errors import FailedPreconditionError

_MAX_NORMALISER_ERROR = 0.2
"""Far above what bfloat16 does to log Σ exp, far below what capping or scaling does."""


@dataclass
class Student:
    """A causal LM whose head has one row for each id that it may draft.

    Attributes:
        module: the transformers model, weights float32; its own head is not used in training.
        head: [K, d], rows of the head.
        vocabulary: [K] int64, ascending: the ids that the rows stand for.
        teacher_head: [K, d], the target's rows of the same ids, in the target's dtype.
    """

    module: Any
    head: nn.Parameter
    vocabulary: Tensor
    teacher_head: Tensor

    def to(self, device: torch.device) -> Student:
        """The same student on a device."""
        head = nn.Parameter(self.head.detach().to(device), requires_grad=self.head.requires_grad)
        return Student(self.module.to(device), head, self.vocabulary.to(device), self.teacher_head.to(device))

    def hidden(
        self,
        token_ids: Tensor,  # [B, L]
        dtype: torch.dtype,
    ) -> Tensor:
        """[B, L, d] after the final norm; products in `dtype`. Texts are padded at their ends."""
        with torch.autocast(token_ids.device.type, dtype, enabled=dtype != torch.float32):
            states: Tensor = self.module.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return states.float()

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name; `lm_head.rows` is the head."""
        named = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        return named | ({"lm_head.rows": self.head} if self.head.requires_grad else {})

    def columns(
        self,
        token_ids: Tensor,  # [n]
    ) -> Tensor:
        """Which row stands for each id, K where none does: [n] int64."""
        found = torch.searchsorted(self.vocabulary, token_ids).clamp_(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[found] == token_ids, found, len(self.vocabulary))


def load_target(path: Path, dtype: torch.dtype | str = "auto") -> Any:
    """The target as transformers has it.

    Raises:
        FailedPreconditionError: it can't be loaded.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise FailedPreconditionError(f"--target: {path} can't be loaded: {error}") from error


def build_student(
    target: Any,
    layers: Sequence[int],
    vocabulary: Tensor,  # [K]
    fresh: bool,
    train_head: bool,
    seed: int,
) -> Student:
    """A student made of the target, which is changed: its layers are left out, its weights become float32.

    Args:
        target: one whose logits are the product of its last hidden state and `lm_head` alone.
        layers: which of the target's layers it starts from; how many, where `fresh`.
        fresh: the layers start from random weights.
        train_head: whether the head's rows are trained; else they stay the target's.
    """
    teacher_head = target.get_output_embeddings().weight.detach()[vocabulary].clone()
    keep_only(target, layers)
    for index, layer in enumerate(_layers(target)):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index  # type: ignore[assignment]
    module = target.float()
    if fresh:
        torch.manual_seed(seed)
        for layer in _layers(module):
            layer.apply(module._init_weights)
    module.requires_grad_(True)
    module.get_input_embeddings().requires_grad_(False)
    module.get_output_embeddings().requires_grad_(False)
    head = nn.Parameter(teacher_head.float().clone(), requires_grad=train_head)
    return Student(module.train(), head, vocabulary, teacher_head)


def require_plain_head(
    target: Any,
    hidden: Tensor,  # [R, d]
    log_normaliser: Tensor,  # [R]
) -> None:
    """Refuses a target whose logits are more than a product of hidden state and head (capped, scaled, with a
    bias), by what was noted while it wrote.

    Raises:
        FailedPreconditionError: they are.
    """
    head = getattr(target, "lm_head", None)
    if not isinstance(head, nn.Linear) or head is not target.get_output_embeddings():
        raise FailedPreconditionError(
            f"--target: {type(target).__name__} has no lm_head that is a linear layer"
        )
    found = torch.logsumexp((hidden @ head.weight.detach().cpu().T).float(), dim=1)
    if not torch.allclose(found, log_normaliser, rtol=0.0, atol=_MAX_NORMALISER_ERROR):
        raise FailedPreconditionError(
            f"--target: the logits of {type(target).__name__} are not its hidden state times its head "
            "(capped, scaled, or with a bias); drafts of such models can't be trained"
        )


def _layers(module: Any) -> nn.ModuleList:
    """Where `keep_only` found the layers."""
    number = module.config.num_hidden_layers
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == number)
    return next(lists)
