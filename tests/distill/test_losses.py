"""Losses, gradients and α against the formulas written out, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdecode.distill.losses import Teacher, head_loss, loss_and_gradient
from specdecode.distill.options import Loss


def direct(loss: Loss, logits: Tensor, p: Tensor, columns: Tensor) -> Tensor:
    """The definitions, one row after another, differentiable."""
    rows = []
    for row in range(len(logits)):
        q = torch.softmax(logits[row], dim=0)
        kl = (p[row] * (p[row] / q).log()).sum()
        alpha = torch.minimum(p[row], q).sum()
        weight = torch.exp(-3 * alpha.detach())
        chosen = int(columns[row])
        rows.append(
            {
                Loss.KL: kl,
                Loss.REVERSE_KL: (q * (q / p[row]).log()).sum(),
                Loss.TV: 1 - alpha,
                Loss.LK: weight * kl + (1 - weight) * (1 - alpha),
                Loss.CE: -q[chosen].log() if chosen < len(q) else q.sum() * 0,
            }[loss]
        )
    return torch.stack(rows)


def case(rows: int = 7, size: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, p that lacks some mass, and chosen columns, one of them outside."""
    torch.manual_seed(3)
    logits = torch.randn(rows, size, dtype=torch.float64)
    p = torch.softmax(2 * torch.randn(rows, size, dtype=torch.float64), dim=1) * torch.rand(rows, 1).double()
    columns = torch.randint(size, (rows,))
    columns[2] = size
    return logits, p, columns


@pytest.mark.parametrize("loss", Loss)
def test_every_loss_and_its_gradient_are_those_of_its_definition(loss: Loss) -> None:
    logits, p, columns = case()
    value, gradient, alpha = loss_and_gradient(loss, logits, p.log(), columns)
    logits = logits.requires_grad_()
    expected = direct(loss, logits, p, columns)
    (by_logits,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, by_logits)
    torch.testing.assert_close(alpha, torch.minimum(p, logits.detach().softmax(1)).sum(1))


def test_alpha_counts_mass_outside_the_vocabulary_as_lost() -> None:
    # p = (0.4, 0.1 | 0.5 outside), q = (0.5, 0.5): min gives 0.4 + 0.1.
    p = torch.tensor([[0.4, 0.1]])
    _, _, alpha = loss_and_gradient(Loss.TV, torch.zeros(1, 2), p.log(), torch.tensor([0]))
    assert alpha.item() == pytest.approx(0.5)


def test_the_weight_of_the_mixed_loss_falls_with_alpha() -> None:
    # q = p = (0.5, 0.5): KL and TV are 0. q = (0.5, 0.5), p = (1, 0): KL ln 2, α 0.5, TV 0.5.
    p = torch.tensor([[0.5, 0.5], [1.0, 1e-30]])
    value, _, _ = loss_and_gradient(Loss.LK, torch.zeros(2, 2), p.log(), torch.zeros(2, dtype=torch.int64))
    weight = math.exp(-1.5)
    assert value.tolist() == pytest.approx([0.0, weight * math.log(2) + (1 - weight) * 0.5], abs=1e-6)


@pytest.mark.parametrize("loss", Loss)
def test_the_head_in_parts_gives_the_gradients_of_the_whole(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode.distill.losses._CHUNK_ELEMENTS", 30)
    torch.manual_seed(4)
    hidden, head = torch.randn(9, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    states, teacher_head = torch.randn(9, 6), torch.randn(11, 6)
    normaliser = torch.logsumexp(states @ teacher_head.T, dim=1) + 0.3
    teacher = Teacher(states, teacher_head, normaliser, torch.randint(11, (9,)))
    total, measured = head_loss(hidden, head, teacher, loss, torch.float32)
    by_hidden, by_head = torch.autograd.grad(total, (hidden, head))
    p = (states @ teacher_head.T - normaliser[:, None]).exp()
    expected = direct(loss, hidden @ head.T, p, teacher.columns).sum()
    torch.testing.assert_close(total, expected.detach())
    for found, wanted in zip(
        (by_hidden, by_head), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    agreed = ((hidden @ head.T).argmax(1) == (states @ teacher_head.T).argmax(1)).sum()
    assert (measured.rows, measured.agreed) == (9, int(agreed))
