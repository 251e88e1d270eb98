"""What the load snapshot says beside counts."""

from __future__ import annotations

import pytest

from specdecode.cost_tables import StepCosts
from specdecode.types import Lease, LoadSnapshot, Verify
from target_service.load import CostMatch, IdleShare
from target_service.scheduler import SchedulerLimits
from tests.lm.tiny import random_prompt
from tests.target.driver import Client, make_engine, opening
from tests.target.test_calibration import Ticks
from tests.target.texts import GREEDY_TEXT, OTHER_PROMPT, PROMPT, WRONG

COSTS = StepCosts(0.010, 1e-3)


# Idle share


def told(*changes: tuple[float, bool, bool], window: float = 1e9) -> float:
    """Share after these (time, stepping, waiting)."""
    idle = IdleShare(window)
    for now, stepping, waiting in changes:
        idle.change(now, stepping=stepping, waiting=waiting)
    return idle.share


def test_nothing_is_known_at_first_and_while_nobody_is_waited_for() -> None:
    assert told() == 1.0
    assert told((0.0, False, False), (5.0, True, False), (9.0, False, False)) == 1.0


def test_the_share_is_that_of_waiting_without_a_step() -> None:
    assert told((0.0, False, True), (3.0, True, True), (4.0, False, False)) == pytest.approx(0.75)
    assert told((0.0, True, True), (3.0, False, False)) == 0.0
    assert told((0.0, False, True), (3.0, True, False), (9.0, False, False)) == 1.0


def test_the_past_is_forgotten() -> None:
    changes = ((0.0, False, True), (10.0, True, True), (20.0, False, False))
    assert told(*changes, window=2.0) < 0.01 < 0.49 < told(*changes)


def test_a_clock_that_is_set_back_adds_nothing() -> None:
    assert told((100.0, False, True), (50.0, True, True), (51.0, False, False)) == 0.0


def test_in_lockstep_nothing_runs_while_the_router_drafts() -> None:
    clock = Ticks()
    client = Client(make_engine(clock=clock))
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    for _ in range(5):
        clock.now += 1.0
        client.send(client.verify(0, WRONG))
        client.step()
    assert client.engine.load.idle_share == 1.0


def test_steps_of_others_fill_the_time_in_which_a_router_drafts() -> None:
    clock = Ticks()
    client = Client(make_engine(clock=clock))
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, OTHER_PROMPT, max_tokens=40))
    client.settle()
    client.send(client.lease(1, 30))
    for _ in range(20):
        client.step()
    assert 0.0 < client.engine.load.idle_share < 0.9


def test_a_router_that_left_is_not_waited_for() -> None:
    clock = Ticks()
    client = Client(make_engine(clock=clock))
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.engine.close_stream(client.stream)
    waited = client.engine.meter.idle._waited
    clock.now += 100.0
    client.send(opening(1, OTHER_PROMPT, max_tokens=4), Lease(1, len(OTHER_PROMPT), 4))
    client.settle()
    assert client.engine.meter.idle._waited < waited + 1.0


# The next step


def test_leased_sequences_are_ordered_and_due_ones_are_not() -> None:
    client = Client(make_engine())
    client.send(*(opening(n, PROMPT, max_tokens=40) for n in range(3)))
    client.settle()
    client.send(client.lease(0, 9), client.lease(1, 9), client.verify(2, WRONG, WRONG))
    client.step()
    load = client.engine.load
    assert (load.num_running, load.num_ordered, load.num_ordered_tokens) == (3, 2, 2)
    assert (load.num_prefill_tokens, load.expected_emitted) == (0, 2.0)


def test_prompts_count_by_the_chunk_that_comes_next() -> None:
    client = Client(make_engine(limits=SchedulerLimits(prefill_chunk=20)))
    client.send(opening(0, random_prompt(70), max_tokens=4), Lease(0, 70, 4))
    seen = []
    for _ in range(5):
        client.step()
        load = client.engine.load
        seen.append(
            (load.tokens_in_flight, load.num_prefill_tokens, load.num_ordered, load.num_ordered_tokens)
        )
    assert seen == [(20, 20, 0, 0), (20, 20, 0, 0), (20, 9, 1, 1), (10, 0, 1, 1), (1, 0, 1, 1)]


def test_drafts_that_found_no_room_are_ordered_for_the_next_step() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_tokens_in_flight=40)))
    client.send(*(opening(n, PROMPT, max_tokens=40) for n in range(3)))
    client.settle()
    client.send(*(client.verify(n, *[WRONG] * 20) for n in range(3)))
    client.step()
    load = client.engine.load
    assert load.tokens_in_flight == 21
    assert (load.num_ordered, load.num_ordered_tokens) == (2, 40)


