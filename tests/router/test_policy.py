from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import (
    Decision,
    DecisionReason,
    DrafterState,
    DueSequence,
    Offer,
    Plan,
    PolicySettings,
    ReplicaView,
    decide,
    scaled_steps,
)
from specdecode.cost import Candidate, DraftCosts, DueCandidates, OtherLoad, StepCosts, choose
from specdecode.errors import InvalidArgumentError
from specdecode.requests import SpeculationMode, Tier
from specdecode.types import DrafterKind, LoadSnapshot

NGRAM, MODEL = DrafterKind.NGRAM, DrafterKind.MODEL
AUTO, ON, OFF = SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF
R = DecisionReason

DEPTH = 8
STEADY = tuple(0.7 ** (i + 1) for i in range(DEPTH))
"""A drafter that is right seven times in ten."""
CHEAP = DraftCosts(base_seconds=1e-5, token_seconds=1e-8, single_pass=True)
DEAR = DraftCosts(pass_seconds=1e-3)
MEMORY_BOUND = StepCosts(0.010, 1e-7)
COMPUTE_BOUND = StepCosts(1e-6, 0.001)
BALANCED = StepCosts(0.010, 2e-4)

NGRAM_OFFER = Offer(NGRAM, survivals=STEADY)
MODEL_OFFER = Offer(MODEL, survivals=STEADY)
READY = DueSequence((NGRAM_OFFER,), num_remaining=100, num_tokens=50)
VIEW = ReplicaView(
    LoadSnapshot(num_running=1, num_free_blocks=1000, num_blocks=1000, step_seconds=0.010),
    steps=MEMORY_BOUND,
    drafts={NGRAM: CHEAP, MODEL: DEAR},
    block_size=16,
)


def view_of(steps: StepCosts | None = MEMORY_BOUND, **changes: Any) -> ReplicaView:
    return replace(VIEW, steps=steps, **changes)


def decided(sequence: DueSequence = READY, view: ReplicaView = VIEW, **changes: Any) -> Decision:
    (decision,) = decide([replace(sequence, **changes)], view).decisions
    return decision


def policy(**changes: Any) -> ReplicaView:
    return replace(VIEW, policy=PolicySettings(**changes))


def lengths(plan: Plan) -> list[int]:
    return [decision.num_draft_tokens for decision in plan.decisions]


# The limits of the cost


def test_where_tokens_in_flight_are_free_everything_worth_its_draft_time_is_drafted() -> None:
    plan = decide([READY] * 16, VIEW)
    assert lengths(plan) == [DEPTH] * 16
    assert {decision.reason for decision in plan.decisions} == {R.SPECULATING}


def test_where_every_token_in_flight_costs_as_much_as_the_first_nothing_is_drafted() -> None:
    plan = decide([READY] * 16, view_of(COMPUTE_BOUND))
    assert lengths(plan) == [0] * 16
    assert {decision.reason for decision in plan.decisions} == {R.COST}
    assert all(decision.num_lease_tokens for decision in plan.decisions)


def test_a_bucket_that_is_paid_for_is_filled_and_not_left() -> None:
    stairs = StepCosts(1e-6, 0.010, buckets=(16, 32))
    due = [READY] * 12
    plan = decide(due, view_of(stairs))
    assert sum(lengths(plan)) == 4


def test_draft_time_that_the_step_waits_for_counts() -> None:
    slow = {MODEL: DraftCosts(pass_seconds=0.020)}
    sequence = replace(READY, offers=(MODEL_OFFER,))
    assert decided(sequence, view_of(drafts=slow)).num_draft_tokens == 0
    idle_never = replace(VIEW.load, idle_share=0.0)
    assert decided(sequence, view_of(drafts=slow, load=idle_never)).num_draft_tokens == DEPTH


def test_drafters_compete_and_the_dearer_one_wins_only_by_what_it_brings() -> None:
    both = replace(READY, offers=(MODEL_OFFER, NGRAM_OFFER))
    assert decided(both, view_of(BALANCED)).drafter is NGRAM
    silent = replace(NGRAM_OFFER, survivals=(0.01,) * DEPTH)
    assert decided(replace(both, offers=(MODEL_OFFER, silent)), view_of(BALANCED)).drafter is MODEL


