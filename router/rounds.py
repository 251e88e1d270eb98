"""The loop of one target replica. It tells the whole product:

    take what is there → hand tokens to their requests → decide for all that are due, on one load snapshot
    → ask the drafts (one frame) → send opens, verifies, leases and closes to the target (one frame)

It never waits for anybody but its own inbox: not for clients (each choice has a buffer of its own and gets no
orders while that is full), not for drafts (they have a deadline), not for connections (links write by
themselves).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.drafts import DraftAnswer, DraftDesk
from router.estimates import Estimates
from router.inbox import Inbox
from router.policy import (
    PROBE_DRAFT_TOKENS,
    Decision,
    DecisionReason,
    PolicySettings,
    ReplicaView,
    decide,
    scaled_steps,
)
from router.prefixes import PrefixIndex
from router.replicas import Listener, TargetLink
from router.request import Choice
from router.seats import Foresight, Phase, Seat, describe
from specdecode.cost_tables import StepCosts
from specdecode.errors import Reason
from specdecode.types import (
    DecodeFrame,
    DrafterKind,
    Lease,
    LoadSnapshot,
    OpenSequence,
    StepFrame,
    StepResult,
    Verify,
)

logger = logging.getLogger(__name__)

_LOOK_EVERY = 8
"""One decision in so many is compared with fixed γ."""
_MAX_PROBE_STEPS = 4.0
"""Steps' worth of time that is saved up for probes at most."""
PARK_SECONDS = 2.0
# What a replica says when it is the replica that can't go on, not the request.
_REPLICA_FAULTS = (Reason.DRAINING, Reason.REPLICA_LOST)


@dataclass(frozen=True)
class Placed:
    """A choice is to run here."""

    choice: Choice


@dataclass(frozen=True)
class Withdrawn:
    """A choice's client is gone."""

    choice: Choice


@dataclass(frozen=True)
class HasRoom:
    """A choice's client has caught up."""

    choice: Choice


@dataclass(frozen=True)
class Stepped:
    """The target's step frame, of the stream with this epoch."""

    epoch: int
    frame: StepFrame


@dataclass(frozen=True)
class Drafted:
    """Answers of the draft service."""

    answers: list[DraftAnswer]


@dataclass(frozen=True)
class LookedUp:
    """Answers of the draft service that nobody waits for."""

    answers: list[DraftAnswer]


@dataclass(frozen=True)
class TargetLost:
    """The target's stream broke."""


@dataclass(frozen=True)
class Retired:
    """Nothing more is to run here than what does."""


Event = Placed | Withdrawn | HasRoom | Stepped | Drafted | LookedUp | TargetLost | Retired


@dataclass
class _Orders:
    """The frame being put together."""

    opens: list[OpenSequence] = field(default_factory=list)
    verifies: list[Verify] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)

    def frame(self) -> DecodeFrame:
        return DecodeFrame(tuple(self.opens), tuple(self.verifies), tuple(self.leases), tuple(self.closes))


