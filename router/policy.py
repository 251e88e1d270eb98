"""How far to speculate: one decision for each sequence that waits for the router, all of them together.

`decide` is pure: sequences with their estimates, the replica's load and costs in, γ, drafter or lease out.
γ is decided before anything is drafted, so that no choice depends on a drafted token (under `rejection` and
`block` that would change the distribution of what is emitted).

    guards (router.guards) → those that want drafts whatever they cost → the joint choice
    (specdecode.cost.choose) → probes, within their budget → leases for all others
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from router.decisions import Decision, DueSequence, Offer, Plan, ReplicaView
from router.guards import Guarded, Opening, free_slots, guard, take_slots
from router.policy_settings import PolicySettings
from router.reasons import DecisionReason, DrafterState
from router.regret import Outlook, Prospect, compare
from specdecode.cost import Candidate, Choice, DueCandidates, OtherLoad, StepCosts, choose
from specdecode.requests import Tier
from specdecode.types import DrafterKind

__all__ = [
    "Decision",
    "DecisionReason",
    "DrafterState",
    "DueSequence",
    "Offer",
    "Plan",
    "PolicySettings",
    "ReplicaView",
    "decide",
    "scaled_steps",
]

IMPATIENT_LEASE_TOKENS = 4
"""Tokens leased at once while the drafter can't be asked: few, so that drafting resumes soon."""
PROBE_DRAFT_TOKENS = 2
_MAX_PROBES = 2
_CHEAP_LENGTH = 4
_LASTING = frozenset(
    {
        DecisionReason.REQUEST_OFF,
        DecisionReason.CAPPED,
        DecisionReason.UNSUPPORTED,
        DecisionReason.NO_DRAFTER,
        DecisionReason.LAST_TOKEN,
        DecisionReason.CONTEXT_FULL,
    }
)
"""Reasons that no load and no acceptance will change."""
_PROBED = frozenset({DecisionReason.COST, DecisionReason.TIER_BATCH, DecisionReason.ACCEPTANCE})


@dataclass
class _Draft:
    """What is settled of one sequence: γ = 0 until somebody drafts."""

    guarded: Guarded
    reason: DecisionReason
    length: int = 0
    offer: Offer | None = None
    is_chosen: bool = False
    looks_up: DrafterKind | None = None


def decide(due: Sequence[DueSequence], view: ReplicaView) -> Plan:
    """One decision for each due sequence.

    Args:
        due: the sequences of one replica that wait for the router, or whose lease could be renewed.
        view: the replica.
    """
    return _Deciding(due, view).plan() if due else Plan([])


