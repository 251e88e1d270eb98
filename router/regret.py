"""How the γ of a decision compare to always the same γ, by what was known when it was made; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdecode.cost import OtherLoad
from specdecode.cost_tables import DraftCosts, Floats, StepCosts
from specdecode.types import DrafterKind


@dataclass(frozen=True)
class Prospect:
    """What could be drafted for one due sequence, and what will be.

    Attributes:
        drafter: who would draft; None: nobody, and there are no survivals.
        survivals: s_i of draft positions, as estimated, as deep as its γ may be.
        num_draft_tokens: γ that was decided.
        num_cached_tokens: that a drafter attends to in each pass.
    """

    drafter: DrafterKind | None
    survivals: tuple[float, ...]
    num_draft_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Outlook:
    """One due sequence's part, an even one, of what a decision expected of its step.

    Attributes:
        expected: emitted tokens at the γ decided.
        lost: by fixed γ = 0, 1, …: tokens that it would be expected to emit more in the same time; negative
            where the decision is better. Where a sequence can't have γ, it has the largest it can.
    """

    expected: float
    lost: tuple[float, ...]


def compare(
    due: Sequence[Prospect],
    drafts: Mapping[DrafterKind, DraftCosts],
    steps: StepCosts,
    others: OtherLoad,
    *,
    idle_share: float,
    round_trip_seconds: float,
) -> Outlook:
    """The decision against every fixed γ for all due sequences; arguments as in `specdecode.cost.choose`."""
    depth = max(len(prospect.survivals) for prospect in due)
    limits = np.array([len(prospect.survivals) for prospect in due])
    decided = np.array([prospect.num_draft_tokens for prospect in due])
    # [K + 2, N]: γ of each sequence for fixed γ = 0..K, and as decided.
    lengths = np.vstack([np.minimum(np.arange(depth + 1)[:, None], limits), np.minimum(decided, limits)])
    drafted = lengths.sum(axis=1)
    expected = others.emitted + len(due) + _gains(due, lengths, depth)
    tokens = drafted + len(due)
    seconds = steps.curve(
        tokens + others.tokens, tokens + others.rows, others.cached_tokens, others.sequences + len(due)
    )
    waited = _draft_seconds(due, drafts, lengths, depth) + round_trip_seconds * (drafted > 0)
    seconds = seconds - others.sunk_seconds + idle_share * waited
    lost = expected / seconds * seconds[-1] - expected[-1]
    return Outlook(float(expected[-1]) / len(due), tuple((lost[:-1] / len(due)).tolist()))


def _gains(due: Sequence[Prospect], lengths: np.ndarray, depth: int) -> Floats:  # lengths [M, N] -> [M]
    """Tokens expected beyond the one of each sequence."""
    gains = np.zeros((len(due), depth + 1))
    for row, prospect in zip(gains, due, strict=True):
        row[1 : len(prospect.survivals) + 1] = prospect.survivals
    return np.asarray(gains.cumsum(axis=1)[np.arange(len(due)), lengths].sum(axis=1))


def _draft_seconds(
    due: Sequence[Prospect], drafts: Mapping[DrafterKind, DraftCosts], lengths: np.ndarray, depth: int
) -> Floats:  # lengths [M, N] -> [M]
    """Time of drafting; drafters of one round follow one another."""
    total = np.zeros(len(lengths))
    for drafter in dict.fromkeys(prospect.drafter for prospect in due):
        if drafter is None:
            continue
        own = np.array([index for index, prospect in enumerate(due) if prospect.drafter is drafter])
        cached = np.array([due[index].num_cached_tokens for index in own], dtype=np.float64)
        costs, of_own = drafts[drafter], lengths[:, own]
        parts = costs.sequence_parts(depth, cached)[np.arange(len(own)), of_own]
        total += costs.depth_seconds(of_own.max(axis=1)) + parts.sum(axis=1)
    return total
