"""Replicas are added when load stays high, taken away when one stays idle, within limits and with pauses."""

from __future__ import annotations

import pytest

from specdecode.config import TargetSettings
from specdecode.errors import InvalidArgumentError
from specdecode.types import LoadSnapshot
from target_service.autoscaling import Autoscaler, ScalingRule
from target_service.fleet import scaling_rule

RULE = ScalingRule(least=1, most=3, high_price=0.5, up_seconds=10, down_seconds=20, pause_seconds=30)
IDLE, BUSY = LoadSnapshot(), LoadSnapshot(num_running=4)
QUEUE, DEAR = LoadSnapshot(num_running=4, num_waiting=1), LoadSnapshot(num_running=4, price=0.9)


def sizes(load: LoadSnapshot, first: int, seconds: range, rule: ScalingRule = RULE) -> list[int]:
    """Replicas at each look, all ready and all with this load."""
    scaler, found = Autoscaler(rule), [first]
    for now in seconds:
        found.append(scaler.wanted(float(now), found[-1], [load] * found[-1]))
    return found[1:]


@pytest.mark.parametrize("load", [QUEUE, DEAR], ids=["queue", "price"])
def test_a_high_load_that_lasts_adds_replicas_one_by_one_up_to_the_limit(load: LoadSnapshot) -> None:
    found = sizes(load, 1, range(200))
    assert [found.index(size) for size in (1, 2, 3)] == [0, 10, 40]
    assert max(found) == 3


def test_idle_replicas_are_taken_away_one_by_one_down_to_the_least() -> None:
    found = sizes(IDLE, 3, range(200))
    assert [found.index(size) for size in (3, 2, 1)] == [0, 20, 50]
    assert min(found) == 1


def test_a_load_that_is_neither_changes_nothing() -> None:
    assert set(sizes(BUSY, 2, range(200))) == {2}


def test_a_break_begins_the_wait_anew() -> None:
    scaler = Autoscaler(RULE)
    loads = [QUEUE] * 9 + [BUSY] + [QUEUE] * 10
    assert {scaler.wanted(float(now), 1, [load]) for now, load in enumerate(loads)} == {1}
    assert scaler.wanted(20.0, 1, [QUEUE]) == 2


def test_a_queue_on_one_replica_of_two_is_not_a_high_load() -> None:
    scaler = Autoscaler(RULE)
    assert {scaler.wanted(float(now), 2, [QUEUE, BUSY]) for now in range(60)} == {2}


def test_nothing_is_added_while_a_replica_starts() -> None:
    scaler = Autoscaler(RULE)
    assert {scaler.wanted(float(now), 2, [QUEUE]) for now in range(200)} == {2}


@pytest.mark.parametrize(("size", "wanted"), [(0, 1), (5, 3)])
def test_limits_hold_at_once(size: int, wanted: int) -> None:
    assert Autoscaler(RULE).wanted(0.0, size, [BUSY] * size) == wanted


def test_fewer_replicas_at_most_than_at_start_are_refused() -> None:
    assert scaling_rule(TargetSettings(replicas=2)) is None
    with pytest.raises(InvalidArgumentError, match="max_replicas: 1 is below replicas, 2"):
        scaling_rule(TargetSettings(replicas=2, max_replicas=1))
