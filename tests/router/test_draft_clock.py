from __future__ import annotations

import pytest

from router.draft_clock import DraftClock, Timing
from specdecode.cost_tables import DraftCosts
from specdecode.types import DrafterKind

MODEL, NGRAM = DrafterKind.MODEL, DrafterKind.NGRAM
COSTS = DraftCosts(base_seconds=0.001, pass_seconds=0.002, sequence_seconds=0.0005, token_seconds=0.0001)


class Time:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def answered(clock: DraftClock, slowness: float, travel: float = 0.003, batch: int = 4) -> None:
    drafting = slowness * COSTS.round([3] * batch)
    clock.answered(MODEL, [Timing(3, drafting, drafting + travel)] * batch, COSTS)


def test_costs_follow_what_drafting_takes() -> None:
    clock = DraftClock(Time())
    assert clock.corrected({MODEL: COSTS})[MODEL].round([5]) == pytest.approx(COSTS.round([5]))
    for _ in range(3):
        answered(clock, 2.0)
    corrected = clock.corrected({MODEL: COSTS, NGRAM: COSTS})
    for lengths in ([1], [3, 8], [5] * 64):
        assert corrected[MODEL].round(lengths) == pytest.approx(2 * COSTS.round(lengths))
        assert corrected[NGRAM].round(lengths) == pytest.approx(COSTS.round(lengths))
    assert clock.round_trip_seconds == pytest.approx(0.003)


def test_one_hiccup_changes_nothing() -> None:
    clock = DraftClock(Time())
    for _ in range(10):
        answered(clock, 1.0)
    answered(clock, 5.0, travel=3.0)
    assert clock.corrected({MODEL: COSTS})[MODEL].round([4]) == pytest.approx(COSTS.round([4]))
    assert clock.round_trip_seconds == pytest.approx(0.003)


def test_who_was_slow_and_is_not_asked_any_more_gets_another_chance() -> None:
    time = Time()
    clock = DraftClock(time)
    for _ in range(10):
        answered(clock, 5.0, travel=3.0)
    assert clock.round_trip_seconds == pytest.approx(3.0)
    time.now += 11
    assert clock.round_trip_seconds == 0
    assert clock.corrected({MODEL: COSTS})[MODEL].round([4]) == pytest.approx(COSTS.round([4]))
