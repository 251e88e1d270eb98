"""One drafted token a row, by each verification method's own rule.

All but greedy draw from q: the request's distribution after all its transforms, restricted to its `top_k`
most probable tokens and renormalised. What is drawn from is what is handed on as q, to the bit.
Randomness is an argument. `token_ids` says what the columns of logits stand for where these are not all ids
of the vocabulary; a window that adjusts the logits of ids needs all of them. On a CPU kernels do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdecode import sampling
from specdecode.lm.cpu import DraftedRows, Kernels
from specdecode.noise import to_int64
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
    logits: Tensor,  # [R, C]
    windows: Sequence[sampling.Window],  # one row each
    kernels: Kernels | None = None,
    token_ids: Tensor | None = None,  # [C] int64
) -> Draws:
    """The most probable token after penalties, bias and bans."""
    adjusted = sampling.penalised_logits(logits, windows)
    if kernels is not None and adjusted.dtype == kernels.dtype:
        columns, finite = kernels.best_tokens(adjusted)
        if bool(finite.all()):
            return _draws(_ids_of(columns, token_ids), finite, None)
    columns = adjusted.argmax(dim=1)  # [R]
    drawable = torch.isfinite(adjusted.gather(1, columns[:, None])[:, 0])
    return _draws(_ids_of(columns, token_ids), drawable, None)


def draw_sampled(
    logits: Tensor,  # [R, C]
    windows: Sequence[sampling.Window],  # one row each
    u: Tensor,  # [R] float64 in [0, 1)
    top_k: int,
    kernels: Kernels | None = None,
    token_ids: Tensor | None = None,  # [C] int64
) -> Draws:
    """Independent draws from q, for `rejection` and `block`, with q."""
    drafted = _drafted(logits, windows, u, top_k, kernels, token_ids)
    if drafted is not None:
        return _draws_of(drafted, with_q=True)
    ids, probs = _restricted(logits, windows, top_k, token_ids)  # [R, K] each
    columns = sampling.inverse_cdf(probs, u.to(probs.device))  # [R]
    picks = ids.gather(1, columns[:, None])[:, 0]
    return _draws(picks, torch.isfinite(probs).all(dim=1), supports(ids, probs))


def draw_coupled(
    logits: Tensor,  # [R, C]
    windows: Sequence[sampling.Window],  # one row each
    seeds: Sequence[int],  # [R], up to 2**64 - 1
    choice_indices: Sequence[int],  # [R]
    top_k: int,
    kernels: Kernels | None = None,
    token_ids: Tensor | None = None,  # [C] int64
) -> Draws:
    """What the target would pick, were q its distribution: argmin e / q with the request's shared noise."""
    positions = [len(window.token_ids) for window in windows]
    origins = [(to_int64(seed), *rest) for seed, *rest in zip(seeds, choice_indices, positions, strict=True)]
    drafted = _drafted(logits, windows, torch.tensor(origins), top_k, kernels, token_ids)
    if drafted is not None:
        return _draws_of(drafted, with_q=False)
    ids, probs = _restricted(logits, windows, top_k, token_ids)  # [R, K] each
    picks = sampling.coupled_support_tokens(ids, probs, seeds, choice_indices, positions)  # [R]
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


def _drafted(
    logits: Tensor,  # [R, C]
    windows: Sequence[sampling.Window],
    noise: Tensor,  # [R] float64, or [R, 3] int64
    top_k: int,
    kernels: Kernels | None,
    token_ids: Tensor | None,  # [C] int64
) -> DraftedRows | None:
    """What the kernels draw; None where there are none for these logits."""
    if kernels is None or not kernels.sampling.takes(logits):
        return None
    adjusted = sampling.penalised_logits(logits, windows)
    return kernels.sampling.drafts(adjusted, [window.params for window in windows], top_k, token_ids, noise)


def _restricted(
    logits: Tensor,  # [R, C]
    windows: Sequence[sampling.Window],
    top_k: int,
    token_ids: Tensor | None,  # [C] int64
) -> tuple[Tensor, Tensor]:
    """Token ids [R, K] and q [R, K] float32."""
    columns, probs = sampling.restrict_top_k(sampling.probabilities(logits, windows), top_k)
    return _ids_of(columns, token_ids), probs.float()


def _ids_of(
    columns: Tensor,  # [...] int64
    token_ids: Tensor | None,  # [C] int64
) -> Tensor:
    """[...] int64."""
    return columns if token_ids is None else token_ids[columns]


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


def _draws_of(drafted: DraftedRows, with_q: bool) -> Draws:
    """Rows of a kernel's answer; copies, or a draft would keep every other row alive."""
    return [
        None if count == 0 else Draw(token, Support(ids[:count].copy(), q[:count].copy()) if with_q else None)
        for token, count, ids, q in zip(
            drafted.tokens, drafted.counts, drafted.token_ids, drafted.q, strict=True
        )
    ]
