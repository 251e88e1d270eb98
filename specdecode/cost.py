"""What speculation brings and costs: E(γ), speedup, and the joint choice of γ and drafter. Pure arithmetic.

Words: α_i is the probability that draft position i is accepted given that all before it were, s_i = α_0·…·α_i
its survival, E(γ) = 1 + Σ s_i the expected emitted tokens of a round (one is the target's own), c the time
of one draft pass over that of a target step. The speedup is that of Leviathan et al. with the bonus token
counted: E(γ) / (1 + c·γ).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from specdecode.cost_tables import (
    Calibration,
    DraftCosts,
    DraftSample,
    Floats,
    StepCosts,
    StepSample,
)
from specdecode.errors import InvalidArgumentError
from specdecode.slots import NEVER, SlotProblem

__all__ = [
    "Calibration",
    "Candidate",
    "Choice",
    "DraftCosts",
    "DraftSample",
    "DueCandidates",
    "OtherLoad",
    "SpeedupRow",
    "StepCosts",
    "StepSample",
    "best_row",
    "check_draft_cost",
    "choose",
    "constant_expected_emitted",
    "expected_emitted",
    "speedup_table",
    "survivals",
]

D = TypeVar("D", bound=Hashable)


def survivals(alphas: Sequence[float]) -> tuple[float, ...]:
    """s_i = α_0·…·α_i for each position. Raises InvalidArgumentError for an α outside [0, 1]."""
    for position, alpha in enumerate(alphas):
        _check_alpha(f"alphas[{position}]", alpha)
    return tuple(itertools.accumulate(alphas, lambda survival, alpha: survival * alpha))


def expected_emitted(alphas: Sequence[float]) -> float:
    """E(γ) for γ = len(alphas), the target's own token included."""
    return 1 + sum(survivals(alphas))


def constant_expected_emitted(alpha: float, num_draft_tokens: int) -> float:
    """E(γ) = (1 − α^(γ+1)) / (1 − α) for the same α at every position."""
    _check_alpha("alpha", alpha)
    if num_draft_tokens < 0:
        raise InvalidArgumentError.of("num_draft_tokens", f"{num_draft_tokens} is below 0")
    if alpha == 1:
        return float(num_draft_tokens + 1)
    return float((1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha))


@dataclass(frozen=True)
class SpeedupRow:
    """What one γ brings over plain decoding when verifying γ + 1 tokens takes as long as one."""

    num_draft_tokens: int
    survival: float
    """Of the last drafted position."""
    emitted: float
    speedup: float


def speedup_table(alphas: Sequence[float], draft_cost: float) -> list[SpeedupRow]:
    """One row for each γ = 1..len(alphas).

    Args:
        alphas: α of each draft position, in [0, 1]; at least one.
        draft_cost: c, above 0.
    """
    if not alphas:
        raise InvalidArgumentError.of("alphas", "none: γ must be allowed to be at least 1")
    check_draft_cost(draft_cost)
    emitted, rows = 1.0, []
    for length, survival in enumerate(survivals(alphas), start=1):
        emitted += survival
        rows.append(SpeedupRow(length, survival, emitted, emitted / (1 + draft_cost * length)))
    return rows


def best_row(rows: Sequence[SpeedupRow]) -> SpeedupRow | None:
    """The row of the largest speedup, the shortest of equals; None where none is above 1."""
    best = max(rows, key=lambda row: row.speedup)
    return best if best.speedup > 1 else None


@dataclass(frozen=True)
class Candidate(Generic[D]):
    """What one drafter could bring one sequence in its next round.

    Attributes:
        drafter: a key of the drafters' costs.
        survivals: s_i of positions 0..γ_max−1, in [0, 1], never rising; its length caps γ.
    """

    drafter: D
    survivals: tuple[float, ...]