class ReplicaLoop:
    """The rounds of all choices on one target replica.

    Args:
        drafts: shared by all replicas' loops.
        policy: what the operator set.
        estimates: of acceptance, shared by all replicas' loops.
        place_elsewhere: takes choices that this replica can't go on with.
        park_seconds: how long a choice whose client lags keeps its KV.

    Attributes:
        link: set once before `run`.
        prefixes: what the replica's prefix cache should hold.
        coming: prompt tokens of choices that were placed here and have no result yet.
        policy: read at each decision; may be replaced at any time.
    """

    link: TargetLink

    def __init__(
        self,
        drafts: DraftDesk,
        policy: PolicySettings,
        estimates: Estimates,
        place_elsewhere: Callable[[Choice], None],
        park_seconds: float = PARK_SECONDS,
    ) -> None:
        self.policy = policy
        self._park_seconds = park_seconds
        self._paused: dict[Seat, float] = {}
        self._parked: set[Choice] = set()
        self._drafts = drafts
        self._estimates = estimates
        self._place_elsewhere = place_elsewhere
        self._inbox: Inbox[Event] = Inbox()
        self._seats: dict[Choice, Seat] = {}
        self._by_sequence: dict[int, Seat] = {}
        self._num_opened = 0
        self._due: dict[Seat, None] = {}
        self._deadlines: dict[Seat, float] = {}
        self._orders = _Orders()
        self._num_decided = 0
        self._probe_seconds = 0.0
        self._last_step = 0
        self._scaled: tuple[StepCosts, float, StepCosts] | None = None
        self._now = 0.0
        self._is_retired = False
        self.prefixes = PrefixIndex()
        self.coming: dict[Choice, int] = {}

    def listener(self, on_up: Callable[[], None], on_down: Callable[[], None]) -> Listener[StepFrame]:
        """Whom this replica's link is to tell."""

        def lose() -> None:
            self.put(TargetLost())
            on_down()

        return Listener(on_up, lambda frame: self.put(Stepped(self.link.epoch, frame)), lose)

    def put(self, event: Event) -> None:
        """Tells the loop what happened; never waits."""
        self._inbox.put(event)

    @property
    def num_choices(self) -> int:
        """Choices that run here."""
        return len(self._seats)

    async def run(self) -> None:
        """Until cancelled, or retired and empty."""
        while self._seats or self._parked or not self._is_retired:
            events = await self._inbox.take(self._first_deadline())
            # The event loop's own clock may tick in milliseconds; its base is the same.
            self._now = time.monotonic()
            for event in events:
                self._apply(event)
            self._end_late_drafts()
            self._decide()
            self._park_idle()
            self._drafts.flush()
            self._send_orders()

    def _apply(self, event: Event) -> None:
        match event:
            case Stepped(epoch, frame):
                if epoch == self.link.epoch:
                    self._save_for_probes(frame)
                    for result in frame.results:
                        self._take_result(result, frame.load)
            case Drafted(answers):
                for answer in answers:
                    self._take_draft(answer)
            case LookedUp(answers):
                for answer in answers:
                    self._take_foresight(answer)
            case Placed(choice):
                self._seat(choice)
            case HasRoom(choice):
                self._reconsider(choice)
            case Withdrawn(choice):
                self._withdraw(choice)
            case TargetLost():
                self._lose_target()
            case Retired():
                self._is_retired = True

    # What happened

    def _save_for_probes(self, frame: StepFrame) -> None:
        """A share of the time of the steps since the last frame; a replica that is new counts from anew."""
        if not frame.step:
            return  # news between steps
        num_steps = max(frame.step - self._last_step, 1) if self._last_step else 1
        self._last_step = frame.step
        seconds = frame.load.step_seconds
        saved = self._probe_seconds + self.policy.probe_share * seconds * num_steps
        self._probe_seconds = min(saved, _MAX_PROBE_STEPS * seconds)

    def _take_result(self, result: StepResult, load: LoadSnapshot) -> None:
        """Hands a step's tokens to their request."""
        seat = self._by_sequence.get(result.sequence)
        if seat is None or seat.choice.ended:
            return  # closed, or about to be
        choice = seat.choice
        self.coming.pop(choice, None)
        if result.error is None:
            num_parameters = 0 if self.link.info is None else self.link.info.num_parameters
            choice.take(result, seat.round(load.tokens_in_flight, num_parameters), self._now)
            seat.learn(result)
            seat.compare_foresight()
        elif result.error.reason in _REPLICA_FAULTS:
            self.link.draining |= result.error.reason is Reason.DRAINING
            self._move(seat, result.error.reason, counts=not seat.opening)
            return
        else:
            choice.fail(result.error)
        seat.begin_round(self._now)
        seat.opening, seat.lease_left = False, result.lease_left
        if choice.ended:
            self._unseat(seat, close=not result.ended)
            self._drafts.close(choice)
        elif seat.lease_left:
            if seat.lease_runs_low:
                self._due[seat] = None
        elif not seat.is_renewed:
            # Else the lease on its way goes first: drafts after these tokens would be overtaken by it.
            seat.phase = Phase.DUE
            self._due[seat] = None

    def _take_draft(self, answer: DraftAnswer) -> None:
        """Sends drafts to be verified; without any the round goes on as a lease of one token."""
        seat, draft = self._seats.get(answer.choice), answer.draft
        if seat is None or seat.phase is not Phase.DRAFTING or answer.drafter is not seat.drafter:
            return
        del self._deadlines[seat]
        seat.draft_seconds = draft.seconds
        if answer.failure is None:
            self._drafts.recovered(seat.choice, answer.drafter)
            self._orders.verifies.append(
                Verify(seat.sequence, draft.committed_length, draft.token_ids, draft.q, seat.span_id)
            )
            # The target forgets its lease over drafts.
            seat.phase, seat.lease_end = Phase.ORDERED, 0
        else:
            if answer.failure is DecisionReason.DRAFT_EMPTY:
                seat.learn_of_nothing()
            self._lease(seat, 1, answer.failure, answer.drafter)

    def _take_foresight(self, answer: DraftAnswer) -> None:
        seat, draft = self._seats.get(answer.choice), answer.draft
        if seat is not None and answer.failure in (None, DecisionReason.DRAFT_EMPTY):
            self._drafts.recovered(seat.choice, answer.drafter)
            seat.looked_up(Foresight(answer.drafter, draft.committed_length, draft.token_ids))

    def _seat(self, choice: Choice) -> None:
        """Opens a choice on the replica, prompt and what was emitted elsewhere."""
        if choice.ended or not self.link.up:
            self.coming.pop(choice, None)
        if choice.ended:
            return
        if not self.link.up:
            self._place_elsewhere(choice)
            return
        self._num_opened += 1
        seat = Seat(choice, self._num_opened, self._estimates, round_began=self._now)
        self._seats[choice] = self._by_sequence[seat.sequence] = seat
        self._orders.opens.append(_open_order(seat, self._drafts.is_trusted))
        self._due[seat] = None

    def _reconsider(self, choice: Choice) -> None:
        if choice in self._parked:
            self._parked.remove(choice)
            self._place_elsewhere(choice)
            return
        seat = self._seats.get(choice)
        if seat is not None and seat.may_be_ordered:
            self._due[seat] = None

    def _withdraw(self, choice: Choice) -> None:
        self._parked.discard(choice)
        seat = self._seats.get(choice)
        if seat is not None:
            self._unseat(seat, close=True)
        self._drafts.close(choice)

    def _lose_target(self) -> None:
        """The replica has forgotten everything: all go on elsewhere, or here once it is back."""
        self.prefixes.clear()
        self._orders = _Orders()
        for seat in list(self._seats.values()):
            self._move(seat, Reason.REPLICA_LOST, counts=True)

    def _move(self, seat: Seat, reason: Reason, counts: bool) -> None:
        self._unseat(seat, close=False)
        if counts:
            seat.choice.moved(self.link.address, reason)
        self._place_elsewhere(seat.choice)

    def _unseat(self, seat: Seat, close: bool) -> None:
        del self._seats[seat.choice], self._by_sequence[seat.sequence]
        self._due.pop(seat, None)
        self._deadlines.pop(seat, None)
        self._paused.pop(seat, None)
        self.coming.pop(seat.choice, None)
        if close:
            self._orders.closes.append(seat.sequence)

    # What to do

    def _decide(self) -> None:
        """Decides for all that are due at once; whose client lags is due again when it has caught up."""
        due = [seat for seat in self._due if not self._is_paused(seat)]
        self._due.clear()
        if not due:
            return
        self._num_decided += 1
        self._estimates.settle()
        plan = decide(describe(due, self._drafts, self.policy), self._view(due))
        self._probe_seconds -= plan.probe_seconds
        for seat, decision in zip(due, plan.decisions, strict=True):
            self._carry_out(seat, decision)

    def _view(self, due: Sequence[Seat]) -> ReplicaView:
        running = [seat for seat in self._seats.values() if seat.phase is not Phase.DUE]
        leased = sum(seat.lease_left > 0 for seat in due)
        return ReplicaView(
            load=self.link.load,
            policy=self.policy,
            steps=self._steps(),
            drafts=self._drafts.costs,
            round_trip_seconds=self._drafts.clock.round_trip_seconds,
            block_size=0 if self.link.info is None else self.link.info.block_size,
            ordered_tokens=sum(seat.num_asked + 1 for seat in running) - leased,
            ordered_emitted=sum(seat.predicted_emitted or 1.0 for seat in running) - leased,
            shares_cores=self._shares_cores,
            probe_seconds=self._probe_seconds,
            looks=self._num_decided % _LOOK_EVERY == 0,
        )

    @property
    def _shares_cores(self) -> bool:
        target, draft = self.link.info, self._drafts.info
        return target is not None and draft is not None and target.cores == draft.cores != ""

    def _steps(self) -> StepCosts | None:
        """Costs as steps take now."""
        costs, ratio = self.link.costs, round(self.link.load.cost_ratio, 2)
        if costs is None or ratio <= 0:
            return costs
        if self._scaled is None or self._scaled[0] is not costs or self._scaled[1] != ratio:
            self._scaled = costs, ratio, scaled_steps(costs, ratio)
        return self._scaled[2]

    def _is_paused(self, seat: Seat) -> bool:
        choice = seat.choice
        if choice.is_full:
            choice.on_room = lambda: self.put(HasRoom(choice))
            self._paused.setdefault(seat, self._now + self._park_seconds)
        else:
            self._paused.pop(seat, None)
        return choice.is_full

    def _park_idle(self) -> None:
        """Takes KV from those whose clients have lagged for long; they go on when these have caught up."""
        for seat, deadline in list(self._paused.items()):
            # A lease that still runs is let run out.
            if deadline <= self._now and seat.phase is Phase.DUE and seat.choice.is_full:
                self._unseat(seat, close=True)
                self._drafts.close(seat.choice)
                self._parked.add(seat.choice)
                seat.choice.parked()

    def _carry_out(self, seat: Seat, decision: Decision) -> None:
        seat.decided(decision)
        if decision.num_lease_tokens > max(seat.lease_ahead, 0):
            # A lease that runs is never shortened: its end may be reached before the order is.
            self._lease(seat, decision.num_lease_tokens, decision.reason)
        if decision.looks_up is not None:
            self._drafts.ask(seat.choice, decision.looks_up, PROBE_DRAFT_TOKENS, self._take_looks)
        if decision.drafter is None:
            return
        if decision.num_draft_tokens == 0:
            self._drafts.open(seat.choice, decision.drafter)
            return
        seat.phase, seat.drafter, seat.reason = Phase.DRAFTING, decision.drafter, decision.reason
        seat.num_asked = decision.num_draft_tokens
        self._deadlines[seat] = self._now + self.policy.draft_deadline_seconds
        span_id = seat.trace_round(self.link.address)
        self._drafts.ask(
            seat.choice, decision.drafter, decision.num_draft_tokens, self._take_answers, span_id
        )

    def _take_answers(self, answers: list[DraftAnswer]) -> None:
        self.put(Drafted(answers))

    def _take_looks(self, answers: list[DraftAnswer]) -> None:
        self.put(LookedUp(answers))

    def _lease(
        self, seat: Seat, num_tokens: int, reason: DecisionReason, asked: DrafterKind | None = None
    ) -> None:
        """`asked`: who was asked for drafts in this round, in vain."""
        span_id = seat.trace_lease(num_tokens, reason, self.link.address)
        self._orders.leases.append(Lease(seat.sequence, len(seat.choice.tokens), num_tokens, span_id))
        seat.lease_size, seat.num_asked = num_tokens, 0
        seat.lease_end = len(seat.choice.tokens) + num_tokens
        seat.phase, seat.drafter, seat.reason = Phase.ORDERED, asked, reason

    def _first_deadline(self) -> float | None:
        parking = (deadline for seat, deadline in self._paused.items() if seat.phase is Phase.DUE)
        return min((*self._deadlines.values(), *parking), default=None)

    def _end_late_drafts(self) -> None:
        for seat, deadline in list(self._deadlines.items()):
            if deadline <= self._now and seat.drafter is not None:
                del self._deadlines[seat]
                self._drafts.late(seat.choice, seat.drafter)
                self._lease(seat, 1, DecisionReason.DRAFTER_LATE, seat.drafter)

    def _send_orders(self) -> None:
        orders, self._orders = self._orders, _Orders()
        self.link.send(orders.frame())


def _open_order(seat: Seat, trust_draft: bool) -> OpenSequence:
    choice, resolved = seat.choice, seat.choice.resolved
    return OpenSequence(
        sequence=seat.sequence,
        token_ids=tuple(choice.tokens),
        num_prompt_tokens=len(resolved.prompt_token_ids),
        sampling=resolved.sampling,
        method=resolved.method,
        seed=resolved.seed,
        choice_index=choice.index,
        deadline=choice.request.deadline,
        cache_salt=resolved.cache_salt,
        traceparent=choice.request.traceparent,
        trust_draft=trust_draft,
    )
