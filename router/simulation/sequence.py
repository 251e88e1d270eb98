"""One simulated request on its replica: whose move it is, what it was granted, what drafters did for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.decisions import Decision, DueSequence, Offer
from router.estimates import Estimates, survivals
from router.history import DrafterHistory
from router.policy import PROBE_DRAFT_TOKENS
from router.policy_settings import PolicySettings
from router.reasons import DecisionReason, DrafterState
from router.seats import Phase
from router.simulation.workload import SimulatedRequest, TextOdds
from router.validation import ResolvedRequest
from specdecode.errors import InvalidArgumentError
from specdecode.requests import SpeculationMode
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind, FinishReason, Method, SamplingParams, StepResult

_PREFERENCE = (DrafterKind.MODEL, DrafterKind.NGRAM)


@dataclass(frozen=True)
class Way:
    """One way to decode the whole workload.

    Attributes:
        name: shown.
        mode: of every request.
        num_draft_tokens: cap on γ of every request, γ itself with mode ON; None: the operator's default.
    """

    name: str
    mode: SpeculationMode
    num_draft_tokens: int | None = None

    @classmethod
    def of(cls, text: str) -> Way:
        """`off`, `auto`, or γ. Raises InvalidArgumentError."""
        if text in (SpeculationMode.OFF.value, SpeculationMode.AUTO.value):
            return cls(text, SpeculationMode(text))
        if not text.isdecimal() or not 1 <= int(text) <= MAX_DRAFT_TOKENS:
            raise InvalidArgumentError.of(
                "compare", f"{text!r} is neither off, auto, nor a γ of 1 to {MAX_DRAFT_TOKENS}"
            )
        return cls(f"γ = {int(text)}", SpeculationMode.ON, int(text))


def resolved_request(request: SimulatedRequest, way: Way) -> ResolvedRequest:
    """As the router would have it after validation: greedy, its kind is its traffic class."""
    return ResolvedRequest(
        prompt_token_ids=(),
        sampling=SamplingParams(temperature=0.0, max_tokens=request.max_tokens),
        stops=(),
        method=Method.GREEDY,
        seed=0,
        n=1,
        mode=way.mode,
        num_draft_tokens=way.num_draft_tokens,
        drafter=None,
        include_rounds=False,
        cache_salt=b"",
        traffic_class=request.kind,
    )


@dataclass(eq=False)
class SimulatedSequence:
    """One request that runs.

    Attributes:
        lacking: prompt tokens, all but the last, whose KV is not computed yet.
        lease_end: output length up to which a lease goes.
        num_asked: drafts asked for in this round.
        num_drafted: drafts there to be verified.
        late_until: when a drafter that missed its deadline has answered.
        opened: drafters that know it.
        last_step: number of the last step that it was in.
    """

    request: SimulatedRequest
    odds: TextOdds
    resolved: ResolvedRequest
    lacking: int
    num_output: int = 0
    phase: Phase = Phase.DUE
    opening: bool = True
    lease_size: int = 0
    lease_end: int = 0
    num_asked: int = 0
    num_drafted: int = 0
    drafter: DrafterKind | None = None
    reason: DecisionReason = DecisionReason.FIRST_TOKEN
    predicted_emitted: float = 0.0
    is_probe: bool = False
    late_until: float = 0.0
    last_step: int = 0
    first_token_at: float = 0.0
    ended_at: float | None = None
    opened: set[DrafterKind] = field(default_factory=set)
    histories: dict[DrafterKind, DrafterHistory] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Committed."""
        return self.request.prompt_tokens + self.num_output

    @property
    def num_remaining(self) -> int:
        """Up to max_tokens."""
        return self.request.max_tokens - self.num_output

    @property
    def lease_ahead(self) -> int:
        """Tokens that its lease allows still."""
        return max(self.lease_end - self.num_output, 0)

    @property
    def lease_runs_low(self) -> bool:
        """As `router.seats.Seat.lease_runs_low`."""
        return 2 * self.lease_ahead <= self.lease_size and self.lease_ahead < self.num_remaining

    @property
    def is_ready(self) -> bool:
        """Whether the target has an order for it."""
        return self.phase is Phase.ORDERED and (self.num_drafted > 0 or self.lease_ahead > 0)

    def lease(self, num_tokens: int, reason: DecisionReason, asked: DrafterKind | None = None) -> None:
        """Grants tokens without drafts."""
        self.lease_size, self.lease_end = num_tokens, self.num_output + num_tokens
        self.phase, self.reason, self.drafter = Phase.ORDERED, reason, asked
        self.num_asked = self.num_drafted = 0

    def decided(self, decision: Decision) -> None:
        """As `router.seats.Seat.decided`."""
        if decision.reason is DecisionReason.LEASE:
            return
        self.predicted_emitted = decision.predicted_emitted
        self.is_probe = decision.reason is DecisionReason.PROBE
        for kind, history in self.histories.items():
            is_own = kind is decision.drafter and not self.is_probe
            if is_own and decision.num_draft_tokens:
                history.drafted(self.num_output)
            if not (is_own and decision.reason is DecisionReason.FIRST_TOKEN):
                history.last_length = decision.num_draft_tokens if is_own else 0

    @property
    def says_nothing(self) -> bool:
        """Whether the drafter that is asked has nothing to propose here."""
        return self.drafter is DrafterKind.NGRAM and self.odds.silent[self.num_output]

    def learn_of_nothing(self) -> None:
        """It had nothing."""
        history = self._history
        if history is not None:
            history.said_nothing()
            if self.is_probe:
                history.probed(False, self.num_output)

    def look_up(self, kind: DrafterKind) -> None:
        """Learns at once what looking up beside the lease will have shown."""
        history = self.histories.get(kind)
        if history is None:
            return
        if self.odds.silent[self.num_output]:
            history.said_nothing()
            history.probed(False, self.num_output)
        else:
            matched = min(PROBE_DRAFT_TOKENS, self.odds.runs[kind][self.num_output])
            history.foreseen(matched, PROBE_DRAFT_TOKENS, self.num_output)

    def run_window(self) -> tuple[int, int]:
        """Verifies what is drafted, or emits one token of the lease: accepted drafts, emitted tokens."""
        accepted = 0
        if self.drafter is not None and self.num_drafted:
            accepted = min(self.num_drafted, self.odds.runs[self.drafter][self.num_output])
        self.num_output += accepted + 1
        if self.num_drafted:
            self._learn(accepted)
        self.num_asked, self.num_drafted, self.predicted_emitted = 0, 0, 0.0
        self.opening = False
        return accepted, accepted + 1

    @property
    def _history(self) -> DrafterHistory | None:
        return None if self.drafter is None else self.histories.get(self.drafter)

    def _learn(self, accepted: int) -> None:
        history = self._history
        if history is None:
            return
        drafted = self.num_drafted
        result = StepResult(
            sequence=self.request.index,
            committed_length=self.num_tokens,
            num_drafted=drafted,
            num_accepted=accepted,
            tested=tuple(float(position <= accepted) for position in range(drafted)),
            passed=tuple(float(position < accepted) for position in range(drafted)),
            finish_reason=None if self.num_remaining else FinishReason.LENGTH,
        )
        history.verified(result, self.num_asked)
        if self.is_probe:
            history.probed(accepted == drafted, self.num_output)


