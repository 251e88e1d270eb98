"""The lossless verification methods: tensors in, tensors out, randomness as an argument.

p is the target's and q the draft's distribution at one position, after all transforms. Window b has drafts
x_1 … x_γ (γ = lengths[b], maybe 0) and γ + 1 consecutive rows of p, from row first_row[b] on: row i (from 0)
is the position after x_1 … x_i. Every window emits its `accepted` first drafts and one more token,
`next_token`, so that what is emitted has exactly the target's distribution:

* greedy and coupled (`verify_picks`): the target's own pick at every position is emitted, for as long as the
  drafts
  equal it; what is emitted does not depend on the drafts at all.
* rejection (`verify_rejection`): Leviathan et al. 2023, "Fast inference from transformers via speculative
  decoding"; Chen et al. 2023, "Accelerating large language model decoding with speculative sampling".
* block (`verify_block`): Sun et al. 2025, "Block verification accelerates speculative decoding"; never fewer
  accepted drafts in expectation.

Rejection and block trust q to be what the drafts were sampled from (a one-hot q is right for any drafter),
and need noise that is independent of the drafts. Positions at and after a window's length are padding without
influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdecode.sampling import inverse_cdf

ResidualSampler = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""The signature of `residual_tokens`."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """The drafts of B windows, padded to G positions with anything.

    Attributes:
        token_ids: [B, G] int64, x_1 … x_γ. lengths: [B] int64, γ of each window, 0 ≤ γ ≤ G. q_token_ids: [B,
        G, K] int64, support of q at each position; an id of positive probability occurs once. q_probs: [B, G,
        K] floating, their probabilities, 0 in unused entries (with any id of the vocabulary).
            Normalised here in float64, as in the sampling of the drafts. A one-hot q has the draft with 1.
            Greedy and coupled don't look at q (K may be 0).
    """

    token_ids: torch.Tensor
    lengths: torch.Tensor
    q_token_ids: torch.Tensor
    q_probs: torch.Tensor


@dataclass(frozen=True, eq=False)
class Verified:
    """What one verification decided for B windows.

    Given the drafts, `tested[b, i]` is the probability (greedy and coupled: 0 or 1) that draft i (from 0) was
    reached, `passed[b, i]` that it was reached and accepted; 0 at padding. Their means over rounds are
    unbiased.

    Attributes:
        accepted: [B] int64, drafts kept.
        next_token: [B] int64, the bonus token if all were kept, else the recovered one.
        tested: [B, G] float64.
        passed: [B, G] float64.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    tested: torch.Tensor
    passed: torch.Tensor


def verify_picks(
    picks: torch.Tensor,  # [R] int64
    first_row: torch.Tensor,  # [B] int64
    drafts: Drafts,
) -> Verified:
    """Greedy and coupled: accept drafts while they equal the target's pick, then emit the target's pick.

    `picks` are the target's greedy or coupled tokens of all rows.
    """
    valid = _valid(drafts)
    window_picks = picks[_rows(first_row, drafts)]  # [B, G + 1]
    passed = (valid & (drafts.token_ids == window_picks[:, :-1])).long().cumprod(dim=1)
    accepted = passed.sum(dim=1)
    tested = valid & (_positions(drafts) <= accepted[:, None])
    next_token = window_picks.gather(1, accepted[:, None])[:, 0]
    return Verified(accepted, next_token, tested.double(), passed.double())


