from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decision import LOOKUP, MODEL, realistic_due
from specdecode import slots
from specdecode.cost import Candidate, Choice, DraftCosts, DueCandidates, OtherLoad, StepCosts, choose
from specdecode.cost_tables import Floats, Ints
from specdecode.errors import InvalidArgumentError
from tests.cost.instances import Instance, best_rate, random_instance, random_survivals, rate

FREE = DraftCosts(base_seconds=1e-9, single_pass=True)


def solve(instance: Instance) -> Choice[str]:
    return choose(
        instance.due,
        instance.drafts,
        instance.steps,
        instance.others,
        idle_share=instance.idle_share,
        round_trip_seconds=instance.round_trip_seconds,
        max_slots=instance.max_slots,
    )


def offers(*survivals: tuple[float, ...], drafter: str = "a") -> list[DueCandidates[str]]:
    return [DueCandidates((Candidate(drafter, survival),)) for survival in survivals]


@pytest.mark.parametrize("block", range(20))
def test_equals_trying_everything_on_random_instances(block: int) -> None:
    num_drafting = 0
    for seed in range(100 * block, 100 * (block + 1)):
        instance = random_instance(seed)
        choice = solve(instance)
        assert choice.rate == pytest.approx(best_rate(instance), rel=1e-12), seed
        picks = tuple(zip(choice.num_draft_tokens, choice.drafters, strict=True))
        assert choice.rate == pytest.approx(rate(instance, picks), rel=1e-12), seed
        num_drafting += any(choice.num_draft_tokens)
    assert 20 < num_drafting < 95


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_equals_trying_everything(seed: int) -> None:
    instance = random_instance(seed)
    assert solve(instance).rate == pytest.approx(best_rate(instance), rel=1e-12)


def test_many_sequences_equal_an_exact_programme() -> None:
    """For 64 sequences trying everything is out of reach; exact dynamic programming per caps is not."""
    for seed in range(6):
        rng = random.Random(seed)
        due = realistic_due(rng, 64)
        steps = StepCosts(0.006, 2e-5, buckets=tuple(range(16, 640, 16)))
        rate = choose(due, {"m": MODEL, "n": LOOKUP}, steps).rate
        # A rate is reachable iff max (emitted − rate·seconds) is at least 0.
        assert _excess(due, steps, rate * (1 - 1e-9)) > 0
        assert _excess(due, steps, rate * (1 + 1e-9)) < 0


def _excess(due: list[DueCandidates[str]], steps: StepCosts, rate: float) -> float:
    best = -math.inf
    for depth, looks_up in itertools.product(range(9), (False, True)):
        table = np.zeros(1)
        for sequence in due:
            model, lookup = (candidate.survivals for candidate in sequence.candidates)
            values = [0.0] + [
                max(
                    sum(model[:length]) - rate * MODEL.token_seconds * length
                    if length <= depth
                    else -math.inf,
                    sum(lookup[:length]) - rate * (LOOKUP.sequence_seconds + LOOKUP.token_seconds * length)
                    if looks_up
                    else -math.inf,
                )
                for length in range(1, 9)
            ]
            longer = np.full(len(table) + 8, -math.inf)
            for length, value in enumerate(values):
                end = length + len(table)
                longer[length:end] = np.maximum(longer[length:end], table + value)
            table = longer
        seconds = steps.curve(len(due) + np.arange(len(table)))
        seconds += (MODEL.base_seconds + MODEL.pass_seconds * depth) * (
            depth > 0
        ) + LOOKUP.base_seconds * looks_up
        best = max(best, float((len(due) + table - rate * seconds).max()))
    return best


def test_a_memory_bound_target_is_given_every_slot_that_is_worth_its_draft_time() -> None:
    steps = StepCosts(base_seconds=0.01, token_seconds=0.0)
    survival = tuple(0.8 ** (i + 1) for i in range(8))
    free = choose(offers(*[survival] * 4), {"a": FREE}, steps)
    assert free.num_draft_tokens == (8, 8, 8, 8)
    assert free.price == 0
    one_pass = 0.001
    paid = choose(offers(*[survival] * 4), {"a": DraftCosts(pass_seconds=one_pass)}, steps)
    gains = [4 * value for value in survival]
    worth = [gain > paid.rate * one_pass for gain in gains]
    assert paid.num_draft_tokens == (sum(worth),) * 4
    assert 0 < sum(worth) < 8


def test_a_compute_bound_target_is_given_nothing() -> None:
    steps = StepCosts(base_seconds=0.0, token_seconds=0.001)
    choice = choose(offers(*[(0.99, 0.98)] * 16), {"a": FREE}, steps)
    assert choice.num_draft_tokens == (0,) * 16
    assert choice.drafters == (None,) * 16
    assert choice.price == pytest.approx(1)
    assert choice.rate == choice.plain_rate


