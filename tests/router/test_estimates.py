from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.estimates import (
    ClassKey,
    Estimates,
    EstimatesFile,
    class_key,
    ignores_transforms,
    load,
    offset_bucket,
    save,
    survivals,
    temperature_bucket,
)
from router.history import DrafterHistory
from router.validation import ResolvedRequest
from specdecode.requests import SpeculationMode
from specdecode.types import DrafterKind, FinishReason, Method, SamplingParams, StepResult

NGRAM, MODEL = DrafterKind.NGRAM, DrafterKind.MODEL


def key(
    drafter: DrafterKind = MODEL,
    method: Method = Method.REJECTION,
    temperature: float = 1.0,
    traffic_class: str = "",
    num_output: int = 0,
) -> ClassKey:
    sampling = SamplingParams(temperature=temperature)
    return class_key(drafter, "", method, sampling, traffic_class, num_output)


def alphas(estimates: Estimates, of: ClassKey) -> list[float]:
    return [1 - hazard for hazard in estimates.of(of).hazards]


def observe(estimates: Estimates, of: ClassKey, alpha: list[float], rounds: int) -> None:
    """Rounds whose exact expectations are those of α."""
    reached = np.cumprod([1.0, *alpha])
    for _ in range(rounds):
        estimates.of(of).observe(reached[:-1].tolist(), reached[1:].tolist())


# Classes


def test_alphas_are_learnt_by_position() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9, 0.6, 0.3], 500)
    assert alphas(estimates, key())[:3] == pytest.approx([0.9, 0.6, 0.3], abs=0.02)


def test_a_position_that_was_never_tested_is_believed_to_be_like_the_one_before_it() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9, 0.6], 500)
    assert alphas(estimates, key())[2:] == pytest.approx([alphas(estimates, key())[1]] * 30, abs=0.01)


@pytest.mark.parametrize(
    "other",
    [
        key(traffic_class="code"),
        key(num_output=100),
        key(temperature=0.3),
        key(temperature=0.0, method=Method.GREEDY),
        key(method=Method.BLOCK, traffic_class="x", num_output=1000, temperature=2.0),
    ],
)
def test_a_class_that_was_never_seen_says_what_is_nearest_to_it(other: ClassKey) -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9], 500)
    assert alphas(estimates, other)[0] == pytest.approx(0.9, abs=0.03)


def test_a_class_of_its_own_leaves_its_parent_as_it_is_seen_more() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9], 500)
    gaps = []
    for _ in range(4):
        gaps.append(alphas(estimates, key(traffic_class="code"))[0] - 0.2)
        observe(estimates, key(traffic_class="code"), [0.2], 10)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.15
    assert alphas(estimates, key(traffic_class="mail"))[0] > 0.7


def test_what_is_noted_of_many_requests_counts_once_it_is_settled() -> None:
    noted, observed = Estimates(), Estimates()
    for of in (key(), key(traffic_class="code"), key(num_output=20)):
        for tested, passed in (([1.0, 0.5], [0.5, 0.25]), ([1.0], [0.0]), ([1.0, 1.0, 0.5], [1.0, 0.5, 0.5])):
            noted.note(noted.of(of), tested, passed)
            observed.of(of).observe(tested, passed)
    fresh = alphas(Estimates(), key())
    assert alphas(noted, key()) == fresh
    noted.settle()
    assert alphas(noted, key()) == pytest.approx(alphas(observed, key()))
    settled = alphas(noted, key())
    noted.settle()
    assert alphas(noted, key()) == settled


def test_drafters_learn_apart() -> None:
    estimates = Estimates()
    before = alphas(estimates, key(NGRAM))
    observe(estimates, key(MODEL), [0.95], 500)
    assert alphas(estimates, key(NGRAM)) == before


def test_what_was_learnt_long_ago_fades() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9], 20_000)
    observe(estimates, key(), [0.1], 6_000)
    assert alphas(estimates, key())[0] < 0.2


def test_buckets_split_greedy_from_the_rest_and_grow_with_the_output() -> None:
    assert temperature_bucket(0.0) != temperature_bucket(1e-5)
    assert [offset_bucket(count) for count in (0, 15, 16, 63, 64, 255, 256, 9999)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_labels_of_clients_do_not_fill_the_memory() -> None:
    estimates = Estimates()
    for index in range(10_000):
        estimates.of(key(traffic_class=str(index)))
    assert len(estimates) <= 4096


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(allowed_token_ids=(3,)),
        SamplingParams(banned_token_ids=(3,)),
    ],
)
def test_what_a_lookup_ignores_and_the_model_applies(sampling: SamplingParams) -> None:
    assert ignores_transforms(NGRAM, sampling)
    assert not ignores_transforms(MODEL, sampling)
    assert not ignores_transforms(NGRAM, SamplingParams(temperature=0.3, top_p=0.5))


