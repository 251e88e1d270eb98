"""The client of the router, against real services in this process."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from pathlib import Path

import pytest

from router.text import Tokenizer
from specdecode.client import Completion, RouterClient, total_usage
from specdecode.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from specdecode.requests import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
)
from specdecode.types import DrafterKind, FinishReason
from tests.services import DEADLINE, Services

FOX = TextPrompt("the quick brown fox")


def greedy(max_tokens: int = 12) -> SamplingOptions:
    return SamplingOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def address_of(services: Services) -> str:
    return f"127.0.0.1:{services.router.running.server.port}"


async def complete(client: RouterClient, request: GenerateRequest) -> list[Completion]:
    completions = [Completion(choice) for choice in range(request.n or 1)]
    async for piece in client.generate(request, timeout_seconds=DEADLINE):
        completions[piece.choice].add(piece)
    return completions


async def test_pieces_add_up_to_what_usage_says(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        request = GenerateRequest(FOX, greedy(), n=2, include_rounds=True)
        completions = await complete(client, request)
        for completion in completions:
            assert completion.error is None
            assert completion.finish_reason is FinishReason.LENGTH
            assert completion.usage.num_emitted == len(completion.tokens) == 12
            assert completion.usage.num_rounds == len(completion.rounds)
        assert completions[0].token_ids == completions[1].token_ids
        usage = total_usage(completions)
        assert usage.num_emitted == 24
        assert usage.num_prompt_tokens == completions[0].usage.num_prompt_tokens > 0


async def test_every_kind_of_prompt_is_understood(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        (by_text,) = await complete(client, GenerateRequest(FOX, greedy()))
        ids = Tokenizer(model).encode_text(FOX.text)
        (by_ids,) = await complete(client, GenerateRequest(TokenPrompt(ids), greedy()))
        assert by_ids.token_ids == by_text.token_ids
        (chat,) = await complete(
            client, GenerateRequest(ChatPrompt((ChatMessage("user", FOX.text),)), greedy())
        )
        assert chat.usage.num_prompt_tokens > by_text.usage.num_prompt_tokens


async def test_a_refusal_keeps_its_fields(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        request = GenerateRequest(FOX, SamplingOptions(temperature=-1.0, top_p=2.0))
        with pytest.raises(InvalidArgumentError) as caught:
            await complete(client, request)
        fields = {violation.field for violation in caught.value.violations}
        assert fields == {"sampling.temperature", "sampling.top_p"}


async def test_what_no_message_can_hold_is_refused_here(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        for options in (
            SamplingOptions(top_k=-1),
            SamplingOptions(seed=2**64),
            SamplingOptions(stop=("\ud800",)),
        ):
            with pytest.raises(InvalidArgumentError):
                await complete(client, GenerateRequest(FOX, options))


async def test_leaving_the_loop_frees_the_request(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        async with aclosing(client.generate(GenerateRequest(FOX, greedy(1000)))) as pieces:
            await asyncio.wait_for(anext(pieces), DEADLINE)
        await services.all_is_free()


async def test_a_deadline_ends_the_request_on_both_sides(model: Path) -> None:
    async with Services.started(model) as services, await RouterClient.open(address_of(services)) as client:
        with pytest.raises(DeadlineExceededError):
            async for _ in client.generate(GenerateRequest(FOX, greedy(1000)), timeout_seconds=0.05):
                pass
        await services.all_is_free()


async def test_the_status_tells_models_and_load(model: Path) -> None:
    async with (
        Services.started(model, model) as services,
        await RouterClient.open(address_of(services)) as client,
    ):
        await services.draft_is(connected=True)
        status = await client.get_status()
        (target,), (draft,) = status.targets, status.drafts
        assert (target.address, target.connected) == (services.target.address, True)
        assert target.model is not None
        assert target.load is not None
        assert target.load.num_blocks == target.model.num_blocks > 0
        assert draft.model is not None
        assert draft.model.drafters == (DrafterKind.NGRAM, DrafterKind.MODEL)
        assert draft.model.fingerprint == target.model.fingerprint


async def test_nobody_there_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no router answers at {address}"):
            await asyncio.wait_for(RouterClient.open(address, connect_seconds=DEADLINE), DEADLINE / 2)


async def test_a_peer_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError):
            await RouterClient.open(address, connect_seconds=0.2)
