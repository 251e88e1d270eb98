"""Several steps as one frame, and which steps are held back until there are several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from router.request import _num_rounds
from specdecode.errors import InternalError
from specdecode.requests import LONGEST_PIECE_SECONDS, PIECE_SECONDS
from specdecode.types import (
    FinishReason,
    LoadSnapshot,
    Origin,
    StepFrame,
    StepResult,
    StepTimes,
    TokenLogprobs,
)
from target_service.frames import MIN_LEASE_LEFT, HeldFrames, merged

ROWS = 16
STEP = PIECE_SECONDS * ROWS / 3.5
"""So long that three steps fit into what a frame of so many results may wait."""


def plain(sequence: int, length: int, lease_left: int = 8, token: int | None = None) -> StepResult:
    token_id = length if token is None else token
    times = StepTimes(0.0, length / 10, 0.0, length / 5)
    return StepResult(sequence, length, (token_id,), (Origin.PLAIN,), lease_left=lease_left, times=times)


def frame(step: int, *results: StepResult, seconds: float = STEP) -> StepFrame:
    return StepFrame(step, LoadSnapshot(step_seconds=seconds, num_running=step), results)


def rows(length: int, lease_left: int = 8) -> list[StepResult]:
    return [plain(sequence, length, lease_left) for sequence in range(ROWS)]


# Merging


def test_one_frame_stays_what_it_is() -> None:
    only = frame(3, plain(1, 10))
    assert merged([only]) is only


def test_steps_of_a_lease_become_one_result_in_order() -> None:
    whole = merged([frame(3, plain(1, 10), plain(2, 20)), frame(4, plain(1, 11, 6), plain(2, 21, 5))])
    assert (whole.step, whole.load.num_running) == (4, 4)
    first, second = whole.results
    assert (first.sequence, first.committed_length, first.token_ids) == (1, 11, (10, 11))
    assert first.origins == (Origin.PLAIN, Origin.PLAIN)
    assert (first.lease_left, second.lease_left) == (6, 5)
    assert first.times.forward == pytest.approx(1.05)
    assert first.times.step == pytest.approx(2.1)
    assert _num_rounds(first, first.origins) == 2


def test_logprobs_stay_with_their_tokens_and_cached_tokens_are_told_once() -> None:
    def result(length: int, cached: int) -> StepResult:
        entry = TokenLogprobs(length, -float(length), 1, ())
        return replace(plain(1, length), logprobs=(entry,), num_cached_tokens=cached)

    (whole,) = merged([frame(1, result(10, 7)), frame(2, result(11, 0)), frame(3, result(12, 0))]).results
    assert [entry.token_id for entry in whole.logprobs] == list(whole.token_ids) == [10, 11, 12]
    assert whole.num_cached_tokens == 7


def test_the_end_of_a_lease_is_told_with_it() -> None:
    last = replace(plain(1, 11), finish_reason=FinishReason.STOP)
    (whole,) = merged([frame(1, plain(1, 10)), frame(2, last)]).results
    assert whole.finish_reason is FinishReason.STOP
    assert whole.token_ids == (10, 11)


@pytest.mark.parametrize(
    "other",
    [
        replace(plain(1, 11), num_drafted=2, num_accepted=0, origins=(Origin.RECOVERED,)),
        StepResult(1, 10, error=InternalError("x")),
        replace(plain(1, 11), logprobs=(TokenLogprobs(11, -1.0, 1, ()),)),
    ],
    ids=["a round with drafts", "an error", "with logprobs"],
)
def test_what_is_no_token_of_the_same_lease_stays_a_result_of_its_own(other: StepResult) -> None:
    assert merged([frame(1, plain(1, 10)), frame(2, other)]).results == (plain(1, 10), other)
    after = replace(plain(1, 12), committed_length=12)
    whole = merged([frame(1, plain(1, 10)), frame(2, other), frame(3, after)])
    assert whole.results[0].committed_length == 10
    assert whole.results[1] == other


def test_a_sequence_opened_anew_under_the_same_number_is_not_its_predecessor() -> None:
    ended = replace(plain(1, 11), finish_reason=FinishReason.LENGTH)
    assert merged([frame(1, ended), frame(2, plain(1, 5))]).results == (ended, plain(1, 5))


# Holding back


def test_the_middle_of_leases_is_held_for_a_time_by_the_number_of_results() -> None:
    held = HeldFrames()
    now = 100.0
    sent = []
    for step in range(12):
        now += STEP
        whole = held.take(frame(step, *rows(10 + step)), now)
        if whole is not None:
            sent.append((step, [len(result.token_ids) for result in whole.results]))
    # The first is nobody's successor; later ones go out before the next step would make them too old.
    assert sent == [(0, [1] * ROWS), (3, [3] * ROWS), (6, [3] * ROWS), (9, [3] * ROWS)]


@pytest.mark.parametrize("count", [1, 4])
def test_few_sequences_are_told_at_once(count: int) -> None:
    held = HeldFrames()
    for step in range(5):
        results = rows(10 + step)[:count]
        assert held.take(frame(step, *results, seconds=0.03), 100.0 + 0.03 * step) is not None


def test_however_many_there_are_nobody_waits_longer_than_for_a_piece() -> None:
    held, seconds, many = HeldFrames(), LONGEST_PIECE_SECONDS / 4.5, 100 * ROWS
    sent = []
    for step in range(9):
        results = [plain(sequence, 10 + step) for sequence in range(many)]
        if held.take(frame(step, *results, seconds=seconds), 100.0 + seconds * step) is not None:
            sent.append(step)
    assert sent == [0, 4, 8]


def test_few_are_held_for_the_least_time_there_is() -> None:
    held = HeldFrames(least_seconds=0.025)
    sent = []
    for step in range(6):
        whole = held.take(frame(step, plain(1, 10 + step), seconds=0.012), 100.0 + 0.012 * step)
        if whole is not None:
            sent.append((step, len(whole.results[0].token_ids)))
    assert sent == [(0, 1), (2, 2), (4, 2)]


@pytest.mark.parametrize(
    "change",
    [
        lambda results: [replace(results[0], lease_left=MIN_LEASE_LEFT - 1), *results[1:]],
        lambda results: [replace(results[0], finish_reason=FinishReason.STOP), *results[1:]],
        lambda results: [StepResult(0, 11, error=InternalError("x")), *results[1:]],
        lambda results: [*results, plain(99, 5)],
    ],
    ids=["lease runs out", "ended", "failed", "first token"],
)
def test_whoever_is_waited_for_takes_all_along(
    change: Callable[[list[StepResult]], list[StepResult]],
) -> None:
    held = HeldFrames()
    assert held.take(frame(1, *rows(10)), 100.0) is not None
    assert held.take(frame(2, *rows(11)), 100.0 + STEP) is None
    whole = held.take(frame(3, *change(rows(12))), 100.0 + STEP * 1.1)
    assert whole is not None
    assert [r.token_ids for r in whole.results if r.sequence == 5] == [(11, 12)]


def test_a_clock_set_back_holds_nothing() -> None:
    held = HeldFrames()
    assert held.take(frame(1, *rows(10)), 100.0) is not None
    assert held.take(frame(2, *rows(11)), 50.0) is not None
