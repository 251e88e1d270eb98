"""What clients get, through router, target and draft service over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.text import Tokenizer
from specdecode.requests import ChatMessage, ChatPrompt
from specdecode.types import FinishReason, Origin
from specdecode.v1 import router_service_pb2 as pb
from tests.router import tiny
from tests.router.client import MODEL, NGRAM, PROMPT, greedy, logprobs, request_for, speculating
from tests.router.scripted import scripted_drafts
from tests.services import Answer, Services

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, other_model: Path) -> AsyncIterator[Services]:
    """A draft model that is often wrong, and has half the target's context."""
    async with Services.started(model, other_model) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agreeing(model: Path) -> AsyncIterator[Services]:
    """A draft model that is always right."""
    async with Services.started(model, model) as started:
        yield started


def check_usage(answer: Answer) -> None:
    """Usage, tokens and rounds tell the same story."""
    usage = answer.usage
    assert usage is not None
    assert usage.num_emitted == len(answer.ids)
    by_origin = {origin: [token.origin for token in answer.tokens].count(origin) for origin in Origin}
    assert by_origin == {
        Origin.ACCEPTED: usage.num_accepted,
        Origin.BONUS: usage.num_bonus,
        Origin.RECOVERED: usage.num_recovered,
        Origin.PLAIN: usage.num_plain,
    }
    assert sum(record.num_emitted for record in answer.rounds) == usage.num_emitted
    assert sum(record.num_accepted for record in answer.rounds) == usage.num_accepted
    assert sum(record.num_drafted for record in answer.rounds) == usage.num_drafted
    assert len(answer.rounds) == usage.num_rounds
    assert [record.index for record in answer.rounds] == list(range(usage.num_rounds))


@pytest.mark.parametrize("drafter", [NGRAM, MODEL])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
async def test_greedy_ids_are_those_of_transformers_whatever_is_drafted(
    services: Services, model: Path, byte_level: Tokenizer, drafter: int, num_draft_tokens: int
) -> None:
    prompt = byte_level.encode_text(PROMPT)
    request = speculating(request_for(temperature=0, max_tokens=60), num_draft_tokens, drafter)
    answer = await services.generate_one(request)
    assert answer.ids == greedy(model, prompt, 60)
    assert answer.text == byte_level.decode(answer.ids)
    check_usage(answer)
    await services.all_is_free()


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"banned_token_ids": [10, 11, 12], "min_tokens": 20},
    {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"temperature": 0, "logit_bias": [{"token_id": 40, "bias": 3.0}, {"token_id": 41, "bias": 2.9}]},
]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
async def test_seeded_text_does_not_depend_on_speculation(
    services: Services, agreeing: Services, sampling: dict[str, Any]
) -> None:
    request = request_for(max_tokens=40, seed=2**64 - 1, **sampling)
    off = await services.generate_one(speculating(request, 0, NGRAM))
    for drafter in (NGRAM, MODEL):
        for num_draft_tokens in (1, 3, 8):
            on = await services.generate_one(speculating(request, num_draft_tokens, drafter))
            assert (on.ids, on.text, on.finish_reason) == (off.ids, off.text, off.finish_reason)
            check_usage(on)
    always_right = await agreeing.generate_one(speculating(request, 8, MODEL))
    assert always_right.ids == off.ids


@pytest.mark.parametrize("method", ["METHOD_REJECTION", "METHOD_BLOCK"])
async def test_unseeded_methods_account_for_every_token(services: Services, method: str) -> None:
    for drafter in (NGRAM, MODEL):
        request = speculating(request_for(max_tokens=40, top_k=8), 4, drafter)
        request.speculation.method = method
        answer = await services.generate_one(request)
        assert 1 <= len(answer.ids) <= 40
        check_usage(answer)


async def accepted_run(services: Services, request: Any) -> tuple[Answer, int]:
    """A free-running answer, and the index of a token in the middle of an accepted run that is new there."""
    free = await services.generate_one(request)
    for index in range(6, len(free.ids) - 2):
        inside = all(token.origin is Origin.ACCEPTED for token in free.tokens[index - 1 : index + 2])
        if inside and free.ids[index] not in free.ids[:index]:
            return free, index
    raise AssertionError("no accepted run in this answer")


