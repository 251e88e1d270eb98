from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode.cost import Calibration, DraftCosts, DraftSample, StepCosts, StepSample
from specdecode.errors import InvalidArgumentError

H100 = StepCosts(5.886e-3, 21.01e-6, 39.26e-9, overhead_seconds=1.207e-3)


def test_the_ridge_is_base_over_slope() -> None:
    assert H100.ridge == pytest.approx(280, abs=0.5)
    assert StepCosts(0.01, 0.0).ridge == math.inf


def test_a_fit_alone_is_a_line() -> None:
    assert H100.step(1) == pytest.approx(7.093e-3 + 21.01e-6)
    assert H100.step(64, cached_tokens=64 * 300) == pytest.approx(9.1914e-3, rel=1e-4)


def test_measured_points_are_met_and_lie_on_lines_between() -> None:
    costs = StepCosts(0.01, 1e-3, tokens=(1, 8, 9, 16), seconds=(0.010, 0.010, 0.014, 0.014))
    assert costs.curve([1, 4, 8, 9, 12, 16]) == pytest.approx([0.010, 0.010, 0.010, 0.014, 0.014, 0.014])
    assert costs.step(26) == pytest.approx(0.014 + 10 * 1e-3)
    assert costs.step(0) == pytest.approx(0.010)


def test_a_padded_step_costs_as_much_as_its_bucket() -> None:
    costs = StepCosts(0.01, 1e-3, buckets=(8, 16))
    assert costs.curve([1, 8, 9, 16, 17]) == pytest.approx([0.018, 0.018, 0.026, 0.026, 0.027])


def test_tokens_without_logits_cost_their_share() -> None:
    costs = StepCosts(0.01, 1e-3, prefill_share=0.6)
    assert costs.step(100, rows=10) == pytest.approx(0.01 + (10 + 90 * 0.6) * 1e-3)
    flat = StepCosts(0.01, 1e-3, prefill_share=0.0, tokens=(1, 100), seconds=(0.010, 0.011))
    assert flat.step(100, rows=1) == pytest.approx(flat.step(1))


def test_sequences_and_their_attention_cost_what_is_given_of_them() -> None:
    costs = StepCosts(0.01, 1e-3, 1e-6, sequence_seconds=2e-4, attention_seconds=1e-7)
    assert costs.step(64, None, 16_000) == pytest.approx(0.01 + 64e-3 + 16e-3)
    more = 16 * 2e-4 + 64 * 1000 * 1e-7
    assert costs.step(64, None, 16_000, 16) == pytest.approx(0.01 + 64e-3 + 16e-3 + more)
    assert costs.fitted(64, 64, 16_000, 16) == pytest.approx(costs.step(64, None, 16_000, 16))


def test_the_fit_tells_windows_sequences_and_contexts_apart() -> None:
    true = StepCosts(0.02, 5e-4, 2e-6, prefill_share=0.5, sequence_seconds=2e-4, attention_seconds=1e-6)
    samples = [
        StepSample(windows * width, windows * width, windows * kv, 0.0, windows)
        for windows in (1, 4, 16, 64)
        for width in (1, 4)
        for kv in (16, 256, 1024)
    ]
    samples += [StepSample(n, 1, n, 0.0, 1) for n in (16, 64, 256)]
    found = StepCosts.of_samples(
        [replace(s, seconds=true.fitted(s.tokens, s.rows, s.cached_tokens, s.sequences)) for s in samples]
    )
    parts = ("base_seconds", "token_seconds", "cached_token_seconds", "sequence_seconds", "attention_seconds")
    for part in (*parts, "prefill_share"):
        assert getattr(found, part) == pytest.approx(getattr(true, part), rel=1e-6)
    assert found.seconds == pytest.approx([true.step(n) for n in found.tokens])