def test_what_runs_beside_the_due_sequences_moves_the_step_into_the_compute_bound_part() -> None:
    view = view_of(BALANCED)
    alone = decided(view=view).num_draft_tokens
    busy = replace(VIEW.load, num_running=400, num_ordered=399, num_ordered_tokens=399, expected_emitted=399)
    assert decided(view=replace(view, load=busy)).num_draft_tokens < alone
    assert decided(view=replace(view, ordered_tokens=399, ordered_emitted=399)).num_draft_tokens < alone


@pytest.mark.parametrize("steps", [COMPUTE_BOUND, BALANCED, MEMORY_BOUND])
def test_prefill_beside_it_does_not_make_a_draft_look_cheap(steps: StepCosts) -> None:
    """Where a token in flight costs the same anywhere, it changes nothing."""
    plain = decide([READY] * 16, view_of(steps))
    for prefill in (64, 512):
        load = replace(VIEW.load, num_prefill_tokens=prefill)
        beside = decide([READY] * 16, view_of(steps, load=load))
        assert lengths(beside) == lengths(plain)
        assert beside.decisions[0].price == pytest.approx(plain.decisions[0].price)
        longer = beside.decisions[0].predicted_seconds - plain.decisions[0].predicted_seconds
        assert longer == pytest.approx(steps.step(16 + prefill, 16) - steps.step(16, 16))


def test_prefill_that_fills_the_step_up_to_where_tokens_cost_makes_drafts_shorter() -> None:
    stair = StepCosts(0.010, 1e-4, tokens=(1, 64, 65, 600), seconds=(0.010, 0.010, 0.014, 0.014 + 535e-3))
    assert sum(lengths(decide([READY] * 4, view_of(stair)))) == 4 * DEPTH
    load = replace(VIEW.load, num_prefill_tokens=200)
    # Four tokens in 10 ms without drafts: one more, at 1 ms, must bring 0.4. Survivals are 0.7, 0.49, 0.34.
    assert lengths(decide([READY] * 4, view_of(stair, load=load))) == [2] * 4


def test_a_sequence_whose_lease_still_runs_is_not_counted_twice() -> None:
    leased = replace(VIEW.load, num_ordered=1, num_ordered_tokens=1, expected_emitted=1.0)
    plan = decide([replace(READY, lease_left=1), READY], replace(VIEW, load=leased, steps=BALANCED))
    alone = decide([READY, READY], view_of(BALANCED))
    assert plan.decisions[1].predicted_seconds == pytest.approx(alone.decisions[1].predicted_seconds)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1), min_size=1, max_size=6),
            st.lists(st.floats(0, 1), min_size=1, max_size=6),
            st.sampled_from(Tier),
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(1e-4, 0.02),
    st.floats(1e-6, 2e-3),
    st.floats(0, 1),
)
def test_the_joint_decision_is_that_of_the_cost_model(
    alphas: list[tuple[list[float], list[float], Tier]], base: float, token: float, idle_share: float
) -> None:
    steps = StepCosts(base, token)
    due, candidates = [], []
    for model, ngram, tier in alphas:
        rows = [tuple(itertools.accumulate(row, float.__mul__)) for row in (model, ngram)]
        offers = (Offer(MODEL, survivals=rows[0]), Offer(NGRAM, survivals=rows[1]))
        due.append(replace(READY, offers=offers, tier=tier))
        weight = 0.5 if tier is Tier.BATCH else 1.0
        candidates.append(
            DueCandidates((Candidate(MODEL, rows[0]), Candidate(NGRAM, rows[1])), weight, READY.num_tokens)
        )
    load = LoadSnapshot(num_running=len(due), idle_share=idle_share)
    plan = decide(due, view_of(steps, load=load, round_trip_seconds=1e-4))
    others = OtherLoad(cached_tokens=READY.num_tokens * len(due))
    choice = choose(candidates, VIEW.drafts, steps, others, idle_share=idle_share, round_trip_seconds=1e-4)
    assert lengths(plan) == list(choice.num_draft_tokens)
    assert [decision.drafter for decision in plan.decisions] == list(choice.drafters)
    for decision in plan.decisions:
        assert decision.predicted_seconds == choice.seconds
        assert decision.price == choice.price


