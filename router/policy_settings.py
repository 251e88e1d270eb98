"""What the operator sets of the decision. Replaced as a whole, also while requests run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError
from specdecode.types import MAX_DRAFT_TOKENS, DrafterKind


@dataclass(frozen=True)
class PolicySettings:
    """Caps, thresholds and weights; what a request asks for never goes beyond the caps.

    Attributes:
        enabled: whether anything is drafted at all.
        num_draft_tokens: cap on γ of requests that name none.
        max_draft_tokens: cap on γ of all requests; 0: nothing is drafted.
        max_tokens_in_flight: of one step, beyond which nothing is drafted; None: no cap.
        max_temperature: of requests that may be drafted for.
        min_acceptance: accepted / (accepted + rejected) of the last tested drafts, below which a drafter is
            not used; of requests that name none and drafters that `min_acceptances` does not name.
        min_acceptances: (drafter, the same for this one).
        cheap_draft_share: a drafter that is not named and costs less than this share of a step has no
            minimum.
        batch_weight: of a token of tier batch, where an interactive one counts 1.
        hysteresis: how much more than now another γ must bring, relative.
        probe_share: of the step time that may be spent on probes.
        drafter: of requests that name none; None: all that are offered compete.
        draft_deadline_seconds: how long a round waits for drafts.
        lease_tokens: most tokens that a target may emit without asking.
        lease_seconds: after which the router has control back where it may want to draft.
    """

    enabled: bool = True
    num_draft_tokens: int = 8
    max_draft_tokens: int = MAX_DRAFT_TOKENS
    max_tokens_in_flight: int | None = None
    max_temperature: float = 2.0
    min_acceptance: float = 0.4
    min_acceptances: tuple[tuple[DrafterKind, float], ...] = ()
    cheap_draft_share: float = 0.02
    batch_weight: float = 0.5
    hysteresis: float = 0.02
    probe_share: float = 0.015
    drafter: DrafterKind | None = None
    draft_deadline_seconds: float = 1.0
    lease_tokens: int = 16
    lease_seconds: float = 0.25

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_draft_tokens", 0, MAX_DRAFT_TOKENS),
            ("max_draft_tokens", 0, MAX_DRAFT_TOKENS),
            ("max_temperature", 0.0, 2.0),
            ("min_acceptance", 0.0, 1.0),
            ("cheap_draft_share", 0.0, 1.0),
            ("hysteresis", 0.0, 1.0),
            ("probe_share", 0.0, 0.2),
            ("draft_deadline_seconds", 0.001, 60.0),
            ("lease_tokens", 1, 1024),
            ("lease_seconds", 0.001, 60.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidArgumentError.of(name, f"{value:g} is outside {low:g} to {high:g}")
        for drafter, least in self.min_acceptances:
            if not 0 <= least <= 1:
                message = f"{drafter.value}: {least:g} is outside 0 to 1"
                raise InvalidArgumentError.of("min_acceptances", message)
        if not 0 < self.batch_weight <= 1:
            raise InvalidArgumentError.of("batch_weight", f"{self.batch_weight:g} is outside (0, 1]")
        if self.max_tokens_in_flight is not None and self.max_tokens_in_flight < 1:
            raise InvalidArgumentError.of("max_tokens_in_flight", f"{self.max_tokens_in_flight} is below 1")

    def least_acceptance(self, drafter: DrafterKind, is_cheap: bool) -> float:
        """Of requests that name none."""
        default = 0.0 if is_cheap else self.min_acceptance
        return dict(self.min_acceptances).get(drafter, default)

    @classmethod
    def of(cls, settings: RouterSettings) -> Self:
        """What the router starts with."""
        return cls(
            num_draft_tokens=settings.num_draft_tokens,
            max_draft_tokens=settings.max_draft_tokens,
            max_tokens_in_flight=settings.max_tokens_in_flight,
            max_temperature=settings.max_temperature,
            min_acceptance=settings.min_acceptance,
            drafter=None if settings.drafter == "auto" else DrafterKind(settings.drafter),
            draft_deadline_seconds=settings.draft_deadline_seconds,
            lease_tokens=settings.lease_tokens,
        )
