"""One drafted token a row, by each verification method's own rule.

All but greedy draw from q: the request's distribution after all its transforms, restricted to its `top_k`
most probable tokens and renormalised. What is drawn from is what is handed on as q, to the bit.
Randomness is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdecode import sampling
from specdecode.lm.cpu import SamplingKernels
from specdecode.types import SparseDistributions


@dataclass(frozen=True)
class Support:
    """q at one position: token ids [K] int32 and their probabilities [K] float32, all above 0."""

    token_ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Draw:
    """One drafted token, and q at its position where the method needs q."""

    token: int
    q: Support | None = None


Draws = list[Draw | None]
"""One a row; None where nothing can be drawn: the logits hold NaN, or no token is permitted."""


def draw_greedy(
    logits: Tensor,  # [R, V]
    windows: Sequence[sampling.Window],  # one row each
) -> Draws:
    """The most probable token after penalties, bias and bans."""
    logits = sampling.penalised_logits(logits, windows)
    token_ids = logits.argmax(dim=1)  # [R]
    drawable = torch.isfinite(logits.gather(1, token_ids[:, None])[:, 0])
    return _draws(token_ids, drawable, None)


def draw_sampled(
    logits: Tensor,  # [R, V]
    windows: Sequence[sampling.Window],  # one row each
    u: Tensor,  # [R] float64 in [0, 1)
    top_k: int,
    kernels: SamplingKernels | None = None,
) -> Draws:
    """Independent draws from q, for `rejection` and `block`, with q."""
    token_ids, probs = _restricted(logits, windows, top_k, kernels)  # [R, K] each
    columns = sampling.inverse_cdf(probs, u.to(probs.device))  # [R]
    picks = token_ids.gather(1, columns[:, None])[:, 0]
    return _draws(picks, torch.isfinite(probs).all(dim=1), supports(token_ids, probs))


def draw_coupled(
    logits: Tensor,  # [R, V]
    windows: Sequence[sampling.Window],  # one row each
    seeds: Sequence[int],  # [R], up to 2**64 - 1
    choice_indices: Sequence[int],  # [R]
    top_k: int,
    kernels: SamplingKernels | None = None,
) -> Draws:
    """What the target would pick, were q its distribution: argmin e / q with the request's shared noise."""
    token_ids, probs = _restricted(logits, windows, top_k, kernels)  # [R, K] each
    positions = [len(window.token_ids) for window in windows]
    picks = sampling.coupled_support_tokens(token_ids, probs, seeds, choice_indices, positions)  # [R]
    return _draws(picks, torch.isfinite(probs).all(dim=1), None)


def supports(
    token_ids: Tensor,  # [R, K]
    probs: Tensor,  # [R, K]
) -> list[Support]:
    """Each row without its entries of no mass."""
    ids = token_ids.to("cpu", torch.int32).numpy()
    mass = probs.to("cpu", torch.float32).numpy()
    return [Support(row[q > 0], q[q > 0]) for row, q in zip(ids, mass, strict=True)]


def joined(supports: Sequence[Support]) -> SparseDistributions:
    """q of consecutive positions as it goes on the wire."""
    return SparseDistributions(
        sizes=np.array([len(support.token_ids) for support in supports], dtype=np.int32),
        token_ids=np.concatenate([support.token_ids for support in supports]),
        probs=np.concatenate([support.probs for support in supports]),
    )


def _restricted(
    logits: Tensor,  # [R, V]
    windows: Sequence[sampling.Window],
    top_k: int,
    kernels: SamplingKernels | None,
) -> tuple[Tensor, Tensor]:
    """Token ids [R, K] and q [R, K] float32."""
    p = sampling.probabilities(logits, windows, kernels)
    token_ids, probs = sampling.restrict_top_k(p, top_k, kernels)
    return token_ids, probs.float()


def _draws(
    token_ids: Tensor,  # [R]
    drawable: Tensor,  # [R] bool
    q: Sequence[Support] | None,
) -> Draws:
    tokens, good = token_ids.tolist(), drawable.tolist()
    return [
        Draw(token, q[row] if q is not None else None) if good[row] else None
        for row, token in enumerate(tokens)
    ]