def test_the_prediction_is_that_of_the_estimates() -> None:
    decision = decided()
    assert decision.predicted_emitted == pytest.approx(1 + sum(STEADY))
    assert decided(view=view_of(COMPUTE_BOUND)).predicted_emitted == 1


def test_steps_that_take_longer_than_measured_are_scaled_as_a_whole() -> None:
    steps = StepCosts(0.01, 1e-4, 1e-7, 1e-3, tokens=(1, 8), seconds=(0.011, 0.012), sequence_seconds=1e-5)
    twice = scaled_steps(steps, 2.0)
    for tokens in (1, 5, 8, 100):
        assert twice.step(tokens, None, 300, 4) == pytest.approx(2 * steps.step(tokens, None, 300, 4))


# Modes


@pytest.mark.parametrize("steps", [COMPUTE_BOUND, None])
def test_a_request_that_wants_drafts_gets_its_cap_whatever_it_costs(steps: StepCosts | None) -> None:
    sequence = replace(READY, mode=ON, num_draft_tokens=4)
    assert decided(sequence, view_of(steps)) == Decision(4, NGRAM, R.SPECULATING)
    assert decided(sequence, view_of(steps, drafts={})).num_draft_tokens == 4


def test_without_costs_nothing_is_drafted_unless_the_request_insists() -> None:
    for view in (view_of(None), view_of(drafts={})):
        decision = decided(view=view)
        assert (decision.num_draft_tokens, decision.reason) == (0, R.UNCALIBRATED)
        assert decision.num_lease_tokens > 0


def test_a_drafter_that_is_not_measured_does_not_keep_the_other_from_drafting() -> None:
    both = replace(READY, offers=(MODEL_OFFER, NGRAM_OFFER))
    assert decided(both, view_of(drafts={NGRAM: CHEAP})).drafter is NGRAM


# Guards


def offering(**changes: Any) -> dict[str, Any]:
    return {"offers": (replace(NGRAM_OFFER, **changes),)}


GUARDS: list[tuple[dict[str, Any], ReplicaView, DecisionReason]] = [
    ({"mode": OFF}, VIEW, R.REQUEST_OFF),
    ({"num_draft_tokens": 0}, VIEW, R.CAPPED),
    ({}, policy(enabled=False), R.CAP_DRAFT_TOKENS),
    ({}, policy(max_draft_tokens=0), R.CAP_DRAFT_TOKENS),
    ({}, policy(max_tokens_in_flight=1), R.CAP_TOKENS_IN_FLIGHT),
    ({"temperature": 1.3}, policy(max_temperature=1.2), R.TEMPERATURE),
    ({"num_remaining": 1}, VIEW, R.LAST_TOKEN),
    ({"drafts_reachable": False}, VIEW, R.DRAFTER_UNAVAILABLE),
    ({"offers": ()}, VIEW, R.NO_DRAFTER),
    (offering(state=DrafterState.UNAVAILABLE), VIEW, R.DRAFTER_UNAVAILABLE),
    (offering(state=DrafterState.LATE), VIEW, R.DRAFTER_LATE),
    (offering(state=DrafterState.UNSUPPORTED), VIEW, R.UNSUPPORTED),
    (offering(room=0), VIEW, R.CONTEXT_FULL),
    (offering(room=-9), VIEW, R.CONTEXT_FULL),
    ({}, replace(VIEW, load=replace(VIEW.load, num_free_blocks=1)), R.KV_PRESSURE),
]


@pytest.mark.parametrize("mode", [AUTO, ON])
@pytest.mark.parametrize(("changes", "view", "reason"), GUARDS)
def test_each_guard_holds_for_every_request_and_says_so(
    changes: dict[str, Any], view: ReplicaView, reason: DecisionReason, mode: SpeculationMode
) -> None:
    decision = decided(READY, view, **({"mode": mode} | changes))
    assert (decision.num_draft_tokens, decision.drafter, decision.reason) == (0, None, reason)
    assert decision.num_lease_tokens >= 1