@dataclass(frozen=True)
class DueCandidates(Generic[D]):
    """A sequence to be decided on; it runs one token in any case.

    Attributes:
        candidates: one for each drafter that may draft for it; none: it decodes plainly.
        weight: of its tokens, above 0 (the tier's).
        num_cached_tokens: that a drafter attends to in each pass.
    """

    candidates: tuple[Candidate[D], ...] = ()
    weight: float = 1.0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class OtherLoad:
    """What the next step carries besides the sequences that are decided on.

    Attributes:
        tokens: in flight (leased sequences, prefill chunks).
        rows: of those, how many need logits.
        emitted: expected, weighted.
        cached_tokens: kv of the whole step, the due sequences' included.
        sequences: that those tokens are of.
        sunk_seconds: of the step's time, what has to be spent whatever is drafted and emits nothing now
            (prefill): it is left out of the rate, or every draft would look cheap beside it.
    """

    tokens: int = 0
    rows: int = 0
    emitted: float = 0.0
    cached_tokens: int = 0
    sequences: int = 0
    sunk_seconds: float = 0.0


@dataclass(frozen=True)
class Choice(Generic[D]):
    """What `choose` found, with what it expects of it.

    Attributes:
        num_draft_tokens: γ of each due sequence, in order.
        drafters: of each due sequence; None where γ is 0.
        emitted: G, weighted, others included.
        step_seconds: T of the step.
        draft_seconds: how long drafting takes, round trip included.
        seconds: T + φ · draft_seconds, less what is sunk: what `emitted` was divided by.
        plain_rate: emitted a second without any draft.
        price: λ, emitted tokens that one more token in flight would cost the replica.
    """

    num_draft_tokens: tuple[int, ...]
    drafters: tuple[D | None, ...]
    emitted: float
    step_seconds: float
    draft_seconds: float
    seconds: float
    plain_rate: float
    price: float

    @property
    def rate(self) -> float:
        """Emitted a second: what was maximised."""
        return self.emitted / self.seconds


def choose(
    due: Sequence[DueCandidates[D]],
    drafts: Mapping[D, DraftCosts],
    steps: StepCosts,
    others: OtherLoad | None = None,
    *,
    idle_share: float = 1.0,
    round_trip_seconds: float = 0.0,
    max_slots: int | None = None,
) -> Choice[D]:
    """γ and drafter of every due sequence, all together: what maximises, over everything that is possible,

        (G_others + Σ w_i·E_i(γ_i)) / (T(n_others + Σ (γ_i + 1), rows, kv) − sunk + φ·(Σ_drafters T_d + rtt))

    Drafters of one round follow one another. Nothing is drafted where nothing is gained. Exact: equal to
    trying everything, for any table that never falls (`specdecode.slots` says how).

    Args:
        due: sequences that wait for a decision.
        drafts: costs of each drafter.
        steps: T.
        others: what else the step carries.
        idle_share: φ, in [0, 1]: share of drafting time in which the target has nothing to run.
        round_trip_seconds: of asking the drafts, if anything is drafted.
        max_slots: most tokens to draft in all (free KV blocks, the operator's cap on tokens in flight).
    """
    others = others or OtherLoad()
    _check_load(due, others, idle_share, round_trip_seconds, max_slots)
    survival, offered = _survival_array(due, drafts)
    weights = np.array([sequence.weight for sequence in due])
    certain = others.emitted + float(weights.sum())
    limit = int((survival != NEVER).any(axis=0).sum())
    slots = np.arange((limit if max_slots is None else min(limit, max_slots)) + 2)
    seconds = steps.curve(
        slots + (others.tokens + len(due)),
        slots + (others.rows + len(due)),
        others.cached_tokens,
        others.sequences + len(due),
    )
    seconds = seconds - others.sunk_seconds
    best = SlotProblem(
        survival,
        weights,
        np.array([sequence.num_cached_tokens for sequence in due], dtype=np.float64),
        [drafts[drafter] for drafter in offered],
        idle_share,
        round_trip_seconds,
        certain,
        seconds,
    ).solve()
    count = int(best.lengths.sum())
    picked = zip(best.drafters.tolist(), best.lengths.tolist(), strict=True)
    return Choice(
        num_draft_tokens=tuple(best.lengths.tolist()),
        drafters=tuple(offered[drafter] if length else None for drafter, length in picked),
        emitted=best.emitted,
        step_seconds=best.step_seconds + others.sunk_seconds,
        draft_seconds=best.draft_seconds,
        seconds=best.seconds,
        plain_rate=certain / float(seconds[0]),
        price=best.rate * float(seconds[count + 1] - seconds[count]),
    )


