"""The decision against every fixed γ, by what was known when it was made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.regret import Prospect, compare
from specdecode.cost import Candidate, DraftCosts, DueCandidates, OtherLoad, StepCosts, choose
from specdecode.types import DrafterKind

MODEL, NGRAM = DrafterKind.MODEL, DrafterKind.NGRAM
ALONE = OtherLoad()
FLAT = StepCosts(base_seconds=1.0, token_seconds=0.0)
PER_PASS = {MODEL: DraftCosts(pass_seconds=0.1), NGRAM: DraftCosts(base_seconds=0.01, single_pass=True)}


def test_lost_is_what_each_fixed_length_would_emit_more_in_the_time_of_the_decision() -> None:
    # 1, 1.8, 2.376 tokens in 1, 1.1, 1.2 s (the table for α = 0.80, 0.72 and c = 0.1); decided: γ 1.
    outlook = compare(
        [Prospect(MODEL, (0.8, 0.576), 1)], PER_PASS, FLAT, ALONE, idle_share=1.0, round_trip_seconds=0.0
    )
    assert outlook.expected == pytest.approx(1.8)
    assert outlook.lost == pytest.approx((1.1 - 1.8, 0.0, 2.376 / 1.2 * 1.1 - 1.8))


def test_what_the_step_does_not_wait_for_costs_nothing() -> None:
    outlook = compare(
        [Prospect(MODEL, (0.8, 0.576), 0)], PER_PASS, FLAT, ALONE, idle_share=0.0, round_trip_seconds=9.0
    )
    assert outlook.lost == pytest.approx((0.0, 0.8, 1.376))


def test_drafting_slows_the_rest_of_the_step_down() -> None:
    steps = StepCosts(base_seconds=1.0, token_seconds=0.1)
    others = OtherLoad(tokens=9, rows=9, emitted=9.0)
    # 10 tokens in 2 s against 10.1 in 2.1 s.
    outlook = compare(
        [Prospect(NGRAM, (0.1,), 0)],
        {NGRAM: DraftCosts(base_seconds=1e-9)},
        steps,
        others,
        idle_share=1.0,
        round_trip_seconds=0.0,
    )
    assert outlook.lost == pytest.approx((0.0, 10.1 / 2.1 * 2 - 10))


def test_a_sequence_takes_part_as_far_as_it_can_and_gets_an_even_share() -> None:
    due = [Prospect(MODEL, (1.0, 1.0, 1.0), 3), Prospect(MODEL, (1.0,), 0), Prospect(None, (), 0)]
    outlook = compare(due, PER_PASS, FLAT, ALONE, idle_share=1.0, round_trip_seconds=0.0)
    # Decided: 6 tokens in 1.3 s; fixed γ: 3, 5, 6, 7 tokens in 1, 1.1, 1.2, 1.3 s.
    assert outlook.expected == pytest.approx(2.0)
    rates = (3 / 1.0, 5 / 1.1, 6 / 1.2, 7 / 1.3)
    assert outlook.lost == pytest.approx([(rate * 1.3 - 6) / 3 for rate in rates])


survivals = st.lists(st.floats(0.05, 1.0), max_size=5).map(lambda values: tuple(sorted(values, reverse=True)))


@given(
    rows=st.lists(st.tuples(st.sampled_from([MODEL, NGRAM]), survivals), min_size=1, max_size=5),
    per_token=st.floats(0.0, 0.3),
    num_others=st.integers(0, 10),
    idle_share=st.floats(0.0, 1.0),
    round_trip=st.floats(0.0, 0.1),
)
def test_the_joint_choice_has_no_regret_against_any_fixed_length(
    rows: list[tuple[DrafterKind, tuple[float, ...]]],
    per_token: float,
    num_others: int,
    idle_share: float,
    round_trip: float,
) -> None:
    steps = StepCosts(base_seconds=1.0, token_seconds=per_token, sequence_seconds=0.05)
    others = OtherLoad(num_others, num_others, float(num_others), 0, num_others)
    due = [DueCandidates((Candidate(drafter, row),) if row else ()) for drafter, row in rows]
    choice = choose(due, PER_PASS, steps, others, idle_share=idle_share, round_trip_seconds=round_trip)
    prospects = [
        Prospect(drafter, row, length)
        for (drafter, row), length in zip(rows, choice.num_draft_tokens, strict=True)
    ]
    outlook = compare(
        prospects, PER_PASS, steps, others, idle_share=idle_share, round_trip_seconds=round_trip
    )
    assert outlook.expected * len(due) == pytest.approx(choice.emitted)
    assert max(outlook.lost) <= 1e-9 * choice.emitted