async def test_a_stop_string_inside_an_accepted_run_cuts_everything_there(
    agreeing: Services, byte_level: Tokenizer
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=60, logprobs=2), 8, MODEL)
    free, index = await accepted_run(agreeing, request)
    before, upto = byte_level.decode(free.ids[:index]), byte_level.decode(free.ids[: index + 1])
    stop = next(upto[start:] for start in range(len(before) - 1, -1, -1) if upto[start:] not in before)
    request.sampling.stop.append(stop)
    answer = await agreeing.generate_one(request)
    assert answer.ids == free.ids[: index + 1]
    assert answer.text == upto[: -len(stop)]
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, stop)
    assert [token.logprobs for token in answer.tokens] == [t.logprobs for t in free.tokens[: index + 1]]
    assert answer.tokens[-1].origin is Origin.ACCEPTED
    check_usage(answer)
    await agreeing.all_is_free()


async def test_a_stop_id_inside_an_accepted_run_is_the_last_id(
    agreeing: Services, byte_level: Tokenizer
) -> None:
    request = speculating(request_for(temperature=0, max_tokens=60), 8, MODEL)
    free, index = await accepted_run(agreeing, request)
    request.sampling.stop_token_ids.append(free.ids[index])
    answer = await agreeing.generate_one(request)
    assert answer.ids == free.ids[: index + 1]
    assert answer.text == byte_level.decode(answer.ids)
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, None)
    check_usage(answer)


@pytest.mark.parametrize("max_tokens", range(1, 12))
async def test_never_one_token_past_max_tokens(
    agreeing: Services, model: Path, byte_level: Tokenizer, max_tokens: int
) -> None:
    prompt = byte_level.encode_text(PROMPT)
    request = speculating(request_for(temperature=0, max_tokens=max_tokens), 4, MODEL)
    answer = await agreeing.generate_one(request)
    assert answer.ids == greedy(model, prompt, max_tokens)
    assert answer.finish_reason is FinishReason.LENGTH
    check_usage(answer)


