from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import (
    Decision,
    DecisionReason,
    DrafterState,
    DueSequence,
    choose_drafter,
    decide,
)
from specdecode.types import DrafterKind, LoadSnapshot

NGRAM, MODEL = DrafterKind.NGRAM, DrafterKind.MODEL
LEASE = 16
READY = DueSequence(
    speculates=True,
    num_draft_tokens=4,
    drafter=NGRAM,
    drafter_state=DrafterState.READY,
    drafter_room=None,
    num_remaining=100,
)


def decided(**changes: Any) -> Decision:
    (decision,) = decide([dataclasses.replace(READY, **changes)], LoadSnapshot(), LEASE)
    return decision


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Decision(4, NGRAM, DecisionReason.SPECULATING)),
        ({"num_remaining": 4}, Decision(3, NGRAM, DecisionReason.SPECULATING)),
        ({"num_remaining": 1}, Decision(0, None, DecisionReason.LAST_TOKEN, 1)),
        ({"drafter": MODEL, "drafter_room": 2}, Decision(2, MODEL, DecisionReason.SPECULATING)),
        ({"drafter": MODEL, "drafter_room": 0}, Decision(0, None, DecisionReason.CONTEXT_FULL, 16)),
        ({"drafter": MODEL, "drafter_room": -9}, Decision(0, None, DecisionReason.CONTEXT_FULL, 16)),
        ({"opening": True}, Decision(0, NGRAM, DecisionReason.FIRST_TOKEN, 1)),
        ({"opening": True, "num_remaining": 1}, Decision(0, None, DecisionReason.LAST_TOKEN, 1)),
        ({"opening": True, "speculates": False}, Decision(0, None, DecisionReason.REQUEST_OFF, 16)),
        ({"speculates": False}, Decision(0, None, DecisionReason.REQUEST_OFF, 16)),
        ({"speculates": False, "lease_left": 8}, Decision(0, None, DecisionReason.REQUEST_OFF, 16)),
        ({"speculates": False, "num_remaining": 5}, Decision(0, None, DecisionReason.REQUEST_OFF, 5)),
        ({"num_draft_tokens": 0}, Decision(0, None, DecisionReason.CAPPED, 16)),
        ({"drafter": None}, Decision(0, None, DecisionReason.NO_DRAFTER, 16)),
        (
            {"drafter": None, "drafter_state": DrafterState.UNAVAILABLE},
            Decision(0, None, DecisionReason.DRAFTER_UNAVAILABLE, 4),
        ),
        ({"drafter_state": DrafterState.LATE}, Decision(0, None, DecisionReason.DRAFTER_LATE, 4)),
        ({"lease_left": 3}, Decision(0, NGRAM, DecisionReason.LEASE)),
    ],
)
def test_each_situation_has_its_decision_and_reason(changes: dict[str, Any], expected: Decision) -> None:
    assert decided(**changes) == expected


def test_decisions_come_in_the_order_of_the_sequences() -> None:
    due = [dataclasses.replace(READY, num_draft_tokens=count) for count in (3, 0, 1)]
    assert [decision.num_draft_tokens for decision in decide(due, LoadSnapshot(), LEASE)] == [3, 0, 1]


@given(
    due=st.builds(
        DueSequence,
        speculates=st.booleans(),
        num_draft_tokens=st.integers(0, 32),
        drafter=st.sampled_from([None, NGRAM, MODEL]),
        drafter_state=st.sampled_from(DrafterState),
        drafter_room=st.one_of(st.none(), st.integers(-5, 50)),
        num_remaining=st.integers(1, 60),
        opening=st.booleans(),
        lease_left=st.integers(0, 16),
    )
)
def test_no_decision_goes_beyond_max_tokens_or_the_drafters_context_and_none_is_stuck(
    due: DueSequence,
) -> None:
    (decision,) = decide([due], LoadSnapshot(), LEASE)
    assert decision.num_draft_tokens <= max(due.num_remaining - 1, 0)
    assert decision.num_draft_tokens <= due.num_draft_tokens
    if due.drafter_room is not None:
        assert decision.num_draft_tokens <= max(due.drafter_room, 0)
    assert 0 <= decision.num_lease_tokens <= due.num_remaining
    assert bool(decision.num_draft_tokens) + bool(decision.num_lease_tokens) <= 1
    goes_on = decision.num_draft_tokens or decision.num_lease_tokens or due.lease_left
    assert goes_on, "a sequence without an order waits for ever"


@pytest.mark.parametrize(
    ("asked", "default", "offered", "chosen"),
    [
        (NGRAM, MODEL, {NGRAM, MODEL}, NGRAM),
        (None, NGRAM, {NGRAM, MODEL}, NGRAM),
        (None, None, {NGRAM, MODEL}, MODEL),
        (None, None, {NGRAM}, NGRAM),
        (None, None, set(), None),
        (MODEL, None, {NGRAM}, None),
        (None, MODEL, {NGRAM}, None),
    ],
)
def test_the_request_chooses_its_drafter_then_the_operator_then_what_is_offered(
    asked: DrafterKind | None, default: DrafterKind | None, offered: set[DrafterKind], chosen: DrafterKind
) -> None:
    assert choose_drafter(asked, default, offered) is chosen
