"""What others measured, as literal tables: the cost model and the planner must say the same."""

from __future__ import annotations

import itertools

import pytest

from specdecode.cost import (
    Candidate,
    DraftCosts,
    DueCandidates,
    OtherLoad,
    StepCosts,
    choose,
    constant_expected_emitted,
)
from specdecode.planner.explain import explain
from specdecode.planner.hardware import PROFILES
from specdecode.planner.plan import (
    FixedDraftCost,
    MeasuredSystem,
    Question,
    fixed_speed,
    plan_row,
)
from specdecode.planner.roofline import Replica, RooflineSystem
from specdecode.planner.shapes import ModelShape, model_shape

CONTEXT = 300
SURVIVALS = (0.657, 0.426, 0.270, 0.179, 0.111, 0.074, 0.047)
LENGTHS = (1, 2, 3, 5, 7)
H100_STEPS = StepCosts(
    base_seconds=5.886e-3,
    token_seconds=21.01e-6,
    cached_token_seconds=39.26e-9,
    overhead_seconds=1.207e-3,
)
H100_DRAFTS = DraftCosts(
    base_seconds=2.135e-3, sequence_seconds=0.84e-6, cached_token_seconds=2.38e-9, single_pass=True
)
"""One pass of the draft a round, whose time depends on the batch and not on γ."""
H100 = MeasuredSystem("published fit", H100_STEPS, H100_DRAFTS)
EAGLE = Question(SURVIVALS, LENGTHS)


def speedups(batch: int) -> dict[int, float]:
    row = plan_row(H100, EAGLE, batch, CONTEXT)
    return {length: row.change(speed) + 1 for length, speed in row.fixed.items()}


def test_the_ridge_of_the_h100_is_280_tokens() -> None:
    assert round(H100_STEPS.ridge) == 280


@pytest.mark.parametrize(("batch", "best"), [(1, 7), (32, 5), (64, 3), (128, 2), (256, 2)])
def test_the_best_fixed_length_falls_with_the_batch(batch: int, best: int) -> None:
    assert plan_row(H100, EAGLE, batch, CONTEXT).best_fixed[0] == best


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(64, (1.20, 1.36, 1.40, 1.34, 1.22)), (128, (1.15, 1.24, 1.23, 1.11, 0.96))],
)
def test_speedups_on_the_h100(batch: int, expected: tuple[float, ...]) -> None:
    assert tuple(speedups(batch).values()) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 128, 256])
def test_the_joint_choice_is_at_least_as_fast_as_every_fixed_length(batch: int) -> None:
    offer = Candidate("eagle", SURVIVALS)
    choice = choose(
        [DueCandidates((offer,), num_cached_tokens=CONTEXT)] * batch,
        {"eagle": H100_DRAFTS},
        H100_STEPS,
        OtherLoad(cached_tokens=batch * CONTEXT),
    )
    rates = [fixed_speed(H100, EAGLE, batch, CONTEXT, length).throughput for length in range(8)]
    assert choice.rate >= max(rates) * (1 - 1e-12)
    assert choice.rate < 1.02 * max(rates)


def test_the_roofline_of_the_h100_gives_the_published_fit() -> None:
    replica = Replica(model_shape("8B"), PROFILES["h100"])
    one, thousand = replica.parts(1, 1, 1, 0), replica.parts(1001, 1001, 1000, 300)
    assert one.weights == pytest.approx(5.886e-3, rel=0.02)
    assert thousand.compute / 1001 == pytest.approx(21.01e-6, rel=0.02)
    assert thousand.kv / 300_000 == pytest.approx(39.26e-9, rel=0.02)


# A 31B model in FP8 on one H100 NVL, 256 concurrent, γ = 3: published −21 %, −7 %, about 0 and +10 % at
# contexts 400, 900, 1,900 and 4,000. Acceptance and geometry are not published: these are ours.
GEOMETRY = ModelShape("31B", 5376, 60, 32, 4, 128, 25_600, 131_072)
HEAD = ModelShape("head", 5376, 1, 32, 4, 128, 16_000, 32_000)
FP8 = RooflineSystem(
    Replica(GEOMETRY, PROFILES["h100-nvl"], 1, "fp8", "fp8"),
    Replica(HEAD, PROFILES["h100-nvl"], 1, "fp8", "fp8"),
)
CONTEXTS = (400, 900, 1900, 4000)


def test_the_sign_flips_with_growing_context_and_kv_reads_are_named_as_the_cause() -> None:
    question = Question(tuple(0.63 ** (i + 1) for i in range(3)), (3,))
    rows = [plan_row(FP8, question, 256, context) for context in CONTEXTS]
    changes = [row.change(row.fixed[3]) for row in rows]
    assert all(a < b for a, b in itertools.pairwise(changes))
    assert changes == pytest.approx([-0.21, -0.07, 0.0, 0.10], abs=0.07)
    assert changes[0] < -0.1
    assert changes[-1] > 0.03
    text = explain(FP8, question, rows)
    assert "KV reads are the cause" in text
    assert "context 400" in text
    assert "context 4000" in text
    assert text.count(". ") == 1


# The well-known sentence "80 % acceptance loses at batch 64", for 1B/70B, c = 0.1, a crossover of 300 tokens.
CROSSOVER = 300
FOUR = Question(tuple(0.8 ** (i + 1) for i in range(4)), (4,))
SUM = StepCosts(base_seconds=1.0, token_seconds=1 / CROSSOVER)
MAX = StepCosts(1.0, 1 / CROSSOVER, tokens=(1, CROSSOVER), seconds=(1.0, 1.0))


def by_formula(steps: StepCosts) -> FixedDraftCost:
    return FixedDraftCost(MeasuredSystem("1B/70B", steps, H100_DRAFTS), 0.1)


@pytest.mark.parametrize(
    ("steps", "batch", "speedup"), [(SUM, 8, 2.24), (MAX, 8, 2.40), (SUM, 64, 1.60), (MAX, 64, 2.29)]
)
def test_a_crossover_of_300_tokens_does_not_lose_at_batch_64(
    steps: StepCosts, batch: int, speedup: float
) -> None:
    assert constant_expected_emitted(0.8, 4) == pytest.approx(3.3616)
    row = plan_row(by_formula(steps), FOUR, batch, 0)
    assert row.change(row.fixed[4]) + 1 == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize(("steps", "batch"), [(SUM, 289), (MAX, 178)])
def test_break_even_of_four_drafts_lies_at_about_180_to_300_sequences(steps: StepCosts, batch: int) -> None:
    system = by_formula(steps)
    pays = [
        fixed_speed(system, FOUR, count, 0, 4).throughput > fixed_speed(system, FOUR, count, 0, 0).throughput
        for count in (batch - 1, batch)
    ]
    assert pays == [True, False]


def test_a_crossover_of_a_few_dozen_tokens_does_lose_at_batch_64() -> None:
    system = by_formula(StepCosts(base_seconds=1.0, token_seconds=1 / 30))
    row = plan_row(system, FOUR, 64, 0)
    assert row.change(row.fixed[4]) == pytest.approx(-0.18, abs=0.01)
    assert row.change(row.auto) >= 0
    changes = [
        plan_row(system, FOUR, batch, 0).change(plan_row(system, FOUR, batch, 0).fixed[4])
        for batch in (28, 29)
    ]
    assert changes[0] > 0 > changes[1]