def test_too_little_accepted_stops_a_drafter_that_is_not_cheap() -> None:
    poor = {"offers": (replace(MODEL_OFFER, acceptance=0.39),)}
    assert decided(**poor).reason is R.ACCEPTANCE
    assert decided(offers=(replace(MODEL_OFFER, acceptance=0.41),)).num_draft_tokens > 0
    assert decided(**poor, min_acceptance=0.3).num_draft_tokens > 0
    assert decided(READY, policy(min_acceptance=0.3), **poor).num_draft_tokens > 0


def test_a_cheap_drafter_has_no_minimum_unless_somebody_names_one() -> None:
    poor = offering(acceptance=0.01)
    assert decided(**poor).num_draft_tokens > 0
    assert decided(**poor, min_acceptance=0.4).reason is R.ACCEPTANCE
    assert decided(READY, policy(min_acceptances=((NGRAM, 0.4),)), **poor).reason is R.ACCEPTANCE
    assert decided(READY, policy(cheap_draft_share=0.0), **poor).reason is R.ACCEPTANCE


def test_a_request_that_insists_is_stopped_only_by_a_minimum_of_its_own() -> None:
    poor = {"offers": (replace(MODEL_OFFER, acceptance=0.0),), "mode": ON}
    assert decided(**poor).num_draft_tokens > 0
    assert decided(**poor, min_acceptance=0.1).reason is R.ACCEPTANCE


def test_one_drafter_that_may_not_leaves_the_other() -> None:
    late = replace(MODEL_OFFER, state=DrafterState.LATE)
    assert decided(offers=(late, NGRAM_OFFER)).drafter is NGRAM


def test_tier_batch_drafts_less_and_says_when_an_interactive_request_would_have() -> None:
    # The slot costs about 0.5 of a token: above half a token of 0.7, below a whole one.
    steps = StepCosts(0.010, 0.0066)
    interactive = [replace(READY, offers=(replace(NGRAM_OFFER, survivals=(0.7,)),))] * 4
    batch = replace(interactive[0], tier=Tier.BATCH)
    plan = decide([*interactive, batch], view_of(steps))
    assert lengths(plan) == [1, 1, 1, 1, 0]
    assert plan.decisions[-1].reason is R.TIER_BATCH


def test_tier_batch_does_not_draft_where_that_lowers_throughput_even_if_it_insists() -> None:
    decision = decided(READY, view_of(COMPUTE_BOUND), mode=ON, tier=Tier.BATCH)
    assert decision.num_draft_tokens == 0


# Caps


def test_the_default_cap_is_for_requests_that_name_none_and_the_operators_for_all() -> None:
    long = {"offers": (replace(NGRAM_OFFER, survivals=(0.99,) * 32),)}
    assert decided(**long).num_draft_tokens == 8
    assert decided(**long, num_draft_tokens=20).num_draft_tokens == 20
    assert decided(READY, policy(max_draft_tokens=5), **long, num_draft_tokens=20).num_draft_tokens == 5
    assert decided(READY, policy(num_draft_tokens=3), **long).num_draft_tokens == 3


def test_never_past_max_tokens_or_the_drafters_context() -> None:
    assert decided(num_remaining=4).num_draft_tokens == 3
    assert decided(**offering(room=2)).num_draft_tokens == 2


@pytest.mark.parametrize("mode", [AUTO, ON])
def test_the_cap_on_tokens_in_flight_holds_over_all_sequences(mode: SpeculationMode) -> None:
    due = [replace(READY, mode=mode)] * 4
    plan = decide(due, policy(max_tokens_in_flight=14))
    assert sum(lengths(plan)) == 10
    refused = [decision.reason for decision in plan.decisions if not decision.num_draft_tokens]
    assert set(refused) <= {R.CAP_TOKENS_IN_FLIGHT}


def test_requests_that_insist_share_what_the_cap_leaves_evenly() -> None:
    plan = decide([replace(READY, mode=ON)] * 4, policy(max_tokens_in_flight=14))
    assert lengths(plan) == [3, 3, 2, 2]


