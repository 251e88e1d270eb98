"""Clients that do not read: paused, then without KV, then cut off, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.text import Tokenizer
from specdecode.errors import Reason
from specdecode.serving import error_from_rpc
from specdecode.wire import piece_from_proto
from tests.router import tiny
from tests.router.client import MODEL, NGRAM, PROMPT, greedy, request_for, speculating
from tests.router.test_clients import narrow_channel
from tests.services import DEADLINE, Answer, Services, eventually, refusal

MAX_TOKENS = 1800


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context that no buffer on the way to a client holds."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("roomy"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size, max_length=2048)


def long_request() -> Any:
    return request_for(temperature=0, max_tokens=MAX_TOKENS, logprobs=20, ignore_eos=True)


def rooms(model: Path, **settings: Any) -> Any:
    return Services.started(model, model, target={"num_blocks": 256}, draft={"num_blocks": 256}, **settings)


@pytest.mark.parametrize(("drafter", "num_draft_tokens"), [(NGRAM, 0), (MODEL, 3)])
async def test_a_text_nobody_reads_gives_its_kv_back_and_goes_on_unchanged_once_it_is_read(
    roomy_model: Path, drafter: int, num_draft_tokens: int
) -> None:
    tokens = Tokenizer(roomy_model).encode_text(PROMPT)
    expected = greedy(roomy_model, tokens, 20)
    async with rooms(roomy_model, park_seconds=0.05) as services, narrow_channel(services) as stub:
        await services.draft_is(True)
        call = stub.Generate(speculating(long_request(), num_draft_tokens, drafter))
        answer = Answer()
        answer.hear(piece_from_proto(await call.read()))
        await services.all_is_free()
        assert (await services.router.status()).num_requests == 1
        quick = await services.generate_one(request_for(temperature=0, max_tokens=20))
        assert quick.ids == expected
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.hear(piece_from_proto(message))
        await services.all_is_free()
        plain = await services.generate_one(speculating(long_request(), 0, NGRAM))
    assert answer.ids == plain.ids
    assert len(answer.ids) == MAX_TOKENS
    assert answer.usage is not None
    assert answer.usage.num_preemptions >= 1
    assert answer.usage.num_failovers == 0
    assert answer.usage.num_cached_tokens == 0


async def test_a_client_that_leaves_while_its_text_waits_leaves_nothing(roomy_model: Path) -> None:
    async with rooms(roomy_model, park_seconds=0.05) as services, narrow_channel(services) as stub:
        call = stub.Generate(speculating(long_request(), 0, NGRAM))
        await call.read()
        await services.all_is_free()
        call.cancel()

        async def is_counted() -> bool:
            return bool((await services.router.status()).num_requests == 0)

        await eventually(is_counted, "the request has ended")
        assert len((await services.generate_one(request_for(max_tokens=1))).ids) == 1
        await services.all_is_free()


async def test_a_client_that_never_reads_is_cut_off_and_told_so(roomy_model: Path) -> None:
    async with (
        rooms(roomy_model, park_seconds=0.05, stuck_seconds=0.5) as services,
        narrow_channel(services) as stub,
    ):
        call = stub.Generate(speculating(long_request(), 0, NGRAM))
        await call.read()

        async def has_ended() -> bool:
            return bool((await services.router.status()).num_requests == 0)

        await eventually(has_ended, "the request has been ended")
        await services.all_is_free()
        error = error_from_rpc(await asyncio.wait_for(refusal(call), DEADLINE))
        assert error.reason is Reason.CLIENT_TOO_SLOW
        assert len((await services.generate_one(request_for(max_tokens=1))).ids) == 1


async def test_an_http_client_that_never_reads_is_cut_off(roomy_model: Path) -> None:
    settings = {"park_seconds": 0.05, "stuck_seconds": 0.5, "http_port": 0}
    async with rooms(roomy_model, **settings) as services:
        body = (
            b'{"prompt": "the fox", "max_tokens": 1800, "stream": true, "temperature": 0, "ignore_eos": true,'
            b' "logprobs": 20}'
        )
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        port = int(services.router.url.rsplit(":", 1)[1])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)

            async def has_begun() -> bool:
                return bool((await services.router.status()).num_requests == 1)

            async def has_ended() -> bool:
                return bool((await services.router.status()).num_requests == 0)

            await eventually(has_begun, "the request runs")
            await eventually(has_ended, "the request has been ended")
            await services.all_is_free()