def test_a_round_is_expected_to_emit_what_rounds_have_emitted() -> None:
    client = Client(make_engine(limits=SchedulerLimits(max_tokens_in_flight=33)))
    client.send(opening(0, PROMPT, max_tokens=40), opening(1, PROMPT, max_tokens=40))
    client.settle()
    right = GREEDY_TEXT[:20]
    client.send(client.verify(0, *right), client.verify(1, *right))
    client.step()
    # Of one round, which emitted 21, a twentieth is believed.
    assert client.engine.load.expected_emitted == pytest.approx(1 + 20 * 0.05)


def test_a_load_without_sequences_carries_nothing() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=2), Lease(0, len(PROMPT), 2))
    client.settle()
    load = client.engine.load
    assert (load.num_ordered, load.num_ordered_tokens, load.num_prefill_tokens) == (0, 0, 0)
    assert load.expected_emitted == 0.0


# Price


def test_the_price_is_what_one_more_token_takes_from_what_is_emitted() -> None:
    client = Client(make_engine())
    client.engine.meter.match.measured(COSTS)
    client.send(opening(0, PROMPT, max_tokens=40))
    client.settle()
    client.send(Verify(0, len(PROMPT), (*GREEDY_TEXT[:3], WRONG)))
    client.step()
    # 5 tokens in flight, 4 emitted.
    assert client.engine.load.price == pytest.approx(4 * 1e-3 / (0.010 + 5e-3))


def test_without_costs_or_steps_there_is_no_price() -> None:
    client = Client(make_engine())
    client.send(opening(0, PROMPT, max_tokens=4), Lease(0, len(PROMPT), 4))
    client.step()
    assert client.engine.load.price == 0.0
    client.engine.meter.match.measured(COSTS)
    client.settle()
    client.engine.step()
    assert client.engine.load.price == 0.0


# How the costs fit


def load(tokens: int, seconds: float) -> LoadSnapshot:
    return LoadSnapshot(tokens_in_flight=tokens, num_rows=tokens, step_seconds=seconds)


def noted(match: CostMatch, factor: float, steps: int = 200) -> CostMatch:
    """After so many steps that took `factor` of what the first costs say."""
    for index in range(steps):
        tokens = 1 + index % 64
        match.note(load(tokens, factor * COSTS.step(tokens)), sequences=tokens)
    return match


def with_costs() -> CostMatch:
    match = CostMatch()
    match.measured(COSTS)
    return match


def test_the_ratio_follows_what_steps_take() -> None:
    match = with_costs()
    assert match.ratio == 1.0
    assert noted(match, 1.5).ratio == pytest.approx(1.5, abs=0.01)
    assert noted(match, 0.8).ratio == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("factor", "stale"), [(1.0, False), (1.19, False), (0.81, False), (1.21, True), (0.79, True)]
)
def test_costs_are_stale_when_200_steps_are_more_than_a_fifth_off(factor: float, stale: bool) -> None:
    match = with_costs()
    assert not noted(match, factor, 199).is_stale
    assert noted(match, factor, 1).is_stale is stale


def test_one_step_that_was_held_up_makes_no_costs_stale_and_200_do() -> None:
    match = noted(noted(with_costs(), 1.0, 199), 1000.0, 1)
    assert not match.is_stale
    assert 1.0 < match.ratio < 1.5
    assert noted(match, 1000.0).is_stale


def test_steps_without_rows_do_not_count() -> None:
    match = with_costs()
    for _ in range(200):
        match.note(LoadSnapshot(tokens_in_flight=64, step_seconds=0.5), sequences=1)
    assert (match.ratio, match.is_stale) == (1.0, False)


def test_without_costs_nothing_is_compared() -> None:
    match = noted(CostMatch(), 3.0)
    assert (match.ratio, match.is_stale) == (1.0, False)


def test_new_costs_that_fit_set_the_ratio_back() -> None:
    match = noted(with_costs(), 2.0)
    match.measured(StepCosts(0.020, 2e-3))
    assert (match.ratio, match.is_stale) == (pytest.approx(1.0), False)
    assert not noted(match, 2.0).is_stale
    assert noted(match, 3.0).is_stale


def test_costs_that_measure_the_same_again_are_not_measured_for_ever() -> None:
    match = noted(with_costs(), 1.4)
    assert match.is_stale
    match.measured(COSTS)
    assert match.ratio == pytest.approx(1.4)
    assert not noted(match, 1.4).is_stale
    assert noted(match, 1.8).is_stale


def test_the_load_of_real_steps_tells_the_ratio() -> None:
    client = Client(make_engine(clock=Ticks()))
    client.engine.meter.match.measured(StepCosts(1e-3, 1e-9))
    client.send(opening(0, PROMPT, max_tokens=40), Lease(0, len(PROMPT), 40))
    client.settle()
    # Several looks at the clock a step, a millisecond each.
    assert client.engine.load.cost_ratio > 2.0