def verify_rejection(
    p: torch.Tensor,  # [R, V]
    first_row: torch.Tensor,  # [B] int64
    drafts: Drafts,
    accept_noise: torch.Tensor,  # [B, G] in [0, 1)
    sample_noise: torch.Tensor,  # [B] in [0, 1)
    sample: ResidualSampler | None = None,
) -> Verified:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    Accept x_i iff u_i · q(x_i) < p(x_i), so with probability min(1, p/q); at the first rejection sample from
    norm(max(p − q, 0)); after γ accepted drafts sample from p at γ + 1.

    passed_i = tested_i · Σ_x min(p(x), q(x)) is the expectation over x_i; tested_i = Π_{j<i} min(1,
    p(x_j)/q(x_j)).
    """
    at = _Drafted.of(p, first_row, drafts)
    kept = at.valid & (accept_noise * at.q < at.p)
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    next_token = _sample_next(p, at, accepted, torch.ones_like(sample_noise), sample_noise, sample)
    chances = torch.where(at.q > 0, at.p / at.q, (at.p > 0).double()).clamp(max=1.0)
    tested = _shifted_right(chances).cumprod(dim=1).masked_fill(~at.valid, 0.0)
    overlaps = torch.minimum(at.p_support, at.q_support).sum(dim=2)
    return Verified(accepted, next_token, tested, (tested * overlaps).masked_fill(~at.valid, 0.0))


def verify_block(
    p: torch.Tensor,  # [R, V]
    first_row: torch.Tensor,  # [B] int64
    drafts: Drafts,
    accept_noise: torch.Tensor,  # [B, G] in [0, 1)
    sample_noise: torch.Tensor,  # [B] in [0, 1)
    sample: ResidualSampler | None = None,
) -> Verified:
    """Block verification (Sun et al. 2025, algorithm 2).

    p_0 = 1, p_i = min(1, p_{i−1} · p(x_i)/q(x_i)); Z_i = Σ_x max(p_i·p(x) − q(x), 0) at the position after
    x_i; h_i = Z_i / (Z_i + 1 − p_i) for i < γ (0 where Z_i = 0), h_γ = p_γ; τ = max{i : u_i < h_i}, or 0: a
    later success overrules every failure before it. Then sample from norm(max(p_τ·p − q, 0)), or from p if τ
    = γ.

    passed_{i−1} = Pr(τ ≥ i) = 1 − Π_{j≥i} (1 − h_j) given the drafts; tested is the one before, 1 at first.
    """
    at = _Drafted.of(p, first_row, drafts)
    reach = _block_reach(at)  # [B, G + 1]
    h = _block_chances(at, reach, drafts)  # [B, G]
    successes = torch.where(accept_noise < h, _positions(drafts) + 1, 0)
    accepted = torch.nn.functional.pad(successes, (1, 0)).amax(dim=1)
    scale = reach.gather(1, accepted[:, None])[:, 0]
    next_token = _sample_next(p, at, accepted, scale, sample_noise, sample)
    passed = (1.0 - (1.0 - h).flip(1).cumprod(dim=1).flip(1)).masked_fill(~at.valid, 0.0)
    return Verified(accepted, next_token, _shifted_right(passed).masked_fill(~at.valid, 0.0), passed)


@dataclass(frozen=True, eq=False)
class _Drafted:
    """p and q at the drafted positions of B windows, in float64; at padding q is 0 everywhere."""

    valid: torch.Tensor  # [B, G] bool
    rows: torch.Tensor  # [B, G + 1] int64, rows of p
    p: torch.Tensor  # [B, G], p(x_i)
    q: torch.Tensor  # [B, G], q(x_i)
    support_ids: torch.Tensor  # [B, G, K] int64
    p_support: torch.Tensor  # [B, G, K], p on q's support
    q_support: torch.Tensor  # [B, G, K]

    @classmethod
    def of(cls, p: torch.Tensor, first_row: torch.Tensor, drafts: Drafts) -> _Drafted:
        valid, rows = _valid(drafts), _rows(first_row, drafts)
        padding = ~valid[:, :, None]
        token_ids = drafts.token_ids.masked_fill(~valid, 0)
        support_ids = drafts.q_token_ids.masked_fill(padding, 0)
        q_support = drafts.q_probs.double().masked_fill(padding, 0.0)
        q_support = q_support / q_support.sum(dim=2, keepdim=True).masked_fill(padding, 1.0)
        return cls(
            valid=valid,
            rows=rows,
            p=p[rows[:, :-1], token_ids].double(),
            q=(q_support * (support_ids == token_ids[:, :, None])).sum(dim=2),
            support_ids=support_ids,
            p_support=p[rows[:, :-1, None], support_ids].double(),
            q_support=q_support,
        )


def _block_reach(at: _Drafted) -> torch.Tensor:
    """p_0 … p_γ of block verification, [B, G + 1]; 0 from a draft without probability under q on."""
    ratios = torch.where(at.q > 0, at.p / at.q, 0.0)
    reach = [ratios.new_ones(len(ratios))]
    for ratio in ratios.unbind(dim=1):
        reach.append((reach[-1] * ratio).clamp(max=1.0))
    return torch.stack(reach, dim=1)


def _block_chances(at: _Drafted, reach: torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """h_1 … h_γ of block verification, [B, G]; 0 at padding.

    q's support is enough for Z: Z_i = p_i − Σ_{x ∈ supp q} min(p_i·p(x), q(x)), with q of the draft after
    x_i.
    """
    before = reach[:, :-1]  # p_0 … p_{G−1}
    overlaps = torch.minimum(before[:, :, None] * at.p_support, at.q_support).sum(dim=2)
    residual = (before - overlaps).clamp(min=0.0)  # Z_0 … Z_{G−1}
    h = torch.where(residual > 0, residual / (residual + 1.0 - before), 0.0)
    h = torch.nn.functional.pad(h[:, 1:], (0, 1))[:, : h.shape[1]]
    is_last = _positions(drafts) + 1 == drafts.lengths[:, None]
    return torch.where(is_last, reach[:, 1:], h).masked_fill(~at.valid, 0.0)


def _sample_next(
    p: torch.Tensor,  # [R, V]
    at: _Drafted,
    accepted: torch.Tensor,  # [B] int64
    scale: torch.Tensor,  # [B]
    sample_noise: torch.Tensor,  # [B]
    sample: ResidualSampler | None,
) -> torch.Tensor:
    """A sample of norm(max(scale·p − q, 0)) after the accepted drafts, or of p after the last: [B] int64."""
    rows = at.rows.gather(1, accepted[:, None])[:, 0]
    rejected = accepted < at.valid.sum(dim=1)  # [B]
    if at.valid.shape[1] == 0:
        support_ids, q = at.support_ids.flatten(1), at.q_support.flatten(1)
    else:
        position = (torch.arange(len(rows), device=rows.device), torch.where(rejected, accepted, 0))
        support_ids = at.support_ids[position]  # [B, K]
        q = at.q_support[position].masked_fill(~rejected[:, None], 0.0)
    return (sample or residual_tokens)(p, rows, scale, support_ids, q, sample_noise)


def residual_tokens(
    p: torch.Tensor,  # [R, V]
    rows: torch.Tensor,  # [B] int64
    scale: torch.Tensor,  # [B]
    support_ids: torch.Tensor,  # [B, K] int64; an id of positive q occurs once
    q: torch.Tensor,  # [B, K]
    noise: torch.Tensor,  # [B] in [0, 1)
) -> torch.Tensor:
    """One sample of norm(max(scale·p − q, 0)) for each of B rows of p, in float64: [B] int64."""
    weights = p[rows].double().mul_(scale[:, None])  # [B, V]
    weights.scatter_add_(1, support_ids, -q.double()).clamp_(min=0.0)
    # Rounding may leave nothing of a residual whose true mass is tiny; p is as good there.
    empty = (weights.sum(dim=1) == 0).nonzero()[:, 0]
    weights[empty] = p[rows[empty]].double()
    return inverse_cdf(weights, noise)


def _shifted_right(values: torch.Tensor) -> torch.Tensor:
    """[B, G] moved one column on, 1 in the first."""
    return torch.nn.functional.pad(values, (1, 0), value=1.0)[:, : values.shape[1]]


def _positions(drafts: Drafts) -> torch.Tensor:
    return torch.arange(drafts.token_ids.shape[1], device=drafts.token_ids.device)  # [G]


def _valid(drafts: Drafts) -> torch.Tensor:
    return _positions(drafts) < drafts.lengths[:, None]  # [B, G]


def _rows(first_row: torch.Tensor, drafts: Drafts) -> torch.Tensor:
    """Rows of p of every window, [B, G + 1]; its last row again at padding."""
    steps = torch.arange(drafts.token_ids.shape[1] + 1, device=first_row.device)
    return first_row[:, None] + torch.minimum(steps, drafts.lengths[:, None])