@pytest.mark.parametrize("drafter", [NGRAM, MODEL])
async def test_streamed_logprobs_belong_to_their_own_token(
    agreeing: Services, model: Path, byte_level: Tokenizer, drafter: int
) -> None:
    prompt = byte_level.encode_text(PROMPT)
    answer = await agreeing.generate_one(
        speculating(request_for(seed=3, max_tokens=30, logprobs=3, temperature=1.3), 4, drafter)
    )
    expected = logprobs(model, prompt, answer.ids)
    for row, token in zip(expected, answer.tokens, strict=True):
        told = token.logprobs
        assert told is not None
        assert told.token_id == token.token_id
        assert told.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        assert told.rank == 1 + int((row > row[token.token_id]).sum())
        assert [top[1] for top in told.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


async def test_no_logprobs_unless_asked_for(services: Services) -> None:
    answer = await services.generate_one(request_for(temperature=0, max_tokens=4))
    assert {token.logprobs for token in answer.tokens} == {None}


async def test_pieces_are_never_taken_back_and_hold_no_half_characters(
    services: Services, byte_level: Tokenizer
) -> None:
    for seed in range(8):
        answer = await services.generate_one(request_for(seed=seed, max_tokens=60, temperature=1.5))
        assert answer.text == byte_level.decode(answer.ids)
        said = 0
        for piece in answer.pieces[:-1]:
            ids = answer.ids[said : said + len(piece.tokens)]
            assert piece.text == byte_level.decode(ids)
            said += len(ids)


async def test_choices_differ_share_the_prompt_and_do_not_depend_on_each_other(services: Services) -> None:
    request = request_for(seed=5, max_tokens=20, temperature=1.5)
    alone = await services.generate_one(request)
    request.n = 4
    answers = await services.generate(request)
    assert answers[0].ids == alone.ids
    assert len({tuple(answer.ids) for answer in answers}) == 4
    usages = [answer.usage for answer in answers if answer.usage is not None]
    assert [usage.num_prompt_tokens > 0 for usage in usages] == [True, False, False, False]
    for answer in answers:
        check_usage(answer)
    await services.all_is_free()


async def test_the_longest_prompt_gives_one_token_and_a_free_run_fills_the_context(
    services: Services, model: Path, byte_level: Tokenizer
) -> None:
    longest = [20 + index % 200 for index in range(255)]
    answer = await services.generate_one(request_for(longest, temperature=0))
    assert answer.ids == greedy(model, longest, 1)
    filled = await services.generate_one(request_for(longest[:100], temperature=0, ignore_eos=True))
    assert len(filled.ids) == 156
    assert filled.finish_reason is FinishReason.LENGTH
    check_usage(filled)


async def test_drafting_stops_where_the_drafts_context_ends_and_text_goes_on(
    services: Services, model: Path
) -> None:
    prompt = [20 + index % 200 for index in range(110)]
    request = speculating(request_for(prompt, temperature=0, max_tokens=60), 4, MODEL)
    answer = await services.generate_one(request)
    assert answer.ids == greedy(model, prompt, 60)
    assert {"speculating", "context_full"} <= answer.reasons
    length = len(prompt)
    for record in answer.rounds:
        assert record.num_drafted == 0 or length + record.num_drafted <= 128
        length += record.num_emitted


async def test_a_prompt_longer_than_the_drafts_context_is_answered_without_drafts(
    services: Services, model: Path
) -> None:
    prompt = [20 + index % 200 for index in range(140)]
    answer = await services.generate_one(
        speculating(request_for(prompt, temperature=0, max_tokens=20), 4, MODEL)
    )
    assert answer.ids == greedy(model, prompt, 20)
    assert answer.reasons == {"context_full"}


async def test_the_first_round_is_a_lease_and_later_ones_say_why(services: Services) -> None:
    request = speculating(request_for(temperature=0, max_tokens=20), 4, MODEL)
    answer = await services.generate_one(request)
    assert answer.rounds[0].reason == "first_token"
    assert answer.rounds[0].num_drafted == 0
    assert answer.reasons <= {"first_token", "speculating", "draft_empty", "last_token"}
    off = await services.generate_one(speculating(request_for(temperature=0, max_tokens=20), 0, NGRAM))
    assert off.reasons == {"request_off"}
    assert {token.origin for token in off.tokens} == {Origin.PLAIN}


async def test_chat_is_answered_after_its_template(
    services: Services, model: Path, byte_level: Tokenizer
) -> None:
    request = pb.GenerateRequest(sampling=pb.SamplingOptions(temperature=0, max_tokens=8))
    request.chat.messages.add(role="user", content="the fox")
    answer = await services.generate_one(request)
    prompt = byte_level.encode_chat(ChatPrompt((ChatMessage("user", "the fox"),)))
    assert prompt[0] == tiny.BOS
    assert answer.ids == greedy(model, prompt, 8)
    assert answer.rounds == []


async def test_blocks_are_shared_within_a_salt_only(services: Services) -> None:
    prompt = [20 + index % 150 for index in range(64)]

    async def cached(salt: bytes) -> int:
        request = request_for(prompt, temperature=0, max_tokens=1)
        request.cache_salt = salt
        answer = await services.generate_one(request)
        assert answer.usage is not None
        return answer.usage.num_cached_tokens

    assert [await cached(b"x"), await cached(b"x"), await cached(b"y")] == [0, 48, 0]


async def test_status_tells_targets_drafts_and_load(services: Services) -> None:
    status = await services.router.status()
    (target,), (draft,) = status.targets, status.drafts
    assert (target.address, target.connected) == (services.target.address, True)
    assert target.model.max_length == 256
    assert target.load.num_blocks == 64
    assert (draft.connected, list(draft.model.drafters)) == (True, [NGRAM, MODEL])
    assert (status.num_requests, target.num_sequences, draft.num_sequences) == (0, 0, 0)


async def test_the_trace_context_of_the_call_reaches_the_draft_service(model: Path) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        scripted_drafts(lambda ask: ask.draft(())) as (service, address),
        Services.started(model, draft_address=address) as services,
    ):
        request = speculating(request_for(temperature=0, max_tokens=4), 4, NGRAM)
        async for _ in services.router.stub.Generate(request, metadata=(("traceparent", traceparent),)):
            pass
        assert {ask.opened.traceparent for ask in service.asks} == {traceparent}
        assert service.asks[0].opened.cache_salt == b""


@pytest.mark.parametrize(
    "said", ["", "garbage", "x" * 20_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01-more"]
)
async def test_what_is_no_trace_context_does_not_travel_on(model: Path, said: str) -> None:
    async with (
        scripted_drafts(lambda ask: ask.draft(())) as (service, address),
        Services.started(model, draft_address=address) as services,
    ):
        request = speculating(request_for(temperature=0, max_tokens=4), 4, NGRAM)
        async for _ in services.router.stub.Generate(request, metadata=(("traceparent", said),)):
            pass
        assert {ask.opened.traceparent for ask in service.asks} == {""}


@pytest.mark.parametrize("lease_tokens", [1, 2, 3, 64])
async def test_text_does_not_depend_on_the_length_of_leases(
    model: Path, byte_level: Tokenizer, lease_tokens: int
) -> None:
    async with Services.started(model, lease_tokens=lease_tokens) as services:
        request = speculating(request_for(temperature=0, max_tokens=50), 0, NGRAM)
        answer = await services.generate_one(request)
        assert answer.ids == greedy(model, byte_level.encode_text(PROMPT), 50)
        assert answer.usage is not None
        assert (answer.usage.num_plain, answer.usage.num_rounds) == (50, 50)
        await services.all_is_free()
