"""Where drafts are samples, neither their length nor when they come depends on what was drawn."""

from __future__ import annotations

import pytest

from draft_service.drafting import SequenceKey
from specdecode.types import Method, Propose, SamplingParams
from tests.draft.tiny import VOCAB_SIZE, new_drafter, open_draft

STOPS = tuple(range(0, VOCAB_SIZE, 2))


@pytest.mark.parametrize("method", [Method.REJECTION, Method.BLOCK])
def test_sampled_drafts_take_as_many_turns_as_they_have_tokens(method: Method) -> None:
    drafter = new_drafter()
    sampling = SamplingParams(temperature=1.5, stop_token_ids=STOPS)
    for number in range(12):
        sequence = drafter.open(SequenceKey(0, number), open_draft(number, [1, 3, 5], method, sampling))
        sequence.propose(Propose(number, 3, (), 4))
    answered = [[answer.draft for answer in drafter.advance()] for _ in range(4)]
    assert [len(drafts) for drafts in answered] == [0, 0, 0, 12]
    assert all(len(draft.token_ids) == 4 for draft in answered[-1])
    assert any(token in STOPS for draft in answered[-1] for token in draft.token_ids[:3])
