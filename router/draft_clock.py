"""What drafting really takes, against what the drafters' calibrated costs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdecode.cost_tables import DraftCosts
from specdecode.types import DrafterKind

_SMOOTHING = 0.1
# A drafter that is this far off has been measured on another machine, or something else stood still.
_LEAST_RATIO, _LARGEST_RATIO = 0.2, 5.0


@dataclass(frozen=True)
class Timing:
    """One answered ask; seconds.

    Attributes:
        drafting: as the draft service says, from taking the ask to its answer.
        elapsed: from asking to the answer.
    """

    num_asked: int
    drafting: float
    elapsed: float


class DraftClock:
    """Smoothed corrections of the costs: by drafter, and of the way to the service and back.

    Attributes:
        round_trip_seconds: of asking, beyond drafting; 0 before anything was asked.
    """

    def __init__(self) -> None:
        self.round_trip_seconds = 0.0
        self._ratios: dict[DrafterKind, float] = {}
        self._scaled: dict[DrafterKind, tuple[DraftCosts, float, DraftCosts]] = {}

    def answered(self, drafter: DrafterKind, timings: Sequence[Timing], costs: DraftCosts | None) -> None:
        """Takes asks that were answered together."""
        drafting = max(timing.drafting for timing in timings)
        travel = max(max(timing.elapsed for timing in timings) - drafting, 0.0)
        known = self.round_trip_seconds
        self.round_trip_seconds = travel if known == 0 else known + _SMOOTHING * (travel - known)
        if costs is None or drafting <= 0:
            return
        ratio = drafting / costs.round([timing.num_asked for timing in timings])
        ratio = min(max(ratio, _LEAST_RATIO), _LARGEST_RATIO)
        before = self._ratios.get(drafter, 1.0)
        self._ratios[drafter] = before + _SMOOTHING * (ratio - before)

    def corrected(self, costs: Mapping[DrafterKind, DraftCosts]) -> dict[DrafterKind, DraftCosts]:
        """Costs as drafting takes now."""
        return {drafter: self._corrected(drafter, entry) for drafter, entry in costs.items()}

    def _corrected(self, drafter: DrafterKind, costs: DraftCosts) -> DraftCosts:
        ratio = round(self._ratios.get(drafter, 1.0), 2)
        kept = self._scaled.get(drafter)
        if kept is None or kept[0] is not costs or kept[1] != ratio:
            kept = self._scaled[drafter] = costs, ratio, _scaled(costs, ratio)
        return kept[2]


def _scaled(costs: DraftCosts, ratio: float) -> DraftCosts:
    return replace(
        costs,
        base_seconds=costs.base_seconds * ratio,
        pass_seconds=costs.pass_seconds * ratio,
        sequence_seconds=costs.sequence_seconds * ratio,
        token_seconds=costs.token_seconds * ratio,
        cached_token_seconds=costs.cached_token_seconds * ratio,
        samples=(),
    )
