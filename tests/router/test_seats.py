"""What a seat learns from look-ups that were made beside a lease."""

from __future__ import annotations

import pytest

from router.estimates import Estimates
from router.policy import DecisionReason
from router.request import Choice, Round
from router.seats import Foresight, Seat
from router.text import Tokenizer
from specdecode.types import DrafterKind, Origin, StepResult
from tests.router.test_request import PROMPT, new_choice

NGRAM = DrafterKind.NGRAM
LENGTH = len(PROMPT)
LEASED = Round(None, DecisionReason.COST, began=1.0)


@pytest.fixture
def seat(byte_level: Tokenizer) -> Seat:
    seat = Seat(new_choice(byte_level), 1, Estimates())
    seat.history(NGRAM, "")
    return seat


def emit(choice: Choice, *ids: int) -> None:
    length = len(choice.tokens) + len(ids)
    choice.take(StepResult(1, length, ids, (Origin.PLAIN,) * len(ids)), LEASED, now=2.0)


def learnt(seat: Seat) -> tuple[int, int] | str:
    """Accepted and tested; "open" until it is settled, "right" if all was (what was before is forgotten)."""
    history = seat.histories[NGRAM]
    if seat.foresight is not None:
        return "open"
    return (history._num_accepted, history._num_tested) if history._num_tested else "right"


@pytest.mark.parametrize(
    ("emitted", "expected"),
    [
        ([[10], [11], [12]], ["open", "right", "right"]),
        ([[10, 11, 12]], ["right"]),
        ([[10], [99], [12]], ["open", (1, 2), (1, 2)]),
        ([[99], [11]], [(0, 1), (0, 1)]),
    ],
)
def test_what_is_looked_up_is_compared_with_what_is_emitted(
    seat: Seat, emitted: list[list[int]], expected: list[tuple[int, int] | str]
) -> None:
    seat.looked_up(Foresight(NGRAM, LENGTH, (10, 11)))
    seen = []
    for ids in emitted:
        emit(seat.choice, *ids)
        seat.compare_foresight()
        seen.append(learnt(seat))
    assert seen == expected


def test_an_answer_that_comes_late_is_compared_at_once(seat: Seat) -> None:
    emit(seat.choice, 10, 11, 12)
    seat.looked_up(Foresight(NGRAM, LENGTH + 1, (11, 12)))
    assert learnt(seat) == "right"


def test_the_next_look_comes_at_once_after_a_right_one_and_later_after_each_other(
    seat: Seat,
) -> None:
    history = seat.histories[NGRAM]
    pauses = []
    for token_ids in ((), (99, 99), (99, 99), (), (10, 10), (99, 99)):
        start = len(seat.choice.tokens)
        seat.looked_up(Foresight(NGRAM, start, token_ids))
        emit(seat.choice, 10, 10)
        seat.compare_foresight()
        pauses.append(history._probe_at - seat.choice.num_output)
    assert pauses[0] > 0
    assert pauses[1] < pauses[2] <= 32
    assert pauses[4] == 0
    assert 0 < pauses[5] <= pauses[1]


def test_whoever_learns_of_an_empty_look_takes_the_class_along(seat: Seat) -> None:
    before = seat.histories[NGRAM].frailty
    seat.looked_up(Foresight(NGRAM, LENGTH, ()))
    assert seat.histories[NGRAM].frailty > before


@pytest.mark.parametrize("token_ids", [(11, 12), ()])
def test_an_answer_to_the_seat_that_a_choice_had_before_it_moved_says_nothing(
    seat: Seat, token_ids: tuple[int, ...]
) -> None:
    emit(seat.choice, 10, 11, 12)
    moved = Seat(seat.choice, 2, Estimates())  # nothing was decided for it yet
    moved.looked_up(Foresight(NGRAM, LENGTH + 1, token_ids))
    assert moved.foresight is None
    assert not moved.histories