class _Deciding:
    """One call of `decide`."""

    def __init__(self, due: Sequence[DueSequence], view: ReplicaView) -> None:
        self._due = due
        self._view = view
        self._policy = view.policy
        self._steps = view.steps
        self._load = view.load
        # On the same cores the target does not go on while somebody drafts, whatever it has to run.
        self._idle_share = 1.0 if view.shares_cores else min(max(view.load.idle_share, 0.0), 1.0)
        self._choice: Choice[DrafterKind] | None = None
        self._outlook: Outlook | None = None
        self._probe_seconds = 0.0
        self._drafts: list[_Draft] = []
        self._slots: int | None = None
        self._slots_reason = DecisionReason.COST

    def plan(self) -> Plan:
        """Decides."""
        cheap = self._cheap_drafters()
        for sequence in self._due:
            guarded = guard(sequence, self._policy, cheap)
            self._drafts.append(_Draft(guarded, guarded.reason or DecisionReason.COST))
        self._slots, self._slots_reason = self._free_slots()
        self._force()
        self._choose()
        self._probe()
        decisions = [self._decision(*pair) for pair in zip(self._due, self._drafts, strict=True)]
        return Plan(decisions, self._probe_seconds)

    # What the step costs

    @cached_property
    def _others(self) -> OtherLoad:
        """What the next step carries besides the due sequences, of which some may be leased still."""
        leased = sum(sequence.lease_left > 0 for sequence in self._due)
        rows = max(self._load.num_ordered_tokens - leased, self._view.ordered_tokens)
        emitted = max(self._load.expected_emitted - leased, self._view.ordered_emitted)
        return OtherLoad(
            tokens=rows + self._load.num_prefill_tokens,
            rows=rows,
            emitted=emitted,
            cached_tokens=self._load.num_cached_tokens or sum(s.num_tokens for s in self._due),
            sequences=max(self._load.num_running - len(self._due), 0),
            sunk_seconds=self._sunk_seconds(rows + len(self._due)),
        )

    def _sunk_seconds(self, rows: int) -> float:
        """What the step's prefill takes, which has to be computed whatever is drafted."""
        prefill = self._load.num_prefill_tokens
        if self._steps is None or not prefill:
            return 0.0
        return max(self._steps.step(rows + prefill, rows) - self._steps.step(rows), 0.0)

    @cached_property
    def _plain_seconds(self) -> float:
        """That a token takes of the replica's time without drafts."""
        if self._steps is None:
            return 0.0
        count = self._others.tokens + len(self._due)
        return (self._steps.step(count) - self._others.sunk_seconds) / max(
            self._others.emitted + len(self._due), 1.0
        )

    def _cheap_drafters(self) -> tuple[DrafterKind, ...]:
        if self._steps is None:
            return ()
        count = len(self._due)
        most = self._policy.cheap_draft_share * self._steps.step(count)
        lengths = [_CHEAP_LENGTH] * count
        return tuple(kind for kind, costs in self._view.drafts.items() if costs.round(lengths) < most)

    def _free_slots(self) -> tuple[int | None, DecisionReason]:
        running = max(self._load.num_running, len(self._due))
        block_size = self._view.block_size if self._load.num_blocks else 0
        tokens = self._others.tokens + len(self._due)
        return free_slots(self._policy, tokens, running, self._load.num_free_blocks, block_size)

    # Who drafts

    def _force(self) -> None:
        """Those that want drafts whatever they cost come first, evenly if there is not enough room."""
        pairs = zip(self._due, self._drafts, strict=True)
        forced = [draft for sequence, draft in pairs if sequence.is_forced and draft.guarded.allowed]
        openings = [draft.guarded.allowed[0] for draft in forced]
        given = take_slots([opening.limit for opening in openings], self._slots)
        for draft, opening, length in zip(forced, openings, given, strict=True):
            draft.length, draft.offer = length, opening.offer
            draft.reason = DecisionReason.SPECULATING if length else self._slots_reason
        if self._slots is not None:
            self._slots -= sum(given)

    def _choose(self) -> None:
        """γ and drafter of all that leave it to the router, jointly."""
        chosen = []
        for sequence, draft in zip(self._due, self._drafts, strict=True):
            if draft.guarded.allowed and not sequence.is_forced:
                drafters = {opening.offer.drafter for opening in draft.guarded.allowed}
                known = self._steps is not None and not drafters.isdisjoint(self._view.drafts)
                draft.reason = DecisionReason.COST if known else DecisionReason.UNCALIBRATED
                candidates = self._candidates(sequence, draft.guarded.allowed)
                if candidates:
                    weight = self._weight(sequence)
                    chosen.append((draft, DueCandidates(candidates, weight, sequence.num_tokens)))
        if not chosen or self._steps is None:
            return
        others = self._others_and_plain(len(chosen))
        choice = self._choice = choose(
            [candidates for _, candidates in chosen],
            self._view.drafts,
            self._steps,
            others,
            idle_share=self._idle_share,
            round_trip_seconds=self._view.round_trip_seconds,
            max_slots=self._slots,
        )
        is_full = self._slots is not None and sum(choice.num_draft_tokens) >= self._slots
        picked = zip(chosen, choice.num_draft_tokens, choice.drafters, strict=True)
        for (draft, due), length, drafter in picked:
            draft.length, draft.is_chosen = length, True
            draft.offer = next((o.offer for o in draft.guarded.allowed if o.offer.drafter is drafter), None)
            draft.reason = self._reason(due, choice, is_full) if not length else DecisionReason.SPECULATING
        if not self._view.looks:
            return
        self._outlook = compare(
            [_prospect(due, draft) for draft, due in chosen],
            self._view.drafts,
            self._steps,
            others,
            idle_share=self._idle_share,
            round_trip_seconds=self._view.round_trip_seconds,
        )

    def _candidates(
        self, sequence: DueSequence, allowed: Sequence[Opening]
    ) -> tuple[Candidate[DrafterKind], ...]:
        if self._steps is None:
            return ()
        # A tuple is searched by identity, a mapping by hash, which is slow for members of an enum.
        drafts, hysteresis = tuple(self._view.drafts), self._policy.hysteresis
        return tuple(
            Candidate(opening.offer.drafter, _sticky(opening, hysteresis))
            for opening in allowed
            if opening.offer.drafter in drafts and opening.offer.survivals
            if self._is_worth_reading(sequence, opening)
        )

    def _is_worth_reading(self, sequence: DueSequence, opening: Opening) -> bool:
        """Whether drafts for all that is left could save what it takes to let the drafter read the text."""
        seconds = self._reading_seconds(opening.offer)
        if not seconds:
            return True
        gain = sum(opening.offer.survivals[: opening.limit])
        return sequence.num_remaining * gain / (1 + gain) * self._plain_seconds > seconds

    def _reading_seconds(self, offer: Offer) -> float:
        """That the target waits for a drafter which reads what it does not know of a text; look-ups need
        none.
        """
        costs = self._view.drafts[offer.drafter]
        unread = 0 if costs.single_pass else offer.num_unread
        return self._idle_share * costs.token_seconds * unread

    def _reads_ahead(self, drafter: DrafterKind) -> bool:
        """Whether a drafter may take in a text while the target computes: not on the same cores, where each
        would keep the other from them.
        """
        costs = self._view.drafts.get(drafter)
        return not self._view.shares_cores or (costs is not None and costs.single_pass)

    def _weight(self, sequence: DueSequence) -> float:
        return self._policy.batch_weight if sequence.tier is Tier.BATCH else 1.0

    def _others_and_plain(self, num_chosen: int) -> OtherLoad:
        """The other load with the due sequences that are settled already."""
        others = self._others
        settled = len(self._due) - num_chosen
        drafted = sum(draft.length for draft in self._drafts)
        gain = sum(_gain(draft) for draft in self._drafts if draft.length)
        return replace(
            others,
            tokens=others.tokens + settled + drafted,
            rows=others.rows + settled + drafted,
            sequences=others.sequences + settled,
            emitted=others.emitted + settled + gain,
        )

    def _reason(
        self, due: DueCandidates[DrafterKind], choice: Choice[DrafterKind], is_full: bool
    ) -> DecisionReason:
        """Why nothing is drafted for a sequence that could have been drafted for."""
        if is_full:
            return self._slots_reason
        best = max(candidate.survivals[0] for candidate in due.candidates)
        if due.weight < 1 and best > choice.price:
            return DecisionReason.TIER_BATCH
        return DecisionReason.COST

    # Who is probed

    def _probe(self) -> None:
        """Short drafts where drafting does not seem to pay, within the budget and where they could pay."""
        spent = 0.0
        wanted = [
            (sequence, draft, opening)
            for sequence, draft in zip(self._due, self._drafts, strict=True)
            if (opening := _probe_of(sequence, draft)) is not None
        ]
        for _, draft, opening in wanted:
            if self._costs_nothing(draft, opening):
                draft.looks_up = opening.offer.drafter
        costly = [each for each in wanted if each[1].looks_up is None]
        for sequence, draft, opening in costly[:_MAX_PROBES]:
            length = min(PROBE_DRAFT_TOKENS, opening.limit)
            seconds = self._seconds_of_probe(sequence, draft, opening, length)
            if seconds is None or (not sequence.is_forced and spent + seconds > self._view.probe_seconds):
                continue
            spent += seconds
            if not sequence.lease_left:
                self._probe_seconds += seconds
            draft.length, draft.offer, draft.reason = length, opening.offer, DecisionReason.PROBE

    def _costs_nothing(self, draft: _Draft, opening: Opening) -> bool:
        """Whether a drafter can be tried beside a lease: look-ups, of which what is emitted tells as much as
        a verification would.
        """
        costs = self._view.drafts.get(opening.offer.drafter)
        return draft.length == 0 and costs is not None and costs.single_pass

    def _seconds_of_probe(
        self, sequence: DueSequence, draft: _Draft, opening: Opening, length: int
    ) -> float | None:
        """What a probe costs; None if it would not pay even if all of it were accepted, or has no room."""
        offer = opening.offer
        costs, steps = self._view.drafts.get(offer.drafter), self._steps
        if costs is None or steps is None:
            return 0.0 if sequence.is_forced else None
        chosen = 0 if self._choice is None else sum(self._choice.num_draft_tokens)
        if self._slots is not None and chosen + length > self._slots:
            return None
        tokens = self._others.tokens + len(self._due) + self._drafted
        counts = [0, length, opening.limit]
        times = steps.curve([tokens + count for count in counts]) - self._others.sunk_seconds
        waited = [costs.round([count], [sequence.num_tokens]) for count in counts]
        rounds = times + self._idle_share * (np.array(waited) + self._drafting_seconds)
        rounds[1:] += self._idle_share * self._view.round_trip_seconds
        emitted = self._others.emitted + len(self._due) + self._drafted_gain
        weight, given_up = self._weight(sequence), _gain(draft) if draft.length else 0.0
        at_best = emitted + weight * (np.array(counts) - given_up * (np.array(counts) > 0))
        if not sequence.is_forced and (at_best / rounds)[1:].max() <= emitted / rounds[0]:
            return None
        seconds = rounds[1] - rounds[0] + weight * given_up * rounds[0] / emitted
        return float(seconds + self._reading_seconds(offer))

    @cached_property
    def _drafted(self) -> int:
        """Drafted tokens without probes."""
        return sum(draft.length for draft in self._drafts)

    @cached_property
    def _drafted_gain(self) -> float:
        return sum(_gain(draft) for draft in self._drafts if draft.length)

    @property
    def _drafting_seconds(self) -> float:
        return 0.0 if self._choice is None else self._choice.draft_seconds

    # What follows

    def _decision(self, sequence: DueSequence, draft: _Draft) -> Decision:
        if draft.length == 0 or draft.offer is None:
            lease = min(self._lease_tokens(draft.reason), sequence.num_remaining)
            decision = self._told(draft, 0, None, draft.reason, lease)
            decision.looks_up = draft.looks_up
            return decision
        drafter = draft.offer.drafter
        ahead = drafter if self._reads_ahead(drafter) else None
        if sequence.opening:
            return self._told(draft, 0, ahead, DecisionReason.FIRST_TOKEN, 1)
        if sequence.lease_left:
            return Decision(0, ahead, DecisionReason.LEASE)
        return self._told(draft, draft.length, drafter, draft.reason)

    def _told(
        self,
        draft: _Draft,
        length: int,
        drafter: DrafterKind | None,
        reason: DecisionReason,
        lease: int = 0,
    ) -> Decision:
        """A decision with what is expected of it."""
        emitted = 1 + _gain(draft) if length else 1.0
        outlook = self._outlook if draft.is_chosen and reason is draft.reason else None
        return Decision(length, drafter, reason, lease, None, emitted, self._seconds, self._price, outlook)

    @cached_property
    def _seconds(self) -> float:
        if self._choice is not None:
            return self._choice.seconds + self._others.sunk_seconds
        return 0.0 if self._steps is None else self._steps.step(self._others.tokens + len(self._due))

    @cached_property
    def _price(self) -> float:
        return 0.0 if self._choice is None else self._choice.price

    def _lease_tokens(self, reason: DecisionReason) -> int:
        """As many as last until the router should have control back."""
        longest = self._policy.lease_tokens
        if reason in _LASTING:
            return longest
        if reason in (DecisionReason.DRAFTER_UNAVAILABLE, DecisionReason.DRAFTER_LATE):
            longest = min(longest, IMPATIENT_LEASE_TOKENS)
        step_seconds = self._load.step_seconds or self._seconds
        if step_seconds <= 0:
            return longest
        return max(int(min(self._policy.lease_seconds / step_seconds, longest)), 1)


