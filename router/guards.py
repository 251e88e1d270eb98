"""What forbids a draft whatever it would bring, each with its reason; pure.

Guards of a sequence and of each drafter that is offered to it. Health, contexts and the operator's caps bind
every request; the rolling acceptance binds those that leave γ to the router, or name a minimum themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from router.decisions import DueSequence, Offer
from router.policy_settings import PolicySettings
from router.reasons import DecisionReason, DrafterState
from specdecode.requests import SpeculationMode
from specdecode.types import DrafterKind


class Opening(NamedTuple):
    """A drafter that nothing forbids, and the γ that it may reach; at least 1."""

    offer: Offer
    limit: int


class Guarded(NamedTuple):
    """What guards leave of a sequence.

    Attributes:
        allowed: drafters that may draft.
        resting: drafters that may only be probed: too little was accepted.
        reason: why `allowed` is empty.
    """

    allowed: tuple[Opening, ...] = ()
    resting: tuple[Opening, ...] = ()
    reason: DecisionReason | None = None


def guard(sequence: DueSequence, policy: PolicySettings, cheap: Collection[DrafterKind]) -> Guarded:
    """What may be drafted for a sequence. `cheap`: drafters that cost next to nothing of a step."""
    cap = cap_of(sequence, policy)
    reason = _guard_sequence(sequence, policy, cap)
    if reason is not None:
        return Guarded(reason=reason)
    limit = min(cap, sequence.num_remaining - 1)
    allowed, resting, reasons = [], [], []
    for offer in sequence.offers:
        reason = None if offer.state is DrafterState.READY else _STATES[offer.state]
        room = limit if offer.room is None else min(limit, offer.room)
        if reason is not None or room <= 0:
            reasons.append(reason or DecisionReason.CONTEXT_FULL)
            continue
        opening = Opening(offer, room)
        if offer.acceptance is None or _accepts_enough(sequence, offer, policy, offer.drafter in cheap):
            allowed.append(opening)
        else:
            resting.append(opening)
    if resting:
        reasons.insert(0, DecisionReason.ACCEPTANCE)
    return Guarded(tuple(allowed), tuple(resting), None if allowed else reasons[0])


def cap_of(sequence: DueSequence, policy: PolicySettings) -> int:
    """Most tokens to draft: the request's or the default cap, within the operator's."""
    asked = sequence.num_draft_tokens
    return min(policy.max_draft_tokens, policy.num_draft_tokens if asked is None else asked)


def _guard_sequence(sequence: DueSequence, policy: PolicySettings, cap: int) -> DecisionReason | None:
    if sequence.mode is SpeculationMode.OFF:
        return DecisionReason.REQUEST_OFF
    if sequence.num_draft_tokens == 0:
        return DecisionReason.CAPPED
    if not policy.enabled or cap == 0:
        return DecisionReason.CAP_DRAFT_TOKENS
    if sequence.temperature > policy.max_temperature:
        return DecisionReason.TEMPERATURE
    if sequence.num_remaining <= 1:
        return DecisionReason.LAST_TOKEN
    if not sequence.drafts_reachable:
        return DecisionReason.DRAFTER_UNAVAILABLE
    if not sequence.offers:
        return DecisionReason.NO_DRAFTER
    return None


_STATES = {
    DrafterState.UNAVAILABLE: DecisionReason.DRAFTER_UNAVAILABLE,
    DrafterState.LATE: DecisionReason.DRAFTER_LATE,
    DrafterState.UNSUPPORTED: DecisionReason.UNSUPPORTED,
}


def _accepts_enough(sequence: DueSequence, offer: Offer, policy: PolicySettings, is_cheap: bool) -> bool:
    assert offer.acceptance is not None
    least = sequence.min_acceptance
    if least is None:
        if sequence.is_forced:
            return True
        least = policy.least_acceptance(offer.drafter, is_cheap)
    return offer.acceptance >= least


def free_slots(
    policy: PolicySettings,
    tokens: int,
    num_running: int,
    num_free_blocks: int,
    block_size: int,
) -> tuple[int | None, DecisionReason]:
    """Most tokens to draft in all, None without a limit, and which guard says so.

    Args:
        tokens: in flight in the next step without any draft.
        num_running: sequences that each may need a block of their own soon.
        block_size: tokens of a block; 0 if unknown.
    """
    caps: list[tuple[int, DecisionReason]] = []
    if policy.max_tokens_in_flight is not None:
        caps.append((policy.max_tokens_in_flight - tokens, DecisionReason.CAP_TOKENS_IN_FLIGHT))
    if block_size:
        # One token more for each is theirs before it is a draft's.
        free = num_free_blocks - -(-num_running // block_size)
        caps.append((free * block_size, DecisionReason.KV_PRESSURE))
    if not caps:
        return None, DecisionReason.COST
    slots, reason = min(caps, key=lambda cap: cap[0])
    return max(slots, 0), reason


def take_slots(wanted: Sequence[int], slots: int | None) -> list[int]:
    """Gives slots to those who get them without a decision, evenly, no one more than wanted."""
    if slots is None or sum(wanted) <= slots:
        return list(wanted)
    given = [0] * len(wanted)
    while slots:
        for index, count in enumerate(wanted):
            if given[index] < count and slots:
                given[index] += 1
                slots -= 1
        if given == list(wanted):
            break
    return given
