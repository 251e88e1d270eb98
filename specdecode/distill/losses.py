"""The losses a draft can be trained with, their gradients, and α: over the K ids that it may draft.

p [R, K] is the target's distribution over the whole vocabulary, of which only the K columns are looked at:
its rows sum to less than one by what lies outside, which no draft of these ids can have accepted. q [R, K] is
the draft's, a softmax over exactly these ids. All are sums over a row:

    KL          Σ p·log(p/q)
    reverse KL  Σ q·log(q/p)
    TV          1 − α, α = Σ min(p, q), the probability that a token drawn from q is accepted
    LK          λ·KL + (1 − λ)·TV with λ = e^(−3α), a constant of the row as far as gradients go
    CE          −log q(x) of the token x that the target chose: training on its texts alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdecode.distill.options import Loss

_LK_RATE = 3.0
_CHUNK_ELEMENTS = 1 << 20
"""Entries of a [rows, K] float32 matrix handled at once: 4 MB."""


@dataclass(frozen=True)
class Teacher:
    """What the target says at R positions.

    Attributes:
        hidden: [R, d], what its head saw.
        head: [K, d], its head's rows of the ids that may be drafted.
        log_normaliser: [R] float32, log Σ exp of its logits over the whole vocabulary.
        columns: [R] int64, which of the K ids it chose; K where it chose another.
    """

    hidden: Tensor
    head: Tensor
    log_normaliser: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Measured:
    """Sums over rows, for means over many batches.

    Attributes:
        agreed: rows whose most probable id is the same on both sides, over the K ids and only where the
            target's lies among them.
    """

    rows: int
    loss: float
    accepted: float
    agreed: float


def loss_and_gradient(
    loss: Loss,
    logits: Tensor,  # [R, K] float32, the draft's
    log_p: Tensor,  # [R, K] float32
    columns: Tensor,  # [R] int64, K where the chosen id is none of them
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss [R], its gradient by the draft's logits [R, K], and α [R]."""
    log_q = torch.log_softmax(logits, dim=1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(dim=1)
    if loss is Loss.KL:
        value, gradient = _kl(log_p, p, log_q, q)
    elif loss is Loss.REVERSE_KL:
        value, gradient = _reverse_kl(log_p, log_q, q)
    elif loss is Loss.TV:
        value, gradient = _tv(p, q, alpha)
    elif loss is Loss.CE:
        value, gradient = _ce(log_q, q, columns)
    else:
        value, gradient = _lk(log_p, p, log_q, q, alpha)
    return value, gradient, alpha


def _lk(log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.exp(-_LK_RATE * alpha)
    short = torch.where(q < p, q, 0.0)
    scale = weight * p.sum(dim=1) + (1 - weight) * short.sum(dim=1)
    kl = (p * (log_p - log_q)).sum(dim=1)
    # λ·(q·Σp − p) + (1 − λ)·(q·Σshort − short) in few passes: this runs over [R, K] at every step.
    gradient = short.lerp_(p, weight[:, None]).neg_().addcmul_(q, scale[:, None])
    return weight * kl + (1 - weight) * (1 - alpha), gradient


def _kl(log_p: Tensor, p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return (p * (log_p - log_q)).sum(dim=1), (q * p.sum(dim=1, keepdim=True)).sub_(p)


def _reverse_kl(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_q - log_p
    value = (q * ratio).sum(dim=1)
    return value, ratio.sub_(value[:, None]).mul_(q)


def _tv(p: Tensor, q: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    short = torch.where(q < p, q, 0.0)
    return 1 - alpha, (q * short.sum(dim=1, keepdim=True)).sub_(short)


def _ce(log_q: Tensor, q: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    known = columns < q.shape[1]
    chosen = columns.clamp(max=q.shape[1] - 1)[:, None]
    value = torch.where(known, -log_q.gather(1, chosen)[:, 0], 0.0)
    gradient = q * known[:, None]
    return value, gradient.scatter_add_(1, chosen, -known[:, None].to(q.dtype))


class _HeadLoss(torch.autograd.Function):
    """Head and loss of few rows at a time, so that no [rows, K] matrix of a whole batch exists."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: Teacher, loss: Loss, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        by_hidden, by_head = torch.empty_like(hidden), torch.zeros_like(head)
        weight, own = head.to(dtype), hidden.to(dtype)
        rows_at_once = max(1, _CHUNK_ELEMENTS // head.shape[0])
        sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), rows_at_once):
            rows = slice(start, start + rows_at_once)
            logits = (own[rows] @ weight.T).float()
            log_p = (teacher.hidden[rows] @ teacher.head.T).float()
            log_p -= teacher.log_normaliser[rows, None]
            columns = teacher.columns[rows]
            value, gradient, alpha = loss_and_gradient(loss, logits, log_p, columns)
            agreed = logits.argmax(dim=1) == log_p.argmax(dim=1)
            sums += torch.stack([value.sum(), alpha.sum(), agreed.sum()]).double()
            small = gradient.to(dtype)
            by_hidden[rows] = (small @ weight).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                by_head += small.T @ own[rows]
        ctx.save_for_backward(by_hidden, by_head)
        return sums[0].float(), sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_head = ctx.saved_tensors
        scale = gradients[0]
        return by_hidden * scale, by_head * scale if ctx.needs_input_grad[1] else None, None, None, None


def head_loss(
    hidden: Tensor,  # [R, d] float32, after the draft's final norm
    head: Tensor,  # [K, d] float32, the draft's head
    teacher: Teacher,
    loss: Loss,
    dtype: torch.dtype,
) -> tuple[Tensor, Measured]:
    """The sum of the rows' losses, which can be differentiated by `hidden` and `head`, and what was measured.

    Products are computed in `dtype`, the rest in float32.
    """
    total, sums = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, teacher, loss, dtype
    )
    value, accepted, agreed = sums.tolist()
    return total, Measured(len(hidden), value, accepted, agreed)