def test_drafts_leave_the_blocks_to_what_runs() -> None:
    load = replace(VIEW.load, num_running=32, num_free_blocks=3)
    plan = decide([READY] * 32, replace(VIEW, load=load))
    assert sum(lengths(plan)) == (3 - 2) * 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_draft_tokens", 33),
        ("max_draft_tokens", -1),
        ("min_acceptance", 1.1),
        ("min_acceptances", ((MODEL, -0.1),)),
        ("max_temperature", math.nan),
        ("batch_weight", 0.0),
        ("max_tokens_in_flight", 0),
        ("lease_seconds", 0.0),
        ("probe_share", 0.5),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        PolicySettings(**{field: value})
    assert refused.value.violations[0].field == field


# Hysteresis


def test_the_length_stays_unless_another_brings_clearly_more() -> None:
    # A first slot costs 0.5 tokens, exactly.
    view = view_of(StepCosts(0.010, 0.010))
    level = decided(view=view).price

    def length(survival: float, last: int) -> int:
        offer = replace(NGRAM_OFFER, survivals=(survival,), last_length=last)
        return decided(offers=(offer,), view=view).num_draft_tokens

    assert (length(level * 1.2, 0), length(level * 0.8, 1)) == (1, 0)
    near = [level * (1 + share) for share in (-0.01, 0.004, -0.008, 0.002)]
    assert len({length(survival, 1) for survival in near}) == 1


# Probes


RESTING = replace(READY, offers=(replace(NGRAM_OFFER, survivals=(0.01,) * DEPTH, probe_due=True),))
POORLY = StepCosts(0.010, 0.002)


def probing(steps: StepCosts = POORLY, **changes: Any) -> ReplicaView:
    """Drafters that can't be tried beside a lease."""
    return view_of(steps, drafts={NGRAM: replace(CHEAP, single_pass=False), MODEL: DEAR}, **changes)


def test_what_does_not_seem_to_pay_is_probed_briefly_when_it_is_due_and_the_budget_lasts() -> None:
    view = probing(probe_seconds=1.0)
    decision = decided(RESTING, view)
    assert (decision.num_draft_tokens, decision.drafter, decision.reason) == (2, NGRAM, R.PROBE)
    assert decided(RESTING, probing()).reason is R.COST
    not_due = replace(RESTING, offers=(replace(RESTING.offers[0], probe_due=False),))
    assert decided(not_due, view).reason is R.COST


def test_probes_stay_within_their_budget_and_say_what_they_cost() -> None:
    one = decide([RESTING], probing(probe_seconds=1.0)).probe_seconds
    assert one == pytest.approx(2 * 0.002, rel=0.1)
    plan = decide([RESTING] * 8, probing(probe_seconds=2.5 * one))
    assert lengths(plan).count(2) == 2
    assert plan.probe_seconds <= 2.5 * one


def test_a_drafter_that_accepted_too_little_is_probed_too() -> None:
    poor = replace(MODEL_OFFER, acceptance=0.1, probe_due=True)
    decision = decided(replace(READY, offers=(poor,)), view_of(BALANCED, probe_seconds=1.0))
    assert (decision.reason, decision.num_draft_tokens) == (R.PROBE, 2)


def test_nothing_is_probed_that_would_not_pay_even_if_all_of_it_were_accepted() -> None:
    plan = decide([RESTING], probing(StepCosts(1e-6, 0.010), probe_seconds=10.0))
    assert plan.decisions[0].reason is R.COST
    assert plan.probe_seconds == 0


def test_the_drafter_that_is_not_chosen_is_probed_for_what_that_loses() -> None:
    other = replace(MODEL_OFFER, survivals=(0.01,), probe_due=True)
    sequence = replace(READY, offers=(other, NGRAM_OFFER))
    plan = decide([sequence], view_of(probe_seconds=1.0))
    assert (plan.decisions[0].drafter, plan.decisions[0].reason) == (MODEL, R.PROBE)
    lost = sum(STEADY) * 0.010 / (1 + sum(STEADY))
    assert plan.probe_seconds > lost
    assert decide([sequence], view_of(probe_seconds=lost)).decisions[0].drafter is NGRAM


