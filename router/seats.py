"""One choice on one replica: whose move it is, what its round was decided to be, what drafters did so far.

`describe` says of all that are due what the decision needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from router.decisions import Decision, DueSequence, Offer
from router.drafts import DraftDesk
from router.estimates import Estimates, survivals
from router.history import DrafterHistory
from router.policy_settings import PolicySettings
from router.reasons import DecisionReason
from router.regret import Outlook
from router.request import Choice, Round
from specdecode.requests import SpeculationMode
from specdecode.types import DrafterKind, StepResult

_PREFERENCE = (DrafterKind.MODEL, DrafterKind.SUFFIX, DrafterKind.NGRAM)
"""Whom a request gets that wants drafts whatever they cost, and names nobody."""


class Phase(Enum):
    """Who is to move."""

    ORDERED = auto()
    """The target: it has an order or a lease."""
    DUE = auto()
    """The router."""
    DRAFTING = auto()
    """The draft service, until its deadline."""


@dataclass(frozen=True)
class Foresight:
    """What a drafter proposed beside a lease, after `committed_length` tokens."""

    drafter: DrafterKind
    committed_length: int
    token_ids: tuple[int, ...]


@dataclass(eq=False)
class Seat:
    """One choice on this replica.

    Attributes:
        lease_end: committed length up to which leases were given, also those on their way.
        lease_left: of what the target knows.
        num_asked: drafts asked for in this round.
        drafter: who was asked for them.
        predicted_emitted: when this round was decided; 0 where it was not (a lease that goes on), as the next
            two.
        foresight: what was looked up beside a lease and is not compared yet.
    """

    choice: Choice
    sequence: int
    estimates: Estimates
    phase: Phase = Phase.DUE
    opening: bool = True
    lease_size: int = 0
    lease_end: int = 0
    lease_left: int = 0
    num_asked: int = 0
    drafter: DrafterKind | None = None
    reason: DecisionReason = DecisionReason.FIRST_TOKEN
    round_began: float = 0.0
    draft_seconds: float = 0.0
    predicted_emitted: float = 0.0
    predicted_seconds: float = 0.0
    price: float = 0.0
    outlook: Outlook | None = None
    is_probe: bool = False
    histories: dict[DrafterKind, DrafterHistory] = field(default_factory=dict)
    foresight: Foresight | None = None

    @property
    def may_be_ordered(self) -> bool:
        """Whether an order makes sense: it is due, or a lease that runs could be renewed."""
        return self.phase is Phase.DUE or self.lease_left > 0

    @property
    def lease_runs_low(self) -> bool:
        """Whether half of the lease is used, and what is left is less than the choice may still emit."""
        left = self.lease_ahead
        return 2 * left <= self.lease_size and left < self.choice.num_remaining

    @property
    def lease_ahead(self) -> int:
        """Tokens that leases allow it still, also those on their way; below 1: none."""
        return self.lease_end - len(self.choice.tokens)

    @property
    def is_renewed(self) -> bool:
        """Whether a lease is on its way to the target that the result does not know yet."""
        return self.lease_ahead > 0

    def history(self, kind: DrafterKind, model: str) -> DrafterHistory:
        """What a drafter did for it."""
        found = self.histories.get(kind)
        if found is None:
            found = DrafterHistory(kind, model, self.choice.resolved, self.estimates)
            self.histories[kind] = found
        return found

    def decided(self, decision: Decision) -> None:
        """Notes what was decided."""
        if decision.reason is DecisionReason.LEASE:
            return
        self.predicted_emitted = decision.predicted_emitted
        self.predicted_seconds, self.price = decision.predicted_seconds, decision.price
        self.outlook = decision.outlook
        self.is_probe = decision.reason is DecisionReason.PROBE
        for kind, history in self.histories.items():
            is_own = kind is decision.drafter and not self.is_probe
            if is_own and decision.num_draft_tokens:
                history.drafted(self.choice.num_output)
            if not (is_own and decision.reason is DecisionReason.FIRST_TOKEN):
                history.last_length = decision.num_draft_tokens if is_own else 0

    def round(self, tokens_in_flight: int, num_parameters: int) -> Round:
        """What is known of the round that a step has ended."""
        return Round(
            drafter=self.drafter,
            reason=self.reason,
            began=self.round_began,
            draft_seconds=self.draft_seconds,
            predicted_emitted=self.predicted_emitted,
            predicted_seconds=self.predicted_seconds,
            price=self.price,
            tokens_in_flight=tokens_in_flight,
            num_parameters=num_parameters,
            outlook=self.outlook,
        )

    def trace_round(self, replica: str) -> int:
        """Drafts are asked for; the id of the round's span, 0 if it has none."""
        trace = self.choice.trace
        if trace is None or self.drafter is None:
            return 0
        return trace.began_round(self.round_began, self.num_asked, self.drafter, self.reason, replica)

    def trace_lease(self, num_tokens: int, reason: DecisionReason, replica: str) -> int:
        """A lease is about to be given; the id of its span, or of that of the round whose drafts failed."""
        trace = self.choice.trace
        if trace is None:
            return 0
        if self.phase is Phase.DRAFTING:
            return trace.span_id
        if self.lease_left:
            return trace.renewed_lease(num_tokens)
        return trace.began_lease(self.round_began, num_tokens, reason, replica)

    @property
    def span_id(self) -> int:
        """Of the round or lease that runs; 0 if it has none."""
        return 0 if self.choice.trace is None else self.choice.trace.span_id

    def begin_round(self, now: float) -> None:
        """A result has been taken."""
        self.round_began, self.draft_seconds, self.num_asked = now, 0.0, 0
        self.predicted_emitted = self.predicted_seconds = self.price = 0.0
        self.outlook = None

    def learn(self, result: StepResult) -> None:
        """Takes what came of drafts."""
        history = None if self.drafter is None else self.histories.get(self.drafter)
        if history is None or not result.num_drafted:
            return
        history.verified(result, self.num_asked)
        if self.is_probe:
            history.probed(result.num_accepted == result.num_drafted, self.choice.num_output)

    def learn_of_nothing(self) -> None:
        """The drafter had nothing to propose."""
        history = None if self.drafter is None else self.histories.get(self.drafter)
        if history is not None:
            history.said_nothing()
            if self.is_probe:
                history.probed(False, self.choice.num_output)

    def looked_up(self, found: Foresight) -> None:
        """Takes what a drafter proposed beside a lease; nothing if it was asked elsewhere."""
        history = self.histories.get(found.drafter)
        if history is None:
            return
        if found.token_ids:
            self.foresight = found
            self.compare_foresight()
        else:
            history.said_nothing()
            history.probed(False, self.choice.num_output)

    def compare_foresight(self) -> None:
        """Once enough is emitted, learns how far it is what was looked up."""
        found = self.foresight
        if found is None:
            return
        emitted = self.choice.tokens[found.committed_length :]
        matched = 0
        for token, looked_up in zip(emitted, found.token_ids, strict=False):
            if token != looked_up:
                break
            matched += 1
        is_settled = matched < min(len(emitted), len(found.token_ids)) or matched == len(found.token_ids)
        if is_settled:
            self.foresight = None
            self.histories[found.drafter].foreseen(matched, len(found.token_ids), self.choice.num_output)