def describe(
    due: Sequence[SimulatedSequence],
    offered: Sequence[DrafterKind],
    policy: PolicySettings,
    estimates: Estimates,
    now: float,
) -> list[DueSequence]:
    """What a decision needs to know, as `router.seats.describe` says it."""
    offers: list[list[Offer]] = [[] for _ in due]
    for kind in _PREFERENCE:
        if kind in offered and policy.drafter in (None, kind):
            _add_offers(offers, due, kind, policy, estimates, now)
    return [
        DueSequence(
            offers=tuple(own),
            num_remaining=sequence.num_remaining,
            mode=sequence.resolved.mode,
            num_draft_tokens=sequence.resolved.num_draft_tokens,
            num_tokens=sequence.num_tokens,
            temperature=0.0,
            opening=sequence.opening,
            lease_left=0 if sequence.phase is Phase.DUE else sequence.lease_ahead,
        )
        for sequence, own in zip(due, offers, strict=True)
    ]


def _add_offers(
    offers: list[list[Offer]],
    due: Sequence[SimulatedSequence],
    kind: DrafterKind,
    policy: PolicySettings,
    estimates: Estimates,
    now: float,
) -> None:
    asked = [
        (index, sequence, _history_of(sequence, kind, estimates))
        for index, sequence in enumerate(due)
        if sequence.resolved.mode is not SpeculationMode.OFF
    ]
    if not asked:
        return
    rows = survivals(
        [history.own_class(sequence.num_output) for _, sequence, history in asked],
        [history.frailty for _, _, history in asked],
        max(_depth(sequence, policy) for _, sequence, _ in asked),
    ).tolist()
    for (index, sequence, history), row in zip(asked, rows, strict=True):
        offers[index].append(
            Offer(
                drafter=kind,
                state=DrafterState.LATE if now < sequence.late_until else DrafterState.READY,
                survivals=tuple(row),
                acceptance=history.acceptance,
                last_length=history.last_length,
                probe_due=history.is_probe_due(sequence.num_output),
                num_unread=0 if kind in sequence.opened else sequence.num_tokens,
            )
        )


def _history_of(sequence: SimulatedSequence, kind: DrafterKind, estimates: Estimates) -> DrafterHistory:
    found = sequence.histories.get(kind)
    if found is None:
        found = sequence.histories[kind] = DrafterHistory(kind, "", sequence.resolved, estimates)
    return found


def _depth(sequence: SimulatedSequence, policy: PolicySettings) -> int:
    asked = sequence.resolved.num_draft_tokens
    return min(policy.max_draft_tokens, policy.num_draft_tokens if asked is None else asked)