@pytest.mark.parametrize("changes", [{"opening": True}, {"num_remaining": 1}])
def test_no_probe_while_opening_or_at_the_end(changes: dict[str, Any]) -> None:
    plan = decide([replace(RESTING, **changes)], probing(probe_seconds=1.0))
    assert (lengths(plan), plan.probe_seconds) == ([0], 0)


def test_a_lease_runs_out_before_a_probe_and_nothing_is_spent_until_then() -> None:
    plan = decide([replace(RESTING, lease_left=2)], probing(probe_seconds=1.0))
    assert plan.decisions == [Decision(0, NGRAM, R.LEASE)]
    assert plan.probe_seconds == 0


def test_what_is_looked_up_is_tried_beside_a_lease_at_no_cost() -> None:
    plan = decide([RESTING, replace(RESTING, lease_left=2), READY], view_of(StepCosts(1e-6, 0.010)))
    assert [decision.looks_up for decision in plan.decisions] == [NGRAM, NGRAM, None]
    assert all(decision.reason is R.COST and decision.num_lease_tokens for decision in plan.decisions)
    assert (lengths(plan), plan.probe_seconds) == ([0, 0, 0], 0)
    not_due = replace(RESTING, offers=(replace(RESTING.offers[0], probe_due=False),))
    assert decided(not_due, view_of(POORLY)).looks_up is None


# Reading


def unread(count: int) -> DueSequence:
    return replace(READY, offers=(replace(MODEL_OFFER, num_unread=count),))


def test_a_text_is_read_by_a_drafter_only_if_what_is_left_can_be_worth_it() -> None:
    view = view_of(drafts={MODEL: replace(DEAR, token_seconds=1e-3)}, shares_cores=True)
    assert decided(unread(100), view).num_draft_tokens > 0
    assert decided(unread(100), view, num_remaining=5).num_draft_tokens == 0
    assert decided(unread(1), view, num_remaining=5).num_draft_tokens > 0
    assert decided(unread(2000), view).num_draft_tokens == 0


def test_on_the_same_cores_a_model_reads_only_while_the_target_waits_for_it() -> None:
    apart, together = view_of(), view_of(shares_cores=True)
    for changes, reason in (({"opening": True}, R.FIRST_TOKEN), ({"lease_left": 3}, R.LEASE)):
        assert decided(unread(9), apart, **changes).drafter is MODEL
        decision = decided(unread(9), together, **changes)
        assert (decision.drafter, decision.reason) == (None, reason)
        assert decided(view=together, **changes).drafter is NGRAM


# Leases


def test_a_lease_lasts_until_the_router_should_have_control_back() -> None:
    load = replace(VIEW.load, step_seconds=0.060)
    view = view_of(COMPUTE_BOUND, load=load)
    assert decided(view=view).num_lease_tokens == 4
    assert decided(view=replace(view, load=replace(load, step_seconds=0.001))).num_lease_tokens == 16
    assert decided(view=replace(view, load=replace(load, step_seconds=3.0))).num_lease_tokens == 1
    assert decided(view=replace(view, load=replace(load, step_seconds=5e-324))).num_lease_tokens == 16
    assert decided(view=view, mode=OFF).num_lease_tokens == 16
    assert decided(view=view, mode=OFF, num_remaining=5).num_lease_tokens == 5


def test_a_drafter_that_will_be_back_soon_is_waited_for_by_short_leases() -> None:
    assert decided(**offering(state=DrafterState.LATE)).num_lease_tokens == 4


def test_a_draft_is_prepared_while_the_prompt_is_computed_and_after_a_lease() -> None:
    assert decided(opening=True) == Decision(0, NGRAM, R.FIRST_TOKEN, 1)
    assert decided(lease_left=3) == Decision(0, NGRAM, R.LEASE)


