"""What the services are told of a choice: all that its text, its noise and its penalties depend on."""

from __future__ import annotations

import pytest

from router import drafts, rounds
from router.estimates import Estimates
from router.request import Choice, Request
from router.seats import Seat
from router.text import Tokenizer
from router.validation import ResolvedRequest
from specdecode.requests import SpeculationMode
from specdecode.types import DrafterKind, Method, OpenDraft, OpenSequence, SamplingParams

PROMPT, OUTPUT = (5, 6, 7), (8, 9)
SAMPLING = SamplingParams(temperature=0.7, frequency_penalty=0.5, max_tokens=100, min_tokens=4)


@pytest.fixture
def choice(byte_level: Tokenizer) -> Choice:
    """The third of a request's choices, two tokens after its prompt."""
    resolved = ResolvedRequest(
        prompt_token_ids=PROMPT,
        sampling=SAMPLING,
        stops=(),
        method=Method.COUPLED,
        seed=2**64 - 5,
        n=3,
        mode=SpeculationMode.AUTO,
        num_draft_tokens=4,
        drafter=None,
        include_rounds=False,
        cache_salt=b"tenant",
    )
    made = Request("request", resolved, byte_level, deadline=99.0).choices[2]
    made.tokens += OUTPUT
    return made


def check(order: OpenSequence | OpenDraft) -> None:
    assert order.token_ids == (*PROMPT, *OUTPUT)
    assert order.num_prompt_tokens == len(PROMPT)
    assert order.sampling == SAMPLING
    assert (order.method, order.seed, order.choice_index) == (Method.COUPLED, 2**64 - 5, 2)
    assert order.cache_salt == b"tenant"


def test_a_target_is_told_all_of_a_choice_that_goes_on_there(choice: Choice) -> None:
    order = rounds._open_order(Seat(choice, 4, Estimates()), trust_draft=False)
    assert (order.sequence, order.deadline, order.trust_draft) == (4, 99.0, False)
    check(order)


def test_a_drafter_is_told_what_the_target_is_told(choice: Choice) -> None:
    order = drafts._open_order(drafts.DraftSeat(choice, DrafterKind.NGRAM), 6)
    assert (order.sequence, order.drafter) == (6, DrafterKind.NGRAM)
    check(order)
