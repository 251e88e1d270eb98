"""How far to speculate: one decision for each sequence that waits for the router, all of them together.

`decide` is pure. For now γ is fixed by request and operator; the load is handed in already, because whatever
decides on it must see all sequences of a step at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from specdecode.types import DrafterKind, LoadSnapshot

IMPATIENT_LEASE_TOKENS = 4
"""Tokens leased at once while the drafter can't be asked: few, so that drafting resumes soon."""


class DecisionReason(StrEnum):
    """Why γ was what it was."""

    SPECULATING = "speculating"
    REQUEST_OFF = "request_off"
    """The request wants no drafts."""
    CAPPED = "capped"
    """The request or the operator allows no drafts: γ is capped at 0."""
    NO_DRAFTER = "no_drafter"
    """Nobody offers the drafter that the request wants."""
    DRAFTER_UNAVAILABLE = "drafter_unavailable"
    """The draft service can't be reached, or could not draft for this sequence."""
    DRAFTER_LATE = "drafter_late"
    """No answer at the deadline, or none yet to what was asked in an earlier round."""
    DRAFT_EMPTY = "draft_empty"
    """The drafter had nothing to propose."""
    DRAFT_INVALID = "draft_invalid"
    """The drafter's answer could not be what was asked for."""
    CONTEXT_FULL = "context_full"
    """The drafter's context holds no draft after what is committed."""
    LAST_TOKEN = "last_token"
    """One token is left, and the target adds it itself."""
    FIRST_TOKEN = "first_token"
    """The first round on a replica, while the drafter takes in the prompt."""
    LEASE = "lease"
    """A lease given before still runs; drafting follows it."""


class DrafterState(Enum):
    """Whether a drafter can be asked for a sequence."""

    READY = auto()
    UNAVAILABLE = auto()
    LATE = auto()


@dataclass(frozen=True)
class DueSequence:
    """What a decision knows of one sequence.

    Attributes:
        speculates: whether the request may be drafted for at all.
        num_draft_tokens: cap on γ.
        drafter: who would draft, None if nobody is offered.
        drafter_state: of that drafter, for this sequence.
        drafter_room: tokens that still fit into the drafter's context, None for a drafter without one.
        num_remaining: tokens up to max_tokens.
        opening: the replica has not run this sequence yet.
        lease_left: tokens it may still emit without an order; 0 unless the lease could be renewed now.
    """

    speculates: bool
    num_draft_tokens: int
    drafter: DrafterKind | None
    drafter_state: DrafterState
    drafter_room: int | None
    num_remaining: int
    opening: bool = False
    lease_left: int = 0


@dataclass(frozen=True)
class Decision:
    """What a sequence gets: γ > 0 drafts are asked of `drafter`, else a lease is given; neither: it goes on.

    Attributes:
        drafter: who drafts, in this round or, where γ is 0, soon.
    """

    num_draft_tokens: int
    drafter: DrafterKind | None
    reason: DecisionReason
    num_lease_tokens: int = 0


def decide(due: Sequence[DueSequence], load: LoadSnapshot, lease_tokens: int) -> list[Decision]:
    """One decision for each due sequence, in order.

    Args:
        due: the sequences of one replica that wait for the router, or whose lease could be renewed.
        load: the replica's, at the end of its last step.
        lease_tokens: tokens of a full lease.
    """
    return [_decide_one(sequence, lease_tokens) for sequence in due]


def _decide_one(sequence: DueSequence, lease_tokens: int) -> Decision:
    num_draft_tokens, reason = _draft_length(sequence)
    if reason in (DecisionReason.DRAFTER_UNAVAILABLE, DecisionReason.DRAFTER_LATE):
        lease_tokens = min(lease_tokens, IMPATIENT_LEASE_TOKENS)
    if num_draft_tokens == 0:
        return Decision(0, None, reason, min(lease_tokens, sequence.num_remaining))
    if sequence.opening:
        return Decision(0, sequence.drafter, DecisionReason.FIRST_TOKEN, 1)
    if sequence.lease_left:
        return Decision(0, sequence.drafter, DecisionReason.LEASE)
    return Decision(num_draft_tokens, sequence.drafter, reason)


def _draft_length(sequence: DueSequence) -> tuple[int, DecisionReason]:
    """γ and why; never beyond the drafter's context or max_tokens, hence never beyond the target's."""
    if not sequence.speculates:
        return 0, DecisionReason.REQUEST_OFF
    if sequence.num_draft_tokens == 0:
        return 0, DecisionReason.CAPPED
    if sequence.num_remaining <= 1:
        return 0, DecisionReason.LAST_TOKEN
    if sequence.drafter_state is DrafterState.UNAVAILABLE:
        return 0, DecisionReason.DRAFTER_UNAVAILABLE
    if sequence.drafter is None:
        return 0, DecisionReason.NO_DRAFTER
    if sequence.drafter_state is DrafterState.LATE:
        return 0, DecisionReason.DRAFTER_LATE
    room = sequence.num_draft_tokens if sequence.drafter_room is None else sequence.drafter_room
    if room <= 0:
        return 0, DecisionReason.CONTEXT_FULL
    return min(sequence.num_draft_tokens, sequence.num_remaining - 1, room), DecisionReason.SPECULATING


def choose_drafter(
    asked: DrafterKind | None, default: DrafterKind | None, offered: Collection[DrafterKind]
) -> DrafterKind | None:
    """Who drafts: whom the request asks for, else the operator's default, else the model if there is one.

    None if that one is not offered.
    """
    wanted = asked or default
    if wanted is not None:
        return wanted if wanted in offered else None
    return next((kind for kind in (DrafterKind.MODEL, DrafterKind.NGRAM) if kind in offered), None)
