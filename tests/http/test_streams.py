"""Streams on the socket: split anywhere, many at once, read slowly, left at any time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from router.request import MAX_BUFFERED_TOKENS
from specdecode.lm.runner import Chunk
from tests.http.conftest import openai_client
from tests.router import tiny
from tests.router.client import PROMPT
from tests.router.scripted import scripted_drafts
from tests.router.test_clients import LONG_PROMPT, Gate, is_plain, is_prefill, is_verification, never
from tests.services import DEADLINE, Services, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = {"ignore_eos": True, "temperature": 0}


def request_bytes(services: Services, body: dict[str, Any]) -> bytes:
    """A POST to completions as it goes over the wire."""
    content = json.dumps(body).encode()
    host = services.router.url.removeprefix("http://")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content


@asynccontextmanager
async def connected(
    services: Services, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the HTTP front."""
    host, port = services.router.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_request_may_come_byte_by_byte_and_be_read_so(services: Services) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 2, "stream": True, "n": 2}
    async with httpx2.AsyncClient(timeout=DEADLINE) as web:
        whole = await web.post(f"{services.router.url}/v1/completions", json=body | {"stream": False})
    async with connected(services) as (reader, writer):
        for byte in request_bytes(services, body):
            writer.write(bytes([byte]))
            await writer.drain()
        received = bytearray()
        while byte_read := await asyncio.wait_for(reader.read(1), DEADLINE):
            received += byte_read
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    events = [event.removeprefix("data: ") for event in _unchunked(rest).decode().split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    texts = {0: "", 1: ""}
    for event in events[:-2]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole.json()["choices"]]


def _unchunked(data: bytes) -> bytes:
    """The body of a chunked transfer."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, data = body + data[:length], data[length + 2 :]
        if length == 0:
            break
    return body


async def test_two_hundred_streams_at_once_are_all_right(model: Path) -> None:
    target = {"num_blocks": 1024}
    async with Services.started(model, http_port=0, target=target) as services:
        async with openai_client(services.router.url) as client:
            alone = await client.completions.create(model="", prompt=PROMPT, max_tokens=12, seed=6)

            async def text() -> str:
                stream = await client.completions.create(
                    model="", prompt=PROMPT, max_tokens=12, seed=6, stream=True
                )
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

            texts = await asyncio.gather(*(text() for _ in range(200)))
        assert set(texts) == {alone.choices[0].text}
        await services.all_is_free()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stage", "when", "num_draft_tokens"),
    [("prefill", is_prefill, 0), ("verification", is_verification, 4), ("lease", is_plain, 0)],
)
async def test_leaving_within_a_step_frees_everything_with_the_next(
    model: Path, stage: str, when: Callable[[Sequence[Chunk]], bool], num_draft_tokens: int, stream: bool
) -> None:
    async with Services.started(model, model, http_port=0, target={"prefill_chunk": 64}) as services:
        gate = Gate(services.target, when)
        speculation = {"mode": "on" if num_draft_tokens else "off", "drafter": "model"}
        body = {"prompt": LONG_PROMPT, "max_tokens": 50, "stream": stream, **ENDLESS}
        async with connected(services) as (_, writer):
            writer.write(request_bytes(services, body | {"speculative_decoding": speculation}))
            await gate.holds()
            num_steps = services.target.num_steps
            writer.transport.abort()
            await eventually(lambda: services.target.has_orders, "the target is told while its step runs")
        gate.open()
        await services.all_is_free()
        assert services.target.num_steps == num_steps + 1, stage


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_drafts_are_waited_for_frees_both_services(model: Path, stream: bool) -> None:
    async with (
        scripted_drafts(never) as (service, address),
        Services.started(model, draft_address=address, draft_deadline_seconds=60.0, http_port=0) as services,
    ):
        speculation = {"mode": "on", "drafter": "ngram", "num_draft_tokens": 4}
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": stream, **ENDLESS}
        async with connected(services) as (_, writer):
            writer.write(request_bytes(services, body | {"speculative_decoding": speculation}))
            await asyncio.wait_for(service.asked.wait(), DEADLINE)
            assert len(service.open) == 1
        await services.all_is_free()
        await eventually(lambda: not service.open, "the draft service is told")


async def test_leaving_before_the_request_is_whole_starts_nothing(services: Services) -> None:
    num_steps = services.target.num_steps
    async with connected(services) as (_, writer):
        writer.write(request_bytes(services, {"prompt": PROMPT})[:-5])
        await writer.drain()
    async with httpx2.AsyncClient(timeout=DEADLINE) as web:
        assert (await web.get(f"{services.router.url}/health")).status_code == 200
    assert services.target.num_steps == num_steps
    await services.all_is_free()


async def test_who_does_not_read_is_not_decoded_for_and_holds_nobody_up(model: Path, tmp_path: Path) -> None:
    tiny.save_byte_level_tokenizer(tmp_path)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    tiny.save_llama(tmp_path, vocab_size, max_length=4096)
    target = {"num_blocks": 300}
    async with Services.started(tmp_path, http_port=0, target=target, piece_seconds=0.0) as services:
        # Logprobs make events so large that little of them fits into the sockets' buffers.
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True, "logprobs": 20, **ENDLESS}
        async with connected(services, receive_buffer=4096) as (_, writer):
            writer.write(request_bytes(services, body))
            await eventually(lambda: services.target.num_sequences == 1, "it runs")

            async def stands() -> bool:
                before = services.target.num_steps
                await asyncio.sleep(0.2)
                return services.target.num_steps == before

            await eventually(stands, "the target gets no more orders for it")
            assert services.target.num_steps < 4000 - MAX_BUFFERED_TOKENS
            async with openai_client(services.router.url) as client:
                other = await client.completions.create(
                    model="", prompt=PROMPT, max_tokens=30, extra_body=ENDLESS
                )
            assert other.usage is not None
            assert other.usage.completion_tokens == 30
        await services.all_is_free()


async def test_the_trace_context_reaches_the_draft_service(model: Path) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        scripted_drafts(lambda ask: ask.draft(())) as (service, address),
        Services.started(model, draft_address=address, http_port=0) as services,
        httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web,
    ):
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        body["speculative_decoding"] = {"mode": "on", "drafter": "ngram"}
        for said, expected in ((traceparent, traceparent), ("garbage", "")):
            service.asks.clear()
            answer = await web.post("/v1/completions", json=body, headers={"traceparent": said})
            assert answer.status_code == 200
            assert {ask.opened.traceparent for ask in service.asks} == {expected}


@pytest.mark.parametrize("grace", [60.0, 0.0])
async def test_a_drain_lets_streams_finish_and_tells_those_that_may_not(model: Path, grace: float) -> None:
    async with Services.started(model, http_port=0) as services:
        async with openai_client(services.router.url) as client:
            stream = await client.completions.create(
                model="", prompt=PROMPT, max_tokens=200, stream=True, extra_body=ENDLESS
            )
            chunks = aiter(stream)
            await anext(chunks)
            drain = asyncio.create_task(services.router.running.drain(grace))
            if grace:
                reasons = [choice.finish_reason async for chunk in chunks for choice in chunk.choices]
                assert reasons[-1] == "length"
            else:
                with pytest.raises(openai.APIError, match="the router stops"):
                    async for _ in chunks:
                        pass
            await asyncio.wait_for(drain, DEADLINE)
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()
        await services.all_is_free()