@given(st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True), st.integers(0, 2**32))
def test_a_step_never_gets_cheaper_with_tokens_rows_or_cached_tokens(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = tuple(sorted(sizes))
    seconds = tuple(np.cumsum(rng.uniform(0, 1e-3, len(tokens)) + 1e-6).tolist())
    buckets = tuple(sorted({int(size) for size in rng.integers(1, 200, 4)}))
    costs = StepCosts(1e-3, 1e-5, 1e-8, prefill_share=0.5, tokens=tokens, seconds=seconds, buckets=buckets)
    counts = np.arange(1, 300)
    for cached in (0, 1000):
        assert (np.diff(costs.curve(counts, counts, cached)) >= -1e-15).all()
        assert (np.diff(costs.curve(counts, np.ones_like(counts), cached)) >= -1e-15).all()
    assert (costs.curve(counts, counts // 2) <= costs.curve(counts, counts)).all()
    assert (costs.curve(counts, None, 1000) > costs.curve(counts)).all()


def test_samples_of_a_line_give_the_line_back() -> None:
    true = StepCosts(0.03, 9e-4, 2e-7, prefill_share=0.75)
    samples = [
        StepSample(tokens, rows, cached, true.step(tokens, rows, cached))
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128)
        for rows in {tokens, max(1, tokens // 4)}
        for cached in (0, 2000, 20000)
    ]
    costs = StepCosts.of_samples(samples)
    assert costs.base_seconds == pytest.approx(0.03)
    assert costs.token_seconds == pytest.approx(9e-4)
    assert costs.cached_token_seconds == pytest.approx(2e-7)
    assert costs.prefill_share == pytest.approx(0.75)
    assert costs.residual < 1e-9
    assert costs.seconds == pytest.approx([0.03 + 9e-4 * tokens for tokens in costs.tokens])


def test_samples_of_stairs_stay_stairs_and_noise_never_makes_time_fall() -> None:
    stairs = {1: 0.010, 8: 0.0102, 9: 0.0199, 16: 0.0201, 17: 0.0300, 24: 0.0298}
    costs = StepCosts.of_samples([StepSample(n, n, 0, seconds) for n, seconds in stairs.items()])
    assert costs.step(12) == pytest.approx(0.020, rel=0.01)
    assert costs.seconds[-2:] == pytest.approx([0.0299, 0.0299])
    assert all(a <= b for a, b in itertools.pairwise(costs.seconds))
    assert 0.001 < costs.residual < 0.3


def test_a_cost_that_can_not_be_negative_is_not() -> None:
    costs = StepCosts.of_samples([StepSample(1, 1, 0, 0.012), StepSample(64, 64, 0, 0.011)])
    assert costs.token_seconds == 0
    assert costs.step(1) == costs.step(64)


def test_drafts_pay_once_for_the_deepest_and_each_for_its_own() -> None:
    costs = DraftCosts(0.001, 0.002, 0.0001, 0.00001, 1e-8)
    assert costs.round([]) == 0
    assert costs.round([0, 0]) == 0
    assert costs.round([3, 0, 1], [100, 5000, 200]) == pytest.approx(
        0.001 + 3 * 0.002 + 2 * 0.0001 + 4 * 0.00001 + (3 * 100 + 200) * 1e-8
    )


def test_parallel_drafts_pay_one_pass() -> None:
    costs = DraftCosts(0.001, 0.002, 0.0001, 0.00001, 1e-8, single_pass=True)
    expected = 0.001 + 0.002 + 2 * 0.0001 + 4 * 0.00001 + 300 * 1e-8
    assert costs.round([3, 0, 1], [100, 5000, 200]) == pytest.approx(expected)


@pytest.mark.parametrize("single_pass", [False, True])
def test_samples_of_a_drafter_give_its_costs_back(single_pass: bool) -> None:
    true = DraftCosts(0.001, 0.0 if single_pass else 0.002, 0.0001, 0.00003, 1e-8, single_pass)
    samples = [
        DraftSample(length, batch, batch * context, true.round([length] * batch, [context] * batch))
        for length in (1, 2, 4, 8)
        for batch in (1, 4, 16, 64)
        for context in (100, 1000)
    ]
    costs = DraftCosts.of_samples(samples, single_pass)
    assert costs.round([5, 2, 7], [50, 50, 70]) == pytest.approx(true.round([5, 2, 7], [50, 50, 70]))
    assert costs.residual < 1e-9
    assert costs.samples == tuple(samples)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"base_seconds": -1.0}, "base_seconds"),
        ({"base_seconds": math.nan}, "base_seconds"),
        ({"base_seconds": 0.0, "token_seconds": 0.0}, "base_seconds"),
        ({"token_seconds": -1e-9}, "token_seconds"),
        ({"cached_token_seconds": math.inf}, "cached_token_seconds"),
        ({"prefill_share": 1.5}, "prefill_share"),
        ({"tokens": (1, 2)}, "seconds"),
        ({"tokens": (2, 1), "seconds": (0.1, 0.1)}, "tokens"),
        ({"tokens": (0, 1), "seconds": (0.1, 0.1)}, "tokens"),
        ({"tokens": (1, 2), "seconds": (0.1, 0.0)}, "seconds"),
        ({"tokens": (1, 2), "seconds": (0.2, 0.1)}, "seconds"),
        ({"buckets": (8, 8)}, "buckets"),
    ],
)
def test_step_costs_that_can_not_be_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        StepCosts(**{"base_seconds": 0.01, "token_seconds": 1e-3, **fields})
    assert caught.value.violations[0].field == named