def test_a_bucket_that_is_paid_for_is_filled_and_the_next_is_not_opened() -> None:
    steps = StepCosts(0.0, 0.001, buckets=(8, 16, 24))
    survival = (0.5, 0.4, 0.3, 0.2)
    choice = choose(offers(*[survival] * 5), {"a": FREE}, steps)
    assert sum(choice.num_draft_tokens) == 3
    assert max(choice.num_draft_tokens) == 1
    assert choice.price == pytest.approx(choice.rate * 0.008)
    full = choose(offers(*[survival] * 8), {"a": FREE}, steps)
    assert full.num_draft_tokens == (0,) * 8


def test_a_bucket_is_opened_where_filling_it_pays() -> None:
    steps = StepCosts(0.01, 0.0, tokens=(8, 9, 40), seconds=(0.010, 0.012, 0.012))
    choice = choose(offers(*[(0.9, 0.8, 0.7, 0.6)] * 8), {"a": FREE}, steps)
    assert choice.num_draft_tokens == (4,) * 8


def test_the_most_likely_slots_go_first_whoever_they_belong_to() -> None:
    due = offers((0.9, 0.2), (0.5, 0.45), (0.3, 0.1))
    assert choose(due, {"a": FREE}, StepCosts(0.01, 0.0), max_slots=1).num_draft_tokens == (1, 0, 0)
    assert choose(due, {"a": FREE}, StepCosts(0.01, 0.0), max_slots=3).num_draft_tokens == (1, 2, 0)
    assert choose(due, {"a": FREE}, StepCosts(0.01, 0.0), max_slots=0).num_draft_tokens == (0, 0, 0)


def test_weight_decides_between_equal_sequences() -> None:
    due = [
        replace(sequence, weight=weight)
        for sequence, weight in zip(offers((0.5,), (0.5,)), (0.5, 1.0), strict=True)
    ]
    assert choose(due, {"a": FREE}, StepCosts(0.01, 0.0), max_slots=1).num_draft_tokens == (0, 1)


def test_each_sequence_gets_the_drafter_that_suits_it() -> None:
    lookup, model = (0.9, 0.85, 0.8), (0.6, 0.4, 0.25)
    copies = DueCandidates((Candidate("n", lookup), Candidate("m", model)))
    chats = DueCandidates((Candidate("n", (0.05, 0.04, 0.03)), Candidate("m", model)))
    choice = choose([copies, chats], {"n": LOOKUP, "m": MODEL}, StepCosts(0.02, 0.0))
    assert choice.drafters == ("n", "m")
    assert choice.num_draft_tokens == (3, 2)


def test_a_drafter_that_runs_for_others_is_joined_for_the_price_of_its_tokens() -> None:
    """Alone, the first sequence would not pay for a pass; with the second one the pass is there anyway."""
    weak, strong = (0.3, 0.1), (0.9, 0.8)
    steps, drafts = StepCosts(0.01, 0.0), {"a": DraftCosts(pass_seconds=0.004)}
    assert choose(offers(weak), drafts, steps).num_draft_tokens == (0,)
    assert choose(offers(weak, strong), drafts, steps).num_draft_tokens == (1, 1)


def test_drafting_while_the_target_is_busy_costs_nothing() -> None:
    due, steps = offers((0.3,), (0.3,)), StepCosts(0.01, 0.0)
    drafts = {"a": DraftCosts(pass_seconds=0.01)}
    assert choose(due, drafts, steps, idle_share=1.0).num_draft_tokens == (0, 0)
    assert choose(due, drafts, steps, idle_share=0.0).num_draft_tokens == (1, 1)


def test_a_sequence_without_candidates_decodes_plainly() -> None:
    choice = choose([DueCandidates[str](), *offers((0.9,))], {"a": FREE}, StepCosts(0.01, 0.0))
    assert choice.num_draft_tokens == (0, 1)
    alone = choose([DueCandidates[str]()], {}, StepCosts(0.01, 0.001))
    assert alone.num_draft_tokens == (0,)
    assert alone.rate == alone.plain_rate


