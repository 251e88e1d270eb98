"""`draft_vocabulary.json` in a model's directory: the only ids that the model may draft.

A small draft spends much of its time in its head (FR-Spec, Zhao et al. 2025). With this file only the head's
rows of these ids are kept and computed; every other id has logit −∞ and so probability 0 in q, which is what
drafts are then sampled from: exact as any q is. A target can't have one: its texts would lack the other
tokens.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdecode.errors import FailedPreconditionError

FILE_NAME = "draft_vocabulary.json"
FORMAT = 1


def write_draft_vocabulary(directory: Path, token_ids: list[int]) -> Path:
    """Writes ascending ids as `read_draft_vocabulary` reads them; the file."""
    path = directory / FILE_NAME
    path.write_text(json.dumps({"format": FORMAT, "token_ids": token_ids}) + "\n", encoding="utf-8")
    return path


def read_draft_vocabulary(directory: Path, vocab_size: int) -> Tensor | None:
    """The ids that the model in `directory` may draft, [K] int64 ascending; None where all may be.

    Raises:
        FailedPreconditionError: the file is there and is not such a list of ids below `vocab_size`.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(f"{path}: can't be read: {error}") from error
    token_ids = _checked(raw, vocab_size, path)
    return torch.tensor(token_ids, dtype=torch.int64)


def _checked(raw: Any, vocab_size: int, path: Path) -> list[int]:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise FailedPreconditionError(f"{path}: format is {found!r}; this version reads format {FORMAT}")
    token_ids = raw.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or any(type(i) is not int for i in token_ids):
        raise FailedPreconditionError(f"{path}: token_ids must be a list of at least 1 integer")
    if any(a >= b for a, b in pairwise(token_ids)):
        raise FailedPreconditionError(f"{path}: token_ids must be ascending, none twice")
    if token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        limits = f"{token_ids[0]} to {token_ids[-1]} are not within 0 to {vocab_size - 1}"
        raise FailedPreconditionError(f"{path}: token_ids: {limits}, the model's vocabulary")
    return token_ids


def reduce_head(
    module: Any,
    token_ids: Tensor,  # [K] int64
    name: str,
) -> None:
    """Replaces a causal LM's head, in place, by the rows of these ids: its logits become [..., K].

    Raises:
        FailedPreconditionError: the head is no linear layer.
    """
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise FailedPreconditionError(
            f"{name}: {FILE_NAME} can't be applied: the head of {type(module).__name__} is no linear layer"
        )
    rows = token_ids.to(head.weight.device)
    reduced = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    module.set_output_embeddings(reduced)
