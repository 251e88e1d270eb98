"""Where a request goes: to the replica that has it done soonest of two drawn, the warmest and its home."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.placement import STAY_SHARE, Demand, Standing, expected_seconds, place
from router.prefixes import PrefixIndex, prefix_digests
from specdecode.cost_tables import StepCosts
from specdecode.lm.pool import BlockPool
from specdecode.lm.sequence import KVSequence
from specdecode.types import LoadSnapshot

COSTS = StepCosts(base_seconds=0.01, token_seconds=0.001)
IDLE = Standing(LoadSnapshot(), COSTS, 0)
DEMAND = Demand(num_prompt_tokens=400, num_output_tokens=50)


def busy(num_running: int) -> Standing:
    return replace(IDLE, load=LoadSnapshot(num_running=num_running), num_choices=num_running)


def chosen(standings: list[Standing], home: int | None = None, demand: Demand = DEMAND) -> set[int | None]:
    """What comes out over many draws."""
    return {place(demand, standings, home, random.Random(seed)) for seed in range(60)}


def test_time_is_prefill_and_steps() -> None:
    # 400 · 1 ms of prompt; 50 steps of 10 ms and 1 ms for the one token.
    assert expected_seconds(DEMAND, IDLE) == pytest.approx(0.4 + 50 * 0.011)


def test_what_is_cached_need_not_be_computed() -> None:
    warm = replace(IDLE, cached_tokens=400)
    assert expected_seconds(DEMAND, warm) == pytest.approx(50 * 0.011)


@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(busy(8), id="others run"),
        pytest.param(replace(IDLE, num_choices=8), id="ours are on their way"),
        pytest.param(replace(IDLE, unseen_tokens=500), id="prompts are on their way"),
        pytest.param(replace(IDLE, load=LoadSnapshot(num_prefill_tokens=500)), id="prompts are computed"),
        pytest.param(replace(IDLE, load=LoadSnapshot(num_waiting=4)), id="a queue"),
        pytest.param(replace(IDLE, load=LoadSnapshot(price=0.5)), id="a price"),
        pytest.param(replace(IDLE, load=LoadSnapshot(cost_ratio=1.5)), id="slower than it measured"),
        pytest.param(replace(IDLE, costs=StepCosts(0.02, 0.002)), id="slower"),
    ],
)
def test_of_two_the_one_that_takes_longer_is_left(worse: Standing) -> None:
    assert expected_seconds(DEMAND, worse) > expected_seconds(DEMAND, IDLE)
    assert chosen([worse, IDLE]) == {1}
    assert chosen([IDLE, worse]) == {0}


def test_of_equal_ones_that_with_fewer_choices_is_taken() -> None:
    unmeasured = Standing(LoadSnapshot(num_running=4), None, 4)
    assert chosen([unmeasured, replace(unmeasured, num_choices=1)]) == {1}


def test_nobody_is_chosen_of_nobody() -> None:
    assert place(DEMAND, [], None, random.Random(0)) is None


def test_of_many_idle_ones_all_get_requests() -> None:
    assert chosen([IDLE] * 4) == {0, 1, 2, 3}


def test_the_worst_of_three_is_never_taken() -> None:
    assert 0 not in chosen([busy(20), IDLE, IDLE])


def test_the_warmest_is_always_looked_at() -> None:
    standings = [IDLE] * 9 + [replace(IDLE, cached_tokens=384)]
    assert chosen(standings) == {9}


def test_a_warm_replica_that_is_too_busy_is_left() -> None:
    assert 0 not in chosen([replace(busy(60), cached_tokens=384), IDLE, IDLE])


def test_a_conversation_stays_until_it_is_clearly_slower_there() -> None:
    stays, leaves = busy(2), busy(40)
    assert expected_seconds(DEMAND, IDLE) >= STAY_SHARE * expected_seconds(DEMAND, stays)
    assert chosen([stays, IDLE], home=0) == {0}
    assert expected_seconds(DEMAND, IDLE) < STAY_SHARE * expected_seconds(DEMAND, leaves)
    assert chosen([leaves, IDLE], home=0) == {1}


def test_digests_are_those_that_the_replicas_pool_makes() -> None:
    tokens = list(range(50))
    pool = BlockPool(8, 16)
    assert prefix_digests(tokens, 16, b"salt") == KVSequence(pool, tokens, b"salt").shareable_digests()


def test_an_index_knows_prefixes_and_forgets_tails_first() -> None:
    index = PrefixIndex(3)
    long, other = prefix_digests(range(65), 16, b""), prefix_digests(range(100, 133), 16, b"")
    index.add(long)
    assert index.num_known(long) == 3  # the tail did not fit
    index.add(other)
    assert (index.num_known(long), index.num_known(other)) == (1, 2)
    assert index.num_known(prefix_digests(range(65), 16, b"salt")) == 0
    index.clear()
    assert index.num_known(long) == 0