def _survival_array(
    due: Sequence[DueCandidates[D]], drafts: Mapping[D, DraftCosts]
) -> tuple[Floats, list[D]]:
    """[drafters, N, K] survivals, NEVER where nothing is offered, and the drafters that offer anything."""
    offered: list[D] = []
    rows: list[list[tuple[float, ...]]] = []
    for index, sequence in enumerate(due):
        for candidate in sequence.candidates:
            if candidate.drafter not in offered:
                offered.append(candidate.drafter)
                rows.append([()] * len(due))
            row = rows[offered.index(candidate.drafter)]
            if row[index]:
                raise InvalidArgumentError.of(f"due[{index}].candidates", "one drafter stands twice")
            row[index] = candidate.survivals
    for drafter in offered:
        if drafter not in drafts:
            raise InvalidArgumentError.of("drafts", f"the costs of {drafter} are missing")
    depth = max((len(survival) for row in rows for survival in row), default=0)
    padding = (NEVER,) * depth
    flat: list[float] = []
    for row in rows:
        for survival in row:
            flat += survival
            flat += padding[len(survival) :]
    array = np.array(flat).reshape(len(offered), len(due), depth)
    _check_survivals(array, offered)
    return array, offered


def _check_survivals(survival: Floats, offered: list[D]) -> None:
    real = survival != NEVER
    # Written so that NaN fails too.
    valid = ~real | ((survival >= 0) & (survival <= 1))
    valid[:, :, 1:] &= survival[:, :, 1:] <= survival[:, :, :-1] + 1e-12
    if not valid.all():
        drafter, index, position = np.argwhere(~valid)[0].tolist()
        name = f"due[{index}].candidates[{offered[drafter]}].survivals[{position}]"
        value = survival[drafter, index, position]
        raise InvalidArgumentError.of(name, f"{value} is not in [0, 1], or above the position before it")


def check_draft_cost(draft_cost: float) -> None:
    """Raises InvalidArgumentError unless c is a finite number above 0."""
    if not math.isfinite(draft_cost) or draft_cost <= 0:
        raise InvalidArgumentError.of("draft_cost", f"{draft_cost} is not a finite number above 0")


def _check_alpha(name: str, alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise InvalidArgumentError.of(name, f"{alpha} is outside [0, 1]")


def _check_load(
    due: Sequence[DueCandidates[D]],
    others: OtherLoad,
    idle_share: float,
    round_trip_seconds: float,
    max_slots: int | None,
) -> None:
    if not due:
        raise InvalidArgumentError.of("due", "there is no sequence to decide on")
    if not 0 <= idle_share <= 1:
        raise InvalidArgumentError.of("idle_share", f"{idle_share} is outside [0, 1]")
    if not math.isfinite(round_trip_seconds) or round_trip_seconds < 0:
        raise InvalidArgumentError.of("round_trip_seconds", f"{round_trip_seconds} is not at least 0")
    if max_slots is not None and max_slots < 0:
        raise InvalidArgumentError.of("max_slots", f"{max_slots} is below 0")
    if min(others.tokens, others.cached_tokens, others.sequences) < 0 or not others.emitted >= 0:
        raise InvalidArgumentError.of("others", "no part may be below 0")
    if not 0 <= others.sunk_seconds < math.inf:
        raise InvalidArgumentError.of("others.sunk_seconds", f"{others.sunk_seconds} is not at least 0")
    if not 0 <= others.rows <= others.tokens:
        raise InvalidArgumentError.of("others.rows", f"{others.rows} is outside [0, {others.tokens}]")
    for index, sequence in enumerate(due):
        if not (math.isfinite(sequence.weight) and sequence.weight > 0):
            raise InvalidArgumentError.of(f"due[{index}].weight", f"{sequence.weight} is not above 0")