def test_draft_costs_of_nothing_or_less_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="more than 0 seconds"):
        DraftCosts()
    with pytest.raises(InvalidArgumentError, match="token_seconds"):
        DraftCosts(0.001, token_seconds=-1e-9)


def test_samples_that_say_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least two"):
        StepCosts.of_samples([StepSample(1, 1, 0, 0.1), StepSample(1, 1, 0, 0.1)])
    with pytest.raises(InvalidArgumentError, match="above 0"):
        StepCosts.of_samples([StepSample(1, 1, 0, 0.1), StepSample(2, 2, 0, 0.0)])
    with pytest.raises(InvalidArgumentError, match="at least two"):
        DraftCosts.of_samples([DraftSample(1, 1, 0, 0.1)])


CALIBRATION = Calibration(
    {"model": "m", "dtype": "bfloat16", "device": "cpu", "threads": "2"},
    StepCosts(0.03, 9e-4, 2e-7, 0.0, 0.9, (1, 8, 9), (0.03, 0.031, 0.04), (), 0.02),
    {
        "ngram": DraftCosts(1e-4, 0.0, 1e-5, 1e-6, single_pass=True),
        "model": DraftCosts(1e-3, 6e-3, 0.0, 2e-4, samples=(DraftSample(4, 2, 100, 0.03),), residual=0.1),
    },
)


def test_a_calibration_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    CALIBRATION.save(path)
    assert Calibration.load(path) == CALIBRATION
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version"),
        ({"key": []}, "key"),
        ({"step": None}, "step"),
        ({"step": {"base_seconds": 0.01}}, "step"),
        ({"step": {"base_seconds": 0.01, "token_seconds": "fast"}}, "step.token_seconds"),
        ({"step": {"base_seconds": -1, "token_seconds": 0.1}}, "step"),
        ({"step": {"base_seconds": 0.01, "token_seconds": 0.1, "slope": 1}}, "step.slope"),
        ({"drafts": {"model": {}}}, "drafts.model"),
        ({"drafts": {"model": {"samples": 3}}}, "drafts.model"),
        ({"drafts": {"model": {"base_seconds": 1, "samples": [{"batch": 1}]}}}, "drafts.model.samples"),
    ],
)
def test_a_damaged_calibration_is_refused_by_file_and_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**CALIBRATION.to_json(), **change}))
    with pytest.raises(InvalidArgumentError) as caught:
        Calibration.load(path)
    assert str(path) in caught.value.message
    assert named in caught.value.message


def test_an_unreadable_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        Calibration.load(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text(json.dumps(CALIBRATION.to_json())[:100])
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        Calibration.load(tmp_path / "cut.json")
