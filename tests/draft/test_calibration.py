"""Rounds of drafting that are measured: by whom, with what left behind, and kept for the next start."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from draft_service.calibration import (
    DraftMeasurement,
    LookupBench,
    ModelBench,
    benches,
    budgets,
    calibrate,
    draft_key,
)
from draft_service.drafting import Drafter, SequenceKey
from draft_service.lookup import NgramDrafter
from draft_service.model import DraftLimits
from draft_service.ngram_index import MatchChoice, NgramOptions
from specdecode.calibrations import find, path_of
from specdecode.cost_tables import Calibration, DraftCosts
from specdecode.errors import InvalidArgumentError
from specdecode.types import DrafterKind, Propose
from tests.draft import tiny

BUDGET = 0.3


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))


class Ticks:
    """A clock on which every look takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def ngram() -> NgramDrafter:
    return NgramDrafter(NgramOptions(2, 5, MatchChoice.LATEST))


def both() -> dict[DrafterKind, Drafter]:
    return {DrafterKind.NGRAM: ngram(), DrafterKind.MODEL: tiny.new_drafter(block_size=16)}


def finish(work: DraftMeasurement) -> DraftCosts:
    while work.progress < 1:
        work.advance()
    return work.costs()


def test_after_every_measured_round_the_model_drafter_holds_nothing() -> None:
    drafter = tiny.new_drafter(block_size=16)
    work = DraftMeasurement(ModelBench(drafter, 64), 0.6, Ticks())
    pool = drafter.lm.pool
    while work.progress < 1:
        work.advance()
        pool.check_integrity([])
        assert pool.num_free == pool.num_blocks
        assert not pool._block_of
        assert not drafter.busy
        assert not drafter._resident


def test_a_request_after_measuring_is_drafted_for_as_ever() -> None:
    drafter = tiny.new_drafter(block_size=16)
    finish(DraftMeasurement(ModelBench(drafter, 64), BUDGET))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    sequence = drafter.open(SequenceKey(0, 0), tiny.open_draft(0, prompt))
    sequence.propose(Propose(0, len(prompt), (), 6))
    (answer,) = tiny.run(drafter)
    assert answer.draft.token_ids == tiny.greedy_continuation(prompt, 6)


def test_rounds_differ_in_depth_batch_and_context() -> None:
    samples = finish(DraftMeasurement(ModelBench(tiny.new_drafter(), 64), 0.6, Ticks())).samples
    assert {s.num_draft_tokens for s in samples} == {1, 2, 4, 8}
    assert {s.batch for s in samples} >= {1, 4, 16}
    assert {s.cached_tokens // s.batch for s in samples} == {32}
    long = finish(DraftMeasurement(ModelBench(tiny.new_drafter(block_size=16), 64), 0.6, Ticks())).samples
    assert {s.batch for s in long} == {1, 4, 16, 64}


def test_look_ups_take_one_pass_and_always_find_something() -> None:
    drafter = ngram()
    bench = LookupBench(DrafterKind.NGRAM, drafter, 8, 64)
    costs = finish(DraftMeasurement(bench, 0.6, Ticks()))
    assert costs.single_pass
    assert not drafter.busy
    assert {s.cached_tokens // s.batch for s in costs.samples} == {32, 256, 1024}
    tokens = bench.tokens(33)
    sequence = drafter.open(SequenceKey(0, 0), tiny.open_draft(0, tokens[:-1], drafter=DrafterKind.NGRAM))
    sequence.propose(Propose(0, 32, tokens[-1:], 8))
    (answer,) = drafter.advance()
    assert len(answer.draft.token_ids) == 8


def test_what_is_measured_stays_within_the_drafters_limits() -> None:
    drafter = tiny.new_drafter(num_blocks=30, limits=DraftLimits(max_draft_tokens=3))
    shapes = ModelBench(drafter, 5).shapes()
    assert {(shape.num_draft_tokens, shape.batch) for shape in shapes} == {(1, 1), (2, 1)}
    assert {shape.batch for shape in LookupBench(DrafterKind.NGRAM, ngram(), 8, 5).shapes()} == {1, 4}


def test_a_pool_that_holds_no_round_and_no_budget_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        DraftMeasurement(ModelBench(tiny.new_drafter(num_blocks=4), 64), BUDGET)
    with pytest.raises(InvalidArgumentError, match="seconds"):
        DraftMeasurement(LookupBench(DrafterKind.NGRAM, ngram(), 8, 64), -1.0)


def test_the_model_drafter_gets_most_of_the_budget() -> None:
    assert budgets(benches(both(), 64), 10.0) == pytest.approx([1.0, 9.0])
    assert budgets(benches({DrafterKind.NGRAM: ngram()}, 64), 10.0) == pytest.approx([1.0])


def test_costs_of_all_drafters_are_measured_once_kept_and_reused() -> None:
    costs = calibrate(both(), 64, "auto", BUDGET)
    assert costs.keys() == {DrafterKind.NGRAM, DrafterKind.MODEL}
    assert costs[DrafterKind.NGRAM].round([4]) < costs[DrafterKind.MODEL].round([4])
    path = path_of(draft_key(both()))
    kept = path.read_bytes()
    assert calibrate(both(), 64, "auto", BUDGET) == costs
    assert path.read_bytes() == kept
    found = Calibration.load(path)
    assert found.step is None
    assert {DrafterKind(name): found.drafts[name] for name in found.drafts} == costs
    assert calibrate(both(), 64, "refresh", BUDGET) != costs


def test_without_a_model_look_ups_alone_are_measured_under_another_key() -> None:
    alone: dict[DrafterKind, Drafter] = {DrafterKind.NGRAM: ngram()}
    assert calibrate(alone, 64, "auto", BUDGET).keys() == {DrafterKind.NGRAM}
    assert find(draft_key(both())) is None


def test_a_reduced_vocabulary_is_measured_under_another_key() -> None:
    def key(*token_ids: int) -> Mapping[str, str]:
        model = tiny.reduced_model(token_ids) if token_ids else None
        return draft_key({DrafterKind.MODEL: tiny.new_drafter(model=model)})

    assert key(3, 4, 5) == key(7, 8, 9) != key(3, 4)
    assert "vocabulary" not in key()


def test_off_measures_nothing(tmp_path: Path) -> None:
    assert calibrate(both(), 64, "off", BUDGET) == {}
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_stopped_keeps_nothing(tmp_path: Path) -> None:
    looks = itertools.count()
    drafters = both()
    assert calibrate(drafters, 64, "auto", BUDGET, lambda: next(looks) == 3) == {}
    assert next(looks) == 4
    assert not list(tmp_path.glob("*/*.json"))


def test_a_damaged_file_is_logged_and_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    path = path_of(draft_key(both()))
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert calibrate(both(), 64, "auto", BUDGET)
    assert path.name in caplog.text
    assert Calibration.load(path).drafts


def test_a_drafter_that_can_not_be_measured_leaves_all_costs_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafters: dict[DrafterKind, Drafter] = {DrafterKind.MODEL: tiny.new_drafter(num_blocks=4)}
    assert calibrate(drafters, 64, "auto", BUDGET) == {}
    assert "costs stay unknown" in caplog.text