def describe(seats: Sequence[Seat], drafts: DraftDesk, policy: PolicySettings) -> list[DueSequence]:
    """What a decision needs to know of seats that are due."""
    offers = _offers(seats, drafts, policy)
    return [
        DueSequence(
            offers=tuple(offers[index]),
            num_remaining=seat.choice.num_remaining,
            mode=seat.choice.resolved.mode,
            tier=seat.choice.resolved.tier,
            num_draft_tokens=seat.choice.resolved.num_draft_tokens,
            num_tokens=len(seat.choice.tokens),
            temperature=seat.choice.resolved.sampling.temperature,
            min_acceptance=seat.choice.resolved.min_acceptance,
            opening=seat.opening,
            lease_left=seat.lease_left,
            drafts_reachable=drafts.is_reachable,
        )
        for index, seat in enumerate(seats)
    ]


def _offers(seats: Sequence[Seat], drafts: DraftDesk, policy: PolicySettings) -> list[list[Offer]]:
    """Of each seat: drafters that may draft for it, with their estimates."""
    offers: list[list[Offer]] = [[] for _ in seats]
    model = "" if drafts.info is None else drafts.info.name
    for kind in _PREFERENCE:
        if kind not in drafts.offered:
            continue
        name = model if kind is DrafterKind.MODEL else ""
        asked = [
            (index, seat, seat.history(kind, name))
            for index, seat in enumerate(seats)
            if _may_use(seat, kind, policy, drafts.offered)
        ]
        if not asked:
            continue
        classes = [history.own_class(seat.choice.num_output) for _, seat, history in asked]
        frailties = [history.frailty for _, _, history in asked]
        rows = survivals(classes, frailties, max(_depth(seat, policy) for _, seat, _ in asked)).tolist()
        for (index, seat, history), row in zip(asked, rows, strict=True):
            offers[index].append(_offer(seat, kind, history, tuple(row), drafts))
    return offers


def _offer(
    seat: Seat, kind: DrafterKind, history: DrafterHistory, row: tuple[float, ...], drafts: DraftDesk
) -> Offer:
    choice = seat.choice
    return Offer(
        drafter=kind,
        state=drafts.state(choice, kind),
        room=drafts.room(choice, kind),
        survivals=row,
        acceptance=history.acceptance,
        last_length=history.last_length,
        probe_due=history.is_probe_due(choice.num_output),
        num_unread=drafts.num_unread(choice, kind),
    )


def _may_use(seat: Seat, kind: DrafterKind, policy: PolicySettings, offered: Collection[DrafterKind]) -> bool:
    """Whom the request asks for, else the operator's, else any; nobody where the request wants none.

    N-gram look-ups that nobody asked for are left to the suffix drafter, which finds what they find.
    """
    resolved = seat.choice.resolved
    if resolved.mode is SpeculationMode.OFF:
        return False
    wanted = resolved.drafter or policy.drafter
    if wanted is None:
        return kind is not DrafterKind.NGRAM or DrafterKind.SUFFIX not in offered
    return wanted is kind


def _depth(seat: Seat, policy: PolicySettings) -> int:
    asked = seat.choice.resolved.num_draft_tokens
    return min(policy.max_draft_tokens, policy.num_draft_tokens if asked is None else asked)
