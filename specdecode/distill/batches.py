"""Texts of about the same length, padded at their ends, with what the target said at each position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode.distill.corpus import Text
from specdecode.distill.losses import Teacher
from specdecode.distill.student import Student

_SORTED_AT_ONCE = 32
"""Batches whose texts are sorted by length together: little padding, and chance in who shares a batch."""


@dataclass(frozen=True)
class Batch:
    """Attributes:
    token_ids: [B, L], padded at the ends; causal attention keeps padding from what comes before it.
    rows: [R] int64, positions in B·L whose next token is of an answer.
    """

    token_ids: Tensor
    rows: Tensor
    teacher: Teacher


def epoch_of(texts: Sequence[Text], num_positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Which texts share a batch of at most `num_positions` padded positions, in one pass over all of them."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(texts)))
    rng.shuffle(order)
    mean = sum(len(text.token_ids) for text in texts) / max(len(texts), 1)
    window = max(1, int(_SORTED_AT_ONCE * num_positions / max(mean, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        by_length = sorted(order[start : start + window], key=lambda i: len(texts[i].token_ids))
        batches += _cut(texts, by_length, num_positions)
    rng.shuffle(batches)
    return batches


def _cut(texts: Sequence[Text], by_length: Sequence[int], num_positions: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in by_length:
        if batch and (len(batch) + 1) * len(texts[index].token_ids) > num_positions:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def batch_of(texts: Sequence[Text], student: Student, device: torch.device) -> Batch:
    """The texts as tensors on a device."""
    length = max(len(text.token_ids) for text in texts) - 1
    token_ids = torch.zeros(len(texts), length, dtype=torch.int64)
    rows, chosen = [], []
    for row, text in enumerate(texts):
        ids = torch.tensor(text.token_ids)
        token_ids[row, : len(ids) - 1] = ids[:-1]
        rows.append(torch.arange(text.num_prompt_tokens - 1, len(ids) - 1) + row * length)
        chosen.append(ids[text.num_prompt_tokens :])
    teacher = Teacher(
        hidden=torch.cat([text.hidden for text in texts]).to(device),
        head=student.teacher_head,
        log_normaliser=torch.cat([text.log_normaliser for text in texts]).to(device),
        columns=student.columns(torch.cat(chosen).to(device)),
    )
    return Batch(token_ids.to(device), torch.cat(rows).to(device), teacher)
