"""What a decision is made of, and what it says. Nouns only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.policy_settings import PolicySettings
from router.reasons import DecisionReason, DrafterState
from router.regret import Outlook
from specdecode.cost_tables import DraftCosts, StepCosts
from specdecode.requests import SpeculationMode, Tier
from specdecode.types import DrafterKind, LoadSnapshot


# Some hundred of these are made in each step, and what is frozen takes four times as long to make.
@dataclass(slots=True)
class Offer:
    """What a decision knows of one drafter for one sequence.

    Attributes:
        state: whether it can be asked.
        room: tokens that still fit into its context, None for a drafter without one.
        survivals: s_i as estimated, never rising; as deep as γ may be.
        acceptance: accepted / (accepted + rejected) of the last tested drafts, None if too few were.
        last_length: γ that it was decided to draft last time; 0: none.
        probe_due: whether it may be tried again though it does not seem to pay.
        num_unread: committed tokens that it has not been told of yet.
    """

    drafter: DrafterKind
    state: DrafterState = DrafterState.READY
    room: int | None = None
    survivals: tuple[float, ...] = ()
    acceptance: float | None = None
    last_length: int = 0
    probe_due: bool = False
    num_unread: int = 0


@dataclass(slots=True)
class DueSequence:
    """What a decision knows of one sequence.

    Attributes:
        offers: drafters that may draft for it, the preferred first.
        num_draft_tokens: the request's cap on γ, None if it names none.
        num_remaining: tokens up to max_tokens.
        num_tokens: committed.
        min_acceptance: the request's, None if it names none.
        opening: the replica has not run this sequence yet.
        lease_left: tokens it may still emit without an order; 0 unless the lease could be renewed now.
        drafts_reachable: whether the draft service, if one is configured, can be reached.
    """

    offers: tuple[Offer, ...]
    num_remaining: int
    mode: SpeculationMode = SpeculationMode.AUTO
    tier: Tier = Tier.INTERACTIVE
    num_draft_tokens: int | None = None
    num_tokens: int = 0
    temperature: float = 1.0
    min_acceptance: float | None = None
    opening: bool = False
    lease_left: int = 0
    drafts_reachable: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether it gets its cap whatever that costs; tier batch never costs others anything."""
        return self.mode is SpeculationMode.ON and self.tier is Tier.INTERACTIVE


@dataclass(frozen=True)
class ReplicaView:
    """What a decision knows of the replica and of the drafters.

    Attributes:
        load: the replica's, at the end of its last step.
        steps: costs of its steps, `load.cost_ratio` applied; None while none are measured.
        drafts: costs of each drafter that was measured.
        round_trip_seconds: of asking the drafts, beyond what drafting takes.
        block_size: tokens of a KV block, 0 if unknown.
        ordered_tokens: in flight by this router's own orders that still run.
        ordered_emitted: expected of those.
        shares_cores: whether drafting takes the cores that the target computes on.
        probe_seconds: that may be spent on probes now.
        looks: whether to compare with fixed γ, which takes a quarter of a millisecond.
    """

    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    policy: PolicySettings = field(default_factory=PolicySettings)
    steps: StepCosts | None = None
    drafts: Mapping[DrafterKind, DraftCosts] = field(default_factory=dict)
    round_trip_seconds: float = 0.0
    block_size: int = 0
    ordered_tokens: int = 0
    ordered_emitted: float = 0.0
    shares_cores: bool = False
    probe_seconds: float = 0.0
    looks: bool = False


@dataclass(slots=True)
class Decision:
    """What a sequence gets: γ > 0 drafts are asked of `drafter`, else a lease is given; neither: it goes on.

    Attributes:
        drafter: who drafts, in this round or, where γ is 0, soon.
        looks_up: who is asked beside the lease, to be compared with what the target emits.
        predicted_emitted: E(γ).
        predicted_seconds: of the round; 0 where costs are not known.
        price: λ, what one more token in flight would cost the replica.
        outlook: how fixed γ would have compared; None where nothing was chosen.
    """

    num_draft_tokens: int
    drafter: DrafterKind | None
    reason: DecisionReason
    num_lease_tokens: int = 0
    looks_up: DrafterKind | None = None
    predicted_emitted: float = field(default=1.0, compare=False)
    predicted_seconds: float = field(default=0.0, compare=False)
    price: float = field(default=0.0, compare=False)
    outlook: Outlook | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Plan:
    """One decision for each due sequence, in order, and what the probes among them cost."""

    decisions: list[Decision]
    probe_seconds: float = 0.0
