from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode.cost import (
    best_row,
    constant_expected_emitted,
    expected_emitted,
    speedup_table,
    survivals,
)
from specdecode.errors import InvalidArgumentError

FALLING = (0.80, 0.72, 0.66, 0.60, 0.55)

probability = st.floats(0, 1)


def test_the_table_of_falling_acceptance() -> None:
    rows = speedup_table(FALLING, 0.1)
    assert [row.num_draft_tokens for row in rows] == [1, 2, 3, 4, 5]
    assert [f"{row.emitted:.3f}" for row in rows[1:]] == ["2.376", "2.756", "2.984", "3.110"]
    assert [f"{row.speedup:.2f}" for row in rows[1:]] == ["1.98", "2.12", "2.13", "2.07"]
    best = best_row(rows)
    assert best is not None
    assert best.num_draft_tokens == 4
    assert rows[2].speedup > 0.99 * best.speedup


def test_constant_acceptance_counts_the_bonus_token() -> None:
    assert constant_expected_emitted(0.8, 4) == pytest.approx(3.36160)
    assert constant_expected_emitted(0.8, 0) == 1
    assert constant_expected_emitted(1.0, 7) == 8
    assert constant_expected_emitted(0.0, 7) == 1


@given(probability, st.integers(0, 32))
def test_both_forms_of_e_agree(alpha: float, length: int) -> None:
    assert constant_expected_emitted(alpha, length) == pytest.approx(expected_emitted([alpha] * length))


@given(st.lists(probability, min_size=1, max_size=32))
def test_survival_never_rises_and_e_lies_between_1_and_all(alphas: list[float]) -> None:
    survival = survivals(alphas)
    assert all(later <= earlier for earlier, later in itertools.pairwise(survival))
    assert 1 <= expected_emitted(alphas) <= 1 + len(alphas) * alphas[0] + 1e-12


@given(st.lists(probability, min_size=1, max_size=16), st.floats(0.001, 10))
def test_a_dearer_draft_never_speeds_up(alphas: list[float], cost: float) -> None:
    cheap, dear = speedup_table(alphas, cost), speedup_table(alphas, cost * 2)
    assert all(b.speedup < a.speedup for a, b in zip(cheap, dear, strict=True))


def test_no_row_is_best_where_drafting_loses() -> None:
    assert best_row(speedup_table([0.3, 0.3], 0.5)) is None


@pytest.mark.parametrize("alpha", [-0.01, 1.01, math.nan, math.inf])
def test_acceptance_outside_0_to_1_is_refused_by_position(alpha: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"alphas\[1\].*\[0, 1\]"):
        speedup_table([0.5, alpha], 0.1)
    with pytest.raises(InvalidArgumentError, match="alpha"):
        constant_expected_emitted(alpha, 3)


@pytest.mark.parametrize("cost", [0, -0.1, math.nan, math.inf])
def test_a_cost_of_0_or_less_is_refused(cost: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"draft_cost.*above 0"):
        speedup_table([0.5], cost)


def test_no_position_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"alphas.*at least 1"):
        speedup_table([], 0.1)
    with pytest.raises(InvalidArgumentError, match="num_draft_tokens"):
        constant_expected_emitted(0.5, -1)
