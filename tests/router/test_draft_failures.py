"""Whatever the draft service does, the text stays the target's own and goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from router.text import Tokenizer
from specdecode.types import Draft, SparseDistributions
from specdecode.wire import piece_from_proto
from tests.router.client import MODEL, NGRAM, PROMPT, greedy, request_for, speculating
from tests.router.scripted import Ask, EndStream, Held, Script, scripted_drafts, unknown_sequence
from tests.services import Answer, Services, eventually

MAX_TOKENS = 60


@pytest.fixture
async def reference(model: Path, byte_level: Tokenizer) -> list[int]:
    """The greedy ids."""
    return greedy(model, byte_level.encode_text(PROMPT), MAX_TOKENS)


def right(reference: Sequence[int], ask: Ask) -> Draft:
    """The drafts that will all be accepted."""
    at = len(ask.tokens) - ask.opened.num_prompt_tokens
    return ask.draft(tuple(reference[at : at + ask.order.num_draft_tokens]))


async def answered(
    model: Path, reference: Sequence[int], script: Script, deadline: float = 10.0, num_draft_tokens: int = 4
) -> tuple[Answer, int]:
    """The greedy answer with drafts by a script, checked to be the reference; and the number of streams."""
    async with (
        scripted_drafts(script) as (service, address),
        Services.started(model, draft_address=address, draft_deadline_seconds=deadline) as services,
    ):
        request = request_for(temperature=0, max_tokens=len(reference))
        answer = await services.generate_one(speculating(request, num_draft_tokens, MODEL))
        assert answer.ids == reference
        assert service.violations == []
        await services.all_is_free()
        return answer, service.num_streams


def accepted(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.num_accepted


async def test_right_drafts_are_accepted_and_each_token_is_told_once(
    model: Path, reference: list[int]
) -> None:
    answer, _ = await answered(model, reference, lambda ask: right(reference, ask))
    assert answer.usage is not None
    assert answer.usage.num_recovered == 0
    assert accepted(answer) >= 0.7 * MAX_TOKENS


def with_q(ask: Ask, prob: float) -> Draft:
    """As many drafts as asked for, each with a support of its own id alone."""
    count = ask.order.num_draft_tokens
    ids = np.arange(9, 9 + count, dtype=np.int32)
    q = SparseDistributions(np.ones(count, dtype=np.int32), ids, np.full(count, prob, np.float32))
    return ask.draft(tuple(ids.tolist()), q=q)


INVALID: dict[str, Callable[[Ask], Draft]] = {
    "too many": lambda ask: ask.draft((9,) * (ask.order.num_draft_tokens + 1)),
    "outside the vocabulary": lambda ask: ask.draft((10**6,)),
    "another length": lambda ask: Draft(ask.order.sequence, len(ask.tokens) + 1, (9,)),
    "q for greedy": lambda ask: with_q(ask, 1.0),
}


@pytest.mark.parametrize("kind", INVALID)
async def test_drafts_that_can_not_be_are_not_used(model: Path, reference: list[int], kind: str) -> None:
    def script(ask: Ask) -> Draft:
        at = len(ask.tokens) - ask.opened.num_prompt_tokens
        return INVALID[kind](ask) if at < 20 else right(reference, ask)

    answer, _ = await answered(model, reference, script)
    assert {"draft_invalid", "speculating"} <= answer.reasons
    assert accepted(answer) > 0


async def test_a_draft_that_does_not_hang_together_is_not_used(model: Path, reference: list[int]) -> None:
    def script(ask: Ask) -> Draft:
        at = len(ask.tokens) - ask.opened.num_prompt_tokens
        whole = with_q(ask, 1.0)
        return replace(whole, token_ids=(*whole.token_ids, 9)) if at < 20 else right(reference, ask)

    answer, _ = await answered(model, reference, script)
    assert {"drafter_unavailable", "speculating"} <= answer.reasons


@pytest.mark.parametrize("prob", [0.5, math.nan, -1.0])
async def test_q_that_is_no_distribution_is_not_used(model: Path, prob: float) -> None:
    async with (
        scripted_drafts(lambda ask: with_q(ask, prob)) as (_, address),
        Services.started(model, draft_address=address) as services,
    ):
        answer = await services.generate_one(
            speculating(request_for(max_tokens=12, ignore_eos=True), 4, MODEL)
        )
        assert answer.usage is not None
        assert (len(answer.ids), answer.usage.num_drafted) == (12, 0)
        assert "draft_invalid" in answer.reasons


async def test_a_draft_that_never_comes_costs_its_deadline_once(model: Path, reference: list[int]) -> None:
    answer, _ = await answered(model, reference, lambda ask: None, deadline=0.2)
    assert "drafter_late" in answer.reasons
    assert answer.reasons <= {"first_token", "drafter_late", "last_token"}
    assert sum(record.seconds >= 0.2 for record in answer.rounds) == 1


async def test_a_draft_that_comes_late_is_dropped_and_drafting_resumes(
    model: Path, reference: list[int]
) -> None:
    asks = []

    def script(ask: Ask) -> Draft | Held:
        asks.append(ask)
        # Wrong on purpose: were it used, the next tokens could not be accepted.
        return Held(ask.draft((9, 9, 9))) if len(asks) == 1 else right(reference, ask)

    async with (
        scripted_drafts(script) as (service, address),
        Services.started(model, draft_address=address, draft_deadline_seconds=0.1) as services,
    ):
        request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, MODEL)
        answer = Answer()
        async for message in services.router.call(request):
            answer.hear(piece_from_proto(message))
            if "drafter_late" in answer.reasons:
                service.send_held()
        assert answer.ids == reference
        assert {"drafter_late", "speculating"} <= answer.reasons
        assert answer.usage is not None
        assert answer.usage.num_recovered == 0
        assert service.violations == []


async def test_the_draft_service_dies_and_drafting_resumes_when_it_is_back(
    model: Path, byte_level: Tokenizer
) -> None:
    # Long, and one draft at a time: the connection must be back before the text is at its end.
    reference = greedy(model, byte_level.encode_text(PROMPT), 240)
    died = []

    def script(ask: Ask) -> Draft:
        at = len(ask.tokens) - ask.opened.num_prompt_tokens
        if at >= 10 and not died:
            died.append(at)
            raise EndStream
        return right(reference, ask)

    answer, num_streams = await answered(model, reference, script, num_draft_tokens=1)
    assert num_streams == 2
    reasons = [record.reason for record in answer.rounds]
    assert "drafter_unavailable" in reasons
    assert "speculating" in reasons[: reasons.index("drafter_unavailable")]
    assert "speculating" in reasons[reasons.index("drafter_unavailable") :]


async def test_a_sequence_that_the_draft_service_forgot_is_opened_again(
    model: Path, reference: list[int]
) -> None:
    forgotten = []

    def script(ask: Ask) -> Draft:
        at = len(ask.tokens) - ask.opened.num_prompt_tokens
        if at >= 10 and not forgotten:
            forgotten.append(at)
            return Draft(ask.order.sequence, len(ask.tokens), error=unknown_sequence())
        return right(reference, ask)

    answer, _ = await answered(model, reference, script)
    reasons = [record.reason for record in answer.rounds]
    gone = reasons.index("drafter_unavailable")
    assert "speculating" in reasons[gone:]


async def test_no_draft_service_is_needed(model: Path, reference: list[int]) -> None:
    async with Services.started(model) as services:
        assert services.drafts is not None
        await services.drafts.stop()
        await services.draft_is(connected=False)
        request = request_for(temperature=0, max_tokens=MAX_TOKENS)
        answer = await services.generate_one(request)
        assert answer.ids == reference
        assert answer.reasons == {"drafter_unavailable", "last_token"} or answer.reasons == {
            "drafter_unavailable"
        }
        await services.restart_drafts()
        await services.draft_is(connected=True)
        again = await services.generate_one(speculating(request, 4, NGRAM))
        assert again.ids == reference
        assert "drafter_unavailable" not in again.reasons


async def test_a_draft_service_that_comes_back_with_another_vocabulary_is_not_used(
    model: Path, foreign_model: Path, reference: list[int]
) -> None:
    async with Services.started(model) as services:
        assert services.drafts is not None
        await services.drafts.stop()
        services.draft_model = foreign_model
        await services.restart_drafts()

        async def has_been_met() -> bool:
            (draft,) = (await services.router.status()).drafts
            return bool(draft.model.fingerprint)

        await eventually(has_been_met, "the router has met the other draft service")
        assert not (await services.router.status()).drafts[0].connected
        answer = await services.generate_one(request_for(temperature=0, max_tokens=MAX_TOKENS))
        assert answer.ids == reference
        assert "speculating" not in answer.reasons