# Survival


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), max_size=20),
    st.floats(0, 10),
    st.sampled_from(DrafterKind),
)
def test_survival_never_rises_and_is_a_probability(
    rounds: list[list[float]], frailty: float, drafter: DrafterKind
) -> None:
    estimates = Estimates()
    for row in rounds:
        observe(estimates, key(drafter), row, 1)
    (found,) = survivals([estimates.of(key(drafter))], [frailty], 32)
    assert found.shape == (32,)
    assert ((found >= 0) & (found <= 1)).all()
    assert (np.diff(found) <= 0).all()


def test_survival_is_the_product_of_alphas_where_a_request_is_like_its_class() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9, 0.6, 0.3], 500)
    (found,) = survivals([estimates.of(key())], [1.0], 3)
    assert found == pytest.approx(np.cumprod(alphas(estimates, key())[:3]))


# A request's own rounds


def request(**sampling: Any) -> ResolvedRequest:
    return ResolvedRequest(
        prompt_token_ids=(1,),
        sampling=SamplingParams(**sampling),
        stops=(),
        method=Method.REJECTION,
        seed=0,
        n=1,
        mode=SpeculationMode.AUTO,
        num_draft_tokens=None,
        drafter=None,
        include_rounds=False,
        cache_salt=b"",
    )


class History(DrafterHistory):
    """One whose rounds are counted at once."""

    def verified(self, result: StepResult, num_asked: int) -> None:
        super().verified(result, num_asked)
        self._estimates.settle()

    def said_nothing(self) -> None:
        super().said_nothing()
        self._estimates.settle()


def history(estimates: Estimates, drafter: DrafterKind = NGRAM, **sampling: Any) -> History:
    return History(drafter, "", request(**sampling), estimates)


def verified(num_drafted: int, num_accepted: int, finish: FinishReason | None = None) -> StepResult:
    return StepResult(
        1,
        10,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        tested=tuple(float(i <= num_accepted) for i in range(num_drafted)),
        passed=tuple(float(i < num_accepted) for i in range(num_drafted)),
        finish_reason=finish,
    )


def first_survival(of: DrafterHistory, position: int = 0) -> float:
    return float(survivals([of.own_class(0)], [of.frailty], 8)[0, position])


def test_a_copying_request_is_believed_after_two_rounds_and_one_that_stops_is_not_any_more() -> None:
    estimates = Estimates()
    observe(estimates, key(NGRAM), [0.3, 0.8, 0.9, 0.9], 500)
    own = history(estimates)
    assert first_survival(own) == pytest.approx(0.3, abs=0.05)
    for _ in range(2):
        own.verified(verified(4, 4), 4)
    assert first_survival(own) > 0.75
    for _ in range(3):
        own.verified(verified(4, 0), 4)
    assert first_survival(own) < 0.4
    own.verified(verified(4, 0), 4)
    assert first_survival(own) < 0.3


def test_one_request_moves_itself_more_than_its_class() -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.7] * 4, 500)
    own, other = history(estimates, MODEL), history(estimates, MODEL)
    for _ in range(20):
        own.verified(verified(4, 0), 4)
    assert first_survival(own) < 0.35
    assert first_survival(other) > 0.65


def test_a_drafter_with_nothing_to_say_counts_as_one_that_was_not_accepted() -> None:
    estimates = Estimates()
    own = history(estimates)
    for _ in range(50):
        own.said_nothing()
    assert first_survival(own) < 0.05
    assert alphas(estimates, key(NGRAM))[0] < 0.1


def test_a_short_answer_of_a_lookup_ends_where_it_ends() -> None:
    estimates = Estimates()
    own = history(estimates)
    for _ in range(200):
        own.verified(verified(2, 2), 4)
    found = alphas(estimates, key(NGRAM))
    assert min(found[:2]) > 0.9
    assert found[2] < 0.1
    # A model's answer is short only because it was not allowed more.
    model = history(estimates, MODEL)
    for _ in range(200):
        model.verified(verified(2, 2), 4)
    assert alphas(estimates, key(MODEL))[2] > 0.9