def test_the_price_is_what_the_next_token_costs_at_the_current_rate() -> None:
    steps = StepCosts(0.006, 2e-5)
    choice = choose(offers(*[tuple(0.7 ** (i + 1) for i in range(8))] * 64), {"a": MODEL}, steps)
    assert choice.price == pytest.approx(choice.emitted / choice.seconds * 2e-5)
    assert choice.seconds == pytest.approx(choice.step_seconds + choice.draft_seconds)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_never_worse_than_off(seed: int) -> None:
    choice = solve(random_instance(seed))
    assert choice.rate >= choice.plain_rate * (1 - 1e-12)
    assert choice.price >= 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_rate_never_falls_when_a_draft_gets_likelier_cheaper_or_less_limited(seed: int) -> None:
    instance = random_instance(seed)
    before = solve(instance).rate * (1 - 1e-12)
    assert solve(replace(instance, max_slots=None)).rate >= before
    assert solve(replace(instance, idle_share=instance.idle_share / 2)).rate >= before
    assert solve(replace(instance, round_trip_seconds=0)).rate >= before
    likelier = tuple(
        replace(
            sequence,
            candidates=tuple(
                replace(candidate, survivals=tuple(value**0.5 for value in candidate.survivals))
                for candidate in sequence.candidates
            ),
        )
        for sequence in instance.due
    )
    assert solve(replace(instance, due=likelier)).rate >= before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_a_steeper_step_never_drafts_more(seed: int, factor: int) -> None:
    rng = random.Random(seed)
    due = offers(*(random_survivals(rng, 4) for _ in range(6)))
    lengths = [
        sum(choose(due, {"a": FREE}, StepCosts(0.01, slope)).num_draft_tokens)
        for slope in (1e-4 * factor, 2e-4 * factor, 8e-4 * factor)
    ]
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_order_of_sequences_does_not_matter(seed: int) -> None:
    instance = random_instance(seed)
    turned = replace(instance, due=instance.due[::-1])
    assert solve(turned).rate == pytest.approx(solve(instance).rate, rel=1e-12)


@given(st.integers(0, 2**32))
def test_majorant_is_the_least_concave_curve_above(seed: int) -> None:
    rng = random.Random(seed)
    value: Floats = np.array([[0.0, *(rng.uniform(-1, 1) for _ in range(5))] for _ in range(3)])
    slopes = slots.majorant_slopes(value)
    curve = np.concatenate((value[:, :1], value[:, :1] + np.cumsum(slopes, axis=1)), axis=1)
    assert (np.diff(slopes, axis=1) <= 1e-12).all()
    assert (curve >= value - 1e-12).all()
    for row, above in zip(value, curve, strict=True):
        highest = [
            max(
                row[a] + (row[b] - row[a]) * (k - a) / max(b - a, 1)
                for a in range(k + 1)
                for b in range(k, len(row))
            )
            for k in range(len(row))
        ]
        assert above == pytest.approx(highest)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_best_lengths_equal_trying_all_for_any_price(seed: int, slope: float) -> None:
    rng = random.Random(seed)
    value: Floats = np.array([[0.0, *(rng.uniform(-0.5, 1) for _ in range(3))] for _ in range(4)])
    rest: Floats = -np.cumsum([rng.choice([0.0, 0.1, 0.5]) for _ in range(rng.randrange(1, 14))])
    totals = {}
    for lengths in itertools.product(range(4), repeat=4):
        if sum(lengths) < len(rest):
            totals[lengths] = sum(value[i, k] for i, k in enumerate(lengths)) + rest[sum(lengths)]
    found: Ints | None = slots.best_lengths(value, slope, rest, np.ones(len(rest), dtype=bool), 0.0)
    if max(totals.values()) <= 0:
        assert found is None
    else:
        assert found is not None
        assert totals[tuple(found.tolist())] == pytest.approx(max(totals.values()))


@pytest.mark.parametrize(
    ("survival", "field"),
    [
        ((0.5, 0.6), r"survivals\[1\]"),
        ((1.2,), r"survivals\[0\]"),
        ((-0.1,), r"survivals\[0\]"),
        ((0.5, math.nan), r"survivals\[1\]"),
    ],
)
def test_survivals_that_can_not_be_are_refused(survival: tuple[float, ...], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"due\[1\].*{field}"):
        choose(offers((0.5,), survival), {"a": FREE}, StepCosts(0.01, 0.0))


def test_what_does_not_fit_together_is_refused() -> None:
    steps, due = StepCosts(0.01, 0.0), offers((0.5,))
    with pytest.raises(InvalidArgumentError, match="due"):
        choose([], {"a": FREE}, steps)
    with pytest.raises(InvalidArgumentError, match="costs of a are missing"):
        choose(due, {"b": FREE}, steps)
    with pytest.raises(InvalidArgumentError, match="stands twice"):
        choose([DueCandidates((Candidate("a", (0.5,)), Candidate("a", (0.4,))))], {"a": FREE}, steps)
    with pytest.raises(InvalidArgumentError, match="weight"):
        choose([replace(due[0], weight=0)], {"a": FREE}, steps)
    with pytest.raises(InvalidArgumentError, match="idle_share"):
        choose(due, {"a": FREE}, steps, idle_share=1.5)
    with pytest.raises(InvalidArgumentError, match="round_trip_seconds"):
        choose(due, {"a": FREE}, steps, round_trip_seconds=-1)
    with pytest.raises(InvalidArgumentError, match="max_slots"):
        choose(due, {"a": FREE}, steps, max_slots=-1)
    with pytest.raises(InvalidArgumentError, match=r"others\.rows"):
        choose(due, {"a": FREE}, steps, OtherLoad(tokens=1, rows=2))
