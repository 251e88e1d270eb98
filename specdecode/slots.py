"""The joint choice of draft lengths on arrays: exact, and fast enough for every step. See
`specdecode.cost.choose`.

A slot is one drafted token of one sequence. N sequences, K the largest γ, S drafters, M the most slots, C the
combinations of caps: a cap limits how deep one drafter drafts in this round, which fixes the part of its
time that does not depend on who drafts. Values are emitted tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdecode.cost_tables import DraftCosts, Floats, Ints

NEVER = -1e18
"""Stands for minus infinity where differences are taken: the survival of what nobody offers."""
_POSSIBLE = -1e15
"""Above it are the slopes of slots that exist."""
_TOLERANCE = 1e-11
"""Relative: a gain below this is rounding."""


class Assignment(NamedTuple):
    """Who drafts how far, and what comes of it.

    Attributes:
        lengths: [N] γ_i.
        drafters: [N] index of the drafter, where γ_i > 0.
        emitted: weighted, others included.
        step_seconds: T.
        draft_seconds: of the whole round of drafting.
        seconds: T + φ · draft_seconds.
        price: of a slot at which this is (nearly) the best assignment.
    """

    lengths: Ints
    drafters: Ints
    emitted: float
    step_seconds: float
    draft_seconds: float
    seconds: float
    price: float = 0.0

    @property
    def rate(self) -> float:
        """Emitted a second."""
        return self.emitted / self.seconds


class SlotProblem:
    """One instance: the best ratio of emitted tokens to seconds over all assignments.

    For given caps and a rate ρ, emitted tokens minus ρ·seconds is a sum over sequences minus a function of
    the number of slots. So: sort the slots by what they bring less their own draft time, and walk down them
    against the table of step times (`search`). ρ starts at the rate without drafts and rises to that of
    each better assignment until nothing beats it (Dinkelbach); caps that can't beat it by a bound
    (Lagrange) are never searched.

    Args:
        survival: [S, N, K] s_i, NEVER where nothing is offered.
        weights: [N]
        cached_tokens: [N] that a drafter attends to.
        costs: of each of the S drafters.
        idle_share: φ.
        round_trip_seconds: paid once if anything is drafted.
        certain: weighted tokens emitted without any draft.
        steps: [M + 2] seconds of the step with 0.. slots.
    """

    def __init__(
        self,
        survival: Floats,
        weights: Floats,
        cached_tokens: Floats,
        costs: Sequence[DraftCosts],
        idle_share: float,
        round_trip_seconds: float,
        certain: float,
        steps: Floats,
    ) -> None:
        num_drafters, count, depth = survival.shape
        offers = survival > _POSSIBLE
        self._costs, self._idle_share, self._round_trip_seconds = costs, idle_share, round_trip_seconds
        self._certain, self._steps = certain, steps
        self._tolerance = _TOLERANCE * certain
        self._depths = np.arange(depth + 1, dtype=np.float64)
        self._slots = np.arange(len(steps) - 1, dtype=np.float64)
        self._mean_slot_seconds = float(steps[-2] - steps[0]) / max(len(steps) - 2, 1)
        # Beyond the token that is emitted anyway, and seconds of drafting, for each γ: [S, N, K + 1].
        self._gains = np.zeros((num_drafters, count, depth + 1))
        np.cumsum(np.where(offers, survival * weights[:, None], NEVER), axis=2, out=self._gains[:, :, 1:])
        self._parts = np.zeros_like(self._gains)
        for index, cost in enumerate(costs):
            self._parts[index] = cost.sequence_parts(depth, cached_tokens)
        self._caps = _combinations(offers.any(axis=1).sum(axis=1), costs)
        self._fixed = self._once_seconds(self._caps)

    def solve(self) -> Assignment:
        """The assignment of the largest rate; of equals the one with fewer slots."""
        nothing = np.zeros(self._gains.shape[1], dtype=np.int64)
        best = self._assignment(nothing, nothing)
        price = best.rate * self._mean_slot_seconds
        caps = np.arange(len(self._caps))
        while True:
            # The value under given caps only falls as the rate rises: what can't beat this rate never will.
            bounds = self._bounds(caps, best.rate, price)
            is_open = bounds > self._tolerance
            caps, bounds = caps[is_open], bounds[is_open]
            if not caps.size:
                return best
            index = int(bounds.argmax())
            found = self._search(int(caps[index]), best.rate)
            if found is not None and found.rate > best.rate * (1 + _TOLERANCE):
                best, price = found, found.price
            else:
                caps = np.delete(caps, index)

    def _values(self, rate: float) -> Floats:
        return self._gains - (rate * self._idle_share) * self._parts

    def _once_seconds(self, depths: Ints) -> Floats:
        """[..., S] deepest draft of each drafter -> [...] seconds the round pays once."""
        seconds = np.where(depths.any(axis=-1), self._round_trip_seconds, 0.0)
        for index, cost in enumerate(self._costs):
            seconds = seconds + cost.depth_seconds(depths[..., index])
        return seconds

    def _bounds(self, caps: Ints, rate: float, price: float) -> Floats:
        """An upper bound of emitted − rate·seconds under each of these caps [C], over all assignments -> [C].

        At any price of a slot, an assignment is worth at most what each sequence would take at that price,
        plus the most that n slots sold at it earn against the table.
        """
        priced = np.maximum.accumulate(self._values(rate) - price * self._depths, axis=2)
        taken = np.zeros((len(caps), priced.shape[1]))
        for index in range(len(self._costs)):
            np.maximum(taken, priced[index].T[self._caps[caps, index]], out=taken)
        sold = float((price * self._slots - rate * self._steps[:-1]).max())
        paid = rate * self._idle_share * self._fixed[caps]
        return np.asarray(taken.sum(axis=1) + (self._certain + sold) - paid)

    def _search(self, index: int, rate: float) -> Assignment | None:
        """An assignment under these caps with emitted − rate·seconds above 0, or None if there is none."""
        beyond = np.maximum(self._depths - self._caps[index][:, None, None], 0)
        allowed = self._values(rate) + NEVER * beyond
        value = allowed.max(axis=0)  # [N, K + 1] of the better drafter
        slopes = majorant_slopes(value)
        order = np.argsort(-slopes, axis=None, kind="stable")
        order = order[: min(len(self._steps) - 2, int((slopes > _POSSIBLE).sum()))]
        sorted_slopes = slopes.ravel()[order]
        seconds = self._steps[: len(order) + 1] + self._idle_share * self._fixed[index]
        rest = self._certain - rate * seconds
        upper = rest + np.concatenate(([0.0], np.cumsum(sorted_slopes)))
        # Where a sequence's value is not concave, n slots may end between two points of its majorant.
        missing = np.cumsum(slopes, axis=1) + value[:, :1] - value[:, 1:]
        lower = upper - np.concatenate(([0.0], missing.ravel()[order]))
        count = int((lower / seconds).argmax())
        if lower[count] > self._tolerance:
            lengths = np.bincount(order[:count] // slopes.shape[1], minlength=len(value))
        else:
            count = int(upper.argmax())
            slope = float(sorted_slopes[count - 1]) if count else 0.0
            exact = best_lengths(value, slope, rest, upper > self._tolerance, self._tolerance)
            if exact is None:
                return None
            lengths, count = exact, int(exact.sum())
        found = self._assignment(lengths, allowed[:, np.arange(len(value)), lengths].argmax(axis=0))
        last = float(sorted_slopes[count - 1]) if count else np.inf
        following = float(sorted_slopes[count]) if count < len(order) else 0.0
        return found._replace(price=min(max(found.rate * self._mean_slot_seconds, following), last))

    def _assignment(self, lengths: Ints, drafters: Ints) -> Assignment:
        count = int(lengths.sum())
        emitted, draft_seconds = self._certain, 0.0
        if count:
            picked = (drafters, np.arange(len(lengths)), lengths)
            deepest = [lengths[drafters == index].max(initial=0) for index in range(len(self._costs))]
            emitted += float(self._gains[picked].sum())
            draft_seconds = float(self._once_seconds(np.array(deepest)) + self._parts[picked].sum())
        step_seconds = float(self._steps[count])
        seconds = step_seconds + self._idle_share * draft_seconds
        return Assignment(lengths, drafters, emitted, step_seconds, draft_seconds, seconds)


def _combinations(deepest: Ints, costs: Sequence[DraftCosts]) -> Ints:
    """[C, S] every combination of caps; where depth costs no pass, only none and the deepest matter."""
    levels = [
        range(depth + 1) if cost.pass_seconds and not cost.single_pass else (0, depth)
        for depth, cost in zip(deepest.tolist(), costs, strict=True)
    ]
    return np.array(list(itertools.product(*levels)), dtype=np.int64)


def majorant_slopes(value: Floats) -> Floats:
    """Slopes of each row's least concave majorant, [N, K + 1] -> [N, K], never rising along a row."""
    slopes = np.diff(value, axis=1)
    bent = np.flatnonzero((slopes[:, 1:] > slopes[:, :-1]).any(axis=1))
    if not bent.size:
        return slopes
    bends = value[bent]
    inverse_run, no_maximum, no_minimum = _runs(value.shape[1])
    # [rows, a, b] slopes of the chords from a to b. Between k − 1 and k the majorant has the least, over
    # starts a < k, of the steepest slope to an end b ≥ k.
    chords = (bends[:, None, 1:] - bends[:, :-1, None]) * inverse_run + no_maximum
    steepest = np.maximum.accumulate(chords[:, :, ::-1], axis=2)[:, :, ::-1] + no_minimum
    slopes[bent] = np.minimum.accumulate(steepest.min(axis=1), axis=1)
    return slopes