def test_requests_that_a_drafter_knows_too_little_of_learn_for_themselves_alone() -> None:
    estimates = Estimates()
    before = alphas(estimates, key(NGRAM))
    own = history(estimates, banned_token_ids=(3,))
    for _ in range(50):
        own.verified(verified(4, 0), 4)
    assert alphas(estimates, key(NGRAM)) == before
    assert first_survival(own) < 0.5 * before[0]


def test_acceptance_is_over_the_last_hundred_tested_positions() -> None:
    own = history(Estimates())
    assert own.acceptance is None
    for _ in range(9):
        own.verified(verified(4, 1), 4)
    assert own.acceptance is None, "18 tested positions say nothing"
    own.verified(verified(4, 1), 4)
    assert own.acceptance == 0.5
    for _ in range(25):
        own.verified(verified(4, 4), 4)
    assert own.acceptance == 1.0


def test_probes_come_ever_more_rarely_until_one_pays() -> None:
    own = history(Estimates(), MODEL)
    output, gaps = 0, []
    for _ in range(8):
        start = output
        while not own.is_probe_due(output):
            output += 1
        gaps.append(output - start)
        own.probed(False, output)
    assert gaps == [16, 32, 64, 128, 256, 512, 512, 512]
    own.probed(True, output)
    assert own.is_probe_due(output)
    own.probed(False, output)
    assert not own.is_probe_due(output + 31)
    assert own.is_probe_due(output + 32)


def test_a_probe_that_pays_forgets_the_acceptance_that_stopped_drafting() -> None:
    own = history(Estimates(), MODEL)
    for _ in range(40):
        own.verified(verified(4, 0), 4)
    assert own.acceptance == 0
    own.probed(True, 100)
    assert own.acceptance is None


# The file


def test_estimates_survive_a_restart(tmp_path: Path) -> None:
    estimates = Estimates()
    observe(estimates, key(), [0.9, 0.6], 100)
    observe(estimates, key(NGRAM, traffic_class="code", num_output=70), [0.4], 100)
    path = tmp_path / "deep" / "estimates.json"
    save(estimates, path)
    again = load(path)
    for of in (key(), key(NGRAM, traffic_class="code", num_output=70), key(temperature=0.1)):
        assert alphas(again, of) == pytest.approx(alphas(estimates, of), abs=1e-4)


CORRUPT = [
    "",
    "{",
    "[]",
    "null",
    '"text"',
    "[" * 100_000,
    '{"format": "specdecode-estimates", "version": 2, "classes": []}',
    '{"format": "other", "version": 1, "classes": []}',
    '{"format": "specdecode-estimates", "version": 1}',
    '{"format": "specdecode-estimates", "version": 1, "classes": 7}',
    '{"format": "specdecode-estimates", "version": 1, "classes": [{}]}',
]
ENTRY = {
    "drafter": "ngram",
    "model": "",
    "method": None,
    "temperature": None,
    "offset": None,
    "traffic_class": None,
    "tested": [1.0],
    "passed": [0.5],
}
BAD_ENTRIES: list[dict[str, Any]] = [
    {"drafter": "oracle"},
    {"method": "luck"},
    {"temperature": -1},
    {"offset": "far"},
    {"traffic_class": 3},
    {"model": None},
    {"tested": [1.0, 1.0]},
    {"tested": [float("nan")]},
    {"passed": [-0.5]},
    {"tested": [1.0] * 33, "passed": [0.5] * 33},
    {"tested": None},
]


def of_entry(**changes: Any) -> str:
    return json.dumps({"format": "specdecode-estimates", "version": 1, "classes": [ENTRY | changes]})


@pytest.mark.parametrize("text", [*CORRUPT, *(of_entry(**changes) for changes in BAD_ENTRIES)])
def test_a_file_that_can_not_be_used_is_logged_and_estimates_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "estimates.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert len(load(path)) == 0
    assert str(path) in caplog.text


def test_the_entry_that_the_bad_ones_are_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "estimates.json"
    path.write_text(of_entry())
    assert len(load(path)) == 1


def test_no_file_is_no_reason_to_complain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load(tmp_path / "none.json")) == 0
    assert caplog.text == ""


def test_a_file_that_can_not_be_written_is_logged_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    kept = EstimatesFile(tmp_path / "file" / "estimates.json")
    observe(kept.estimates, key(), [0.5], 1)
    kept.save()
    assert "can't be written" in caplog.text


def test_memory_alone_keeps_nothing(tmp_path: Path) -> None:
    kept = EstimatesFile(None)
    observe(kept.estimates, key(), [0.5], 1)
    kept.save()
    assert list(tmp_path.iterdir()) == []