def test_a_drafter_hears_nothing_of_a_sequence_for_which_nothing_is_drafted() -> None:
    view = view_of(COMPUTE_BOUND)
    for changes in ({}, {"opening": True}, {"lease_left": 3}):
        decision = decided(view=view, **changes)
        assert (decision.drafter, decision.reason) == (None, R.COST)
        assert decision.num_lease_tokens > 0


# Always


sequences = st.builds(
    DueSequence,
    offers=st.lists(
        st.builds(
            Offer,
            st.sampled_from(DrafterKind),
            st.sampled_from(DrafterState),
            st.none() | st.integers(-5, 50),
            st.floats(0, 1).map(lambda a: tuple(a ** (i + 1) for i in range(DEPTH))),
            st.none() | st.floats(0, 1),
            st.integers(0, DEPTH),
            st.booleans(),
            st.booleans(),
        ),
        max_size=2,
        unique_by=lambda offer: offer.drafter,
    ).map(tuple),
    num_remaining=st.integers(1, 60),
    mode=st.sampled_from(SpeculationMode),
    tier=st.sampled_from(Tier),
    num_draft_tokens=st.none() | st.integers(0, 32),
    num_tokens=st.integers(1, 500),
    temperature=st.floats(0, 2),
    min_acceptance=st.none() | st.floats(0, 1),
    opening=st.booleans(),
    lease_left=st.integers(0, 16),
    drafts_reachable=st.booleans(),
)
views = st.builds(
    ReplicaView,
    st.builds(
        LoadSnapshot,
        num_running=st.integers(0, 64),
        num_free_blocks=st.integers(0, 64),
        num_blocks=st.just(64),
        step_seconds=st.floats(0, 1),
        num_ordered=st.integers(0, 8),
        num_ordered_tokens=st.integers(0, 64),
        num_prefill_tokens=st.integers(0, 256),
        expected_emitted=st.floats(0, 64),
        idle_share=st.floats(0, 1),
    ),
    st.builds(
        PolicySettings,
        enabled=st.booleans(),
        max_draft_tokens=st.integers(0, 32),
        max_tokens_in_flight=st.none() | st.integers(1, 128),
        max_temperature=st.floats(0, 2),
    ),
    st.none() | st.builds(StepCosts, st.floats(1e-5, 0.1), st.floats(0, 0.01)),
    st.sampled_from([{}, {NGRAM: CHEAP}, {NGRAM: CHEAP, MODEL: DEAR}]),
    st.floats(0, 0.01),
    st.sampled_from([0, 16]),
    st.integers(0, 64),
    st.floats(0, 64),
    st.floats(0, 0.1),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(sequences, max_size=5), views)
def test_no_decision_breaks_a_limit_and_no_sequence_is_stuck(
    due: list[DueSequence], view: ReplicaView
) -> None:
    plan = decide(due, view)
    assert len(plan.decisions) == len(due)
    # Each probe of those who insist is theirs to pay.
    if not any(sequence.is_forced for sequence in due):
        assert 0 <= plan.probe_seconds <= view.probe_seconds
    for sequence, decision in zip(due, plan.decisions, strict=True):
        assert decision.num_draft_tokens <= min(
            max(sequence.num_remaining - 1, 0), view.policy.max_draft_tokens
        )
        if sequence.num_draft_tokens is not None:
            assert decision.num_draft_tokens <= sequence.num_draft_tokens
        if decision.num_draft_tokens:
            offer = next(entry for entry in sequence.offers if entry.drafter is decision.drafter)
            assert offer.state is DrafterState.READY
            assert offer.room is None or decision.num_draft_tokens <= offer.room
            assert sequence.mode is not OFF
            assert view.policy.enabled
            assert sequence.temperature <= view.policy.max_temperature
        assert 0 <= decision.num_lease_tokens <= sequence.num_remaining
        assert bool(decision.num_draft_tokens) + bool(decision.num_lease_tokens) <= 1
        goes_on = decision.num_draft_tokens or decision.num_lease_tokens or sequence.lease_left
        assert goes_on, "a sequence without an order waits for ever"
    drafted = sum(lengths(plan))
    most = view.policy.max_tokens_in_flight
    if most is not None and drafted:
        assert drafted + len(due) <= most
