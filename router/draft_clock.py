"""What drafting really takes, against what the drafters' calibrated costs say."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from specdecode.cost_tables import DraftCosts
from specdecode.types import DrafterKind

_NUM_KEPT = 15
# Who is not asked is not measured: what was bad luck must not keep the router from asking for ever.
_KEPT_SECONDS = 10.0
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


class _Recent:
    """The median of the last values, while they are fresh."""

    def __init__(self, otherwise: float) -> None:
        self._otherwise = otherwise
        self._values: deque[tuple[float, float]] = deque(maxlen=_NUM_KEPT)

    def add(self, value: float, now: float) -> None:
        self._values.append((now, value))

    def median(self, now: float) -> float:
        while self._values and self._values[0][0] < now - _KEPT_SECONDS:
            self._values.popleft()
        return median(value for _, value in self._values) if self._values else self._otherwise


class DraftClock:
    """Corrections of the costs by what the last asks took: by drafter, and the way to the service and back.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._round_trip = _Recent(otherwise=0.0)
        self._ratios = {drafter: _Recent(otherwise=1.0) for drafter in DrafterKind}
        self._scaled: dict[DrafterKind, tuple[DraftCosts, float, DraftCosts]] = {}

    @property
    def round_trip_seconds(self) -> float:
        """Of asking, beyond drafting; 0 if nothing was asked lately."""
        return self._round_trip.median(self._clock())

    def answered(self, drafter: DrafterKind, timings: Sequence[Timing], costs: DraftCosts | None) -> None:
        """Takes asks that were answered together."""
        drafting = max(timing.drafting for timing in timings)
        now = self._clock()
        self._round_trip.add(max(max(timing.elapsed for timing in timings) - drafting, 0.0), now)
        if costs is None or drafting <= 0:
            return
        ratio = drafting / costs.round([timing.num_asked for timing in timings])
        self._ratios[drafter].add(min(max(ratio, _LEAST_RATIO), _LARGEST_RATIO), now)

    def corrected(self, costs: Mapping[DrafterKind, DraftCosts]) -> dict[DrafterKind, DraftCosts]:
        """Costs as drafting takes now."""
        return {drafter: self._corrected(drafter, entry) for drafter, entry in costs.items()}

    def _corrected(self, drafter: DrafterKind, costs: DraftCosts) -> DraftCosts:
        ratio = round(self._ratios[drafter].median(self._clock()), 2)
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
