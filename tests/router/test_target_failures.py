"""A target that is lost costs time, never text."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import router.__main__ as router_main
from router.text import Tokenizer
from specdecode.config import RouterSettings
from specdecode.errors import FailedPreconditionError, Reason, UnavailableError
from specdecode.serving import error_from_rpc
from specdecode.tokenizer import fingerprint, load_tokenizer
from specdecode.wire import piece_from_proto
from target_service.engine import StepOutcome
from tests.router.client import MODEL, NGRAM, PROMPT, greedy, request_for, speculating
from tests.services import DEADLINE, Answer, Services, eventually, refusal, start_drafts, start_target

MAX_TOKENS = 200


async def answer_while(services: Services, request: Any, num_tokens: int, event: Any) -> Answer:
    """The answer to a request, with `event` awaited once that many tokens have come."""
    answer = Answer()
    happened = False
    async for message in services.router.call(request):
        answer.hear(piece_from_proto(message))
        if not happened and len(answer.ids) >= num_tokens:
            happened = True
            await event()
    assert happened
    return answer


def home_of(services: Services) -> int:
    """Index of the target that has a sequence."""
    (index,) = [i for i, target in enumerate(services.targets) if target.num_sequences]
    return index


VARIANTS = [
    pytest.param({"temperature": 0}, 0, NGRAM, id="greedy-off"),
    pytest.param({"temperature": 0}, 4, MODEL, id="greedy-model"),
    pytest.param({"seed": 7, "top_k": 30}, 3, MODEL, id="seeded-model"),
    pytest.param(
        {"seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.4, "min_tokens": 150},
        3,
        NGRAM,
        id="seeded-penalties",
    ),
]


@pytest.mark.parametrize(("sampling", "num_draft_tokens", "drafter"), VARIANTS)
async def test_text_goes_on_on_another_target_without_a_token_lost_or_told_twice(
    model: Path, other_model: Path, sampling: dict[str, Any], num_draft_tokens: int, drafter: int
) -> None:
    request = speculating(request_for(max_tokens=MAX_TOKENS, **sampling), num_draft_tokens, drafter)
    async with Services.started(model, other_model, num_targets=2) as services:
        undisturbed = await services.generate_one(request)

        async def lose() -> None:
            await services.targets[home_of(services)].stop()

        answer = await answer_while(services, request, 10, lose)
        assert answer.ids == undisturbed.ids
        assert answer.text == undisturbed.text
        assert answer.usage is not None
        assert answer.usage.num_failovers == 1
        assert answer.usage.num_emitted == len(answer.ids)
        assert sum(record.num_emitted for record in answer.rounds) == len(answer.ids)


async def test_text_goes_on_when_the_only_target_is_back(model: Path, byte_level: Tokenizer) -> None:
    prompt = byte_level.encode_text(PROMPT)
    request = speculating(request_for(temperature=0, max_tokens=MAX_TOKENS), 4, NGRAM)
    async with Services.started(model) as services:

        async def lose_and_bring_back() -> None:
            await services.target.stop()
            await services.restart_target()

        answer = await answer_while(services, request, 10, lose_and_bring_back)
        assert answer.ids == greedy(model, prompt, MAX_TOKENS)
        assert answer.usage is not None
        assert answer.usage.num_failovers == 1
        await services.all_is_free()


async def test_all_choices_of_a_lost_target_go_on(model: Path) -> None:
    request = speculating(request_for(seed=3, max_tokens=MAX_TOKENS), 2, NGRAM)
    request.n = 3
    async with Services.started(model, num_targets=2) as services:
        undisturbed = [answer.ids for answer in await services.generate(request)]
        answers = [Answer() for _ in range(3)]
        lost = False
        async for message in services.router.call(request):
            piece = piece_from_proto(message)
            answers[piece.choice].hear(piece)
            if not lost and piece.choice == 2:
                lost = True
                await services.targets[home_of(services)].stop()
        assert [answer.ids for answer in answers] == undisturbed


async def test_a_target_that_stays_away_ends_its_requests_with_what_was_said(model: Path) -> None:
    request = request_for(temperature=0, max_tokens=MAX_TOKENS)
    async with Services.started(model, failover_seconds=0.3) as services:
        call = services.router.call(request)
        await call.read()
        await services.target.stop()
        error = error_from_rpc(await refusal(call))
        assert isinstance(error, UnavailableError)
        assert error.reason is Reason.REPLICA_LOST
        assert error.retry_after is not None
        late = error_from_rpc(await refusal(services.router.call(request)))
        assert late.reason is Reason.NO_REPLICA
        assert (await services.router.status()).num_requests == 0


async def test_a_target_that_drains_finishes_what_runs_and_gets_nothing_new(model: Path) -> None:
    request = request_for(seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    async with Services.started(model, num_targets=2) as services:
        undisturbed = await services.generate_one(request)
        draining: list[asyncio.Task[None]] = []

        async def drain() -> None:
            target = services.targets[home_of(services)]
            draining.append(asyncio.create_task(target.server.drain(DEADLINE)))
            await target.server.draining.wait()
            others = [await services.generate_one(request) for _ in range(3)]
            assert [other.ids for other in others] == [undisturbed.ids] * 3

        answer = await answer_while(services, request, 10, drain)
        assert answer.ids == undisturbed.ids
        assert answer.usage is not None
        assert answer.usage.num_failovers == 0
        async with asyncio.timeout(DEADLINE):
            await draining[0]


async def test_the_last_tokens_are_told_before_a_drained_stream_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(seed=1, max_tokens=4, ignore_eos=True)
    async with Services.started(model) as services:
        undisturbed = await services.generate_one(request)
        loop, step_ended, may_tell = services.target.loop, threading.Event(), threading.Event()
        deliver = loop._deliver

        def deliver_late(outcome: StepOutcome) -> None:
            if any(result.ended for _, result in outcome.results):
                step_ended.set()
                may_tell.wait(DEADLINE)
            deliver(outcome)

        monkeypatch.setattr(loop, "_deliver", deliver_late)
        answering = asyncio.create_task(services.generate_one(request))
        assert await asyncio.to_thread(step_ended.wait, DEADLINE)
        services.target.server.draining.set()
        # The stream's handler sees the drain before the engine's thread goes on.
        await eventually(lambda: services.target.has_orders, "the engine was told of the drain")
        may_tell.set()
        answer = await answering
        assert answer.ids == undisturbed.ids
        assert answer.usage is not None
        assert answer.usage.num_failovers == 0


async def test_new_requests_wait_for_a_target_that_is_restarting(model: Path, byte_level: Tokenizer) -> None:
    async with Services.started(model) as services:
        await services.target.stop()

        async def is_noticed() -> bool:
            return not (await services.router.status()).targets[0].connected

        await eventually(is_noticed, "the router notices that the target is gone")
        waiting = asyncio.create_task(services.generate_one(request_for(temperature=0, max_tokens=5)))
        await services.restart_target()
        assert (await waiting).ids == greedy(model, byte_level.encode_text(PROMPT), 5)


@pytest.mark.parametrize("foreign", ["target", "draft"])
async def test_a_pair_of_different_vocabularies_is_refused_at_start_with_both_fingerprints(
    model: Path, foreign_model: Path, foreign: str
) -> None:
    target = await start_target(foreign_model if foreign == "target" else model)
    drafts = await start_drafts(foreign_model if foreign == "draft" else model)
    settings = RouterSettings(
        model=str(model), port=0, http_port=None, targets=(target.address,), draft=drafts.address
    )
    try:
        with pytest.raises(FailedPreconditionError) as caught:
            await asyncio.wait_for(router_main.start(settings), DEADLINE)
        assert caught.value.reason is Reason.VOCABULARY_MISMATCH
        for path in (model, foreign_model):
            assert fingerprint(load_tokenizer(path)) in caught.value.message
    finally:
        await target.stop()
        await drafts.stop()