@functools.cache
def _runs(size: int) -> tuple[Floats, Floats, Floats]:
    """[K, K] 1 / (b − a) for a = 0.. and b = 1.., and what keeps b ≤ a out of a maximum and of a minimum."""
    run = np.arange(1, size)[None, :] - np.arange(size - 1)[:, None]
    shut = run <= 0
    return 1 / np.where(shut, 1, run), np.where(shut, -np.inf, 0.0), np.where(shut, np.inf, 0.0)


def best_lengths(
    value: Floats, slope: float, rest: Floats, region: npt.NDArray[np.bool_], threshold: float
) -> Ints | None:
    """The lengths [N] that maximise Σ value[i, γ_i] + rest[Σ γ_i], or None if that is not above the
    threshold.

    With a slot's price at `slope`, a length that loses more than all the slack there is can't be part of a
    better assignment. That settles most sequences; dynamic programming over the others is short.

    Args:
        value: [N, K + 1]
        slope: price of a slot near the best number of slots; any price is right, a good one is fast.
        rest: [M + 1] by number of slots.
        region: [M + 1] numbers of slots at which the threshold could be beaten.
        threshold: to be beaten.
    """
    counts = np.flatnonzero(region)
    if not counts.size:
        return None
    priced = value - slope * np.arange(value.shape[1])
    best = priced.max(axis=1)
    slack = max(0.0, float(best.sum() + (slope * counts + rest[counts]).max() - threshold))
    kept = best[:, None] - priced <= slack
    is_settled = kept.sum(axis=1) == 1
    lengths: Ints = priced.argmax(axis=1)
    start = int(lengths[is_settled].sum())
    rest = rest[start:]
    if not rest.size:
        return None
    unsettled = np.flatnonzero(~is_settled)
    table = np.array([float(value[is_settled, lengths[is_settled]].sum())])
    picks = []
    for index in unsettled.tolist():
        table, pick = _with_sequence(table, value[index].tolist(), np.flatnonzero(kept[index]).tolist())
        picks.append(pick)
    total = table[: len(rest)] + rest[: len(table)]
    count = int(total.argmax())
    if total[count] <= threshold:
        return None
    for index, pick in zip(unsettled[::-1].tolist(), picks[::-1], strict=True):
        lengths[index] = pick[count]
        count -= int(pick[count])
    return lengths


def _with_sequence(table: Floats, value: list[float], options: list[int]) -> tuple[Floats, Ints]:
    """Best value by number of slots with one sequence more, and the length it takes there.

    Args:
        table: [m] before.
        value: [K + 1] of the sequence.
        options: lengths it may take, rising.

    Returns:
        Both of [m + its longest].
    """
    size = len(table)
    extended = np.full(size + options[-1], NEVER)
    pick = np.zeros(size + options[-1], dtype=np.int64)
    for length in options:
        reached = table + value[length]
        better = reached > extended[length : length + size]
        np.copyto(extended[length : length + size], reached, where=better)
        np.copyto(pick[length : length + size], length, where=better)
    return extended, pick