def _prospect(due: DueCandidates[DrafterKind], draft: _Draft) -> Prospect:
    """Of the drafter that was chosen, else of the one that would bring most."""
    drafters = [candidate.drafter for candidate in due.candidates]
    if draft.offer is not None:
        drafters = [draft.offer.drafter]
    known = [opening for opening in draft.guarded.allowed if opening.offer.drafter in drafters]
    best = known[0] if len(known) == 1 else max(known, key=lambda opening: sum(opening.offer.survivals))
    survivals = best.offer.survivals[: best.limit]
    return Prospect(best.offer.drafter, survivals, draft.length, due.num_cached_tokens)


def scaled_steps(steps: StepCosts, ratio: float) -> StepCosts:
    """The same with every step taking `ratio` times as long, without the measurements."""
    return replace(
        steps,
        base_seconds=steps.base_seconds * ratio,
        token_seconds=steps.token_seconds * ratio,
        cached_token_seconds=steps.cached_token_seconds * ratio,
        attention_seconds=steps.attention_seconds * ratio,
        overhead_seconds=steps.overhead_seconds * ratio,
        sequence_seconds=steps.sequence_seconds * ratio,
        seconds=tuple(second * ratio for second in steps.seconds),
        samples=(),
    )


def _sticky(opening: Opening, hysteresis: float) -> tuple[float, ...]:
    """Survivals with those of the positions that were drafted last time raised: γ stays unless another one
    brings so much more.
    """
    survivals, last = opening.offer.survivals[: opening.limit], opening.offer.last_length
    if not last:
        return survivals
    raised = tuple(min(survival * (1 + hysteresis), 1.0) for survival in survivals[:last])
    return raised + survivals[last:]


def _probe_of(sequence: DueSequence, draft: _Draft) -> Opening | None:
    """A drafter that rests and may be tried again."""
    settled = draft.length and sequence.is_forced
    if sequence.opening or settled or not (draft.reason in _PROBED or draft.length):
        return None
    resting = itertools.chain(draft.guarded.resting, draft.guarded.allowed)
    return next((o for o in resting if o.offer.probe_due and o.offer is not draft.offer), None)


def _gain(draft: _Draft) -> float:
    """Tokens expected beyond the one that is emitted anyway."""
    return 0.0 if draft.offer is None else sum(draft.offer.survivals[: draft.length])
