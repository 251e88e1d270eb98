"""Messages that nobody means, on all three services: no crash, no hang, no leak, others' texts the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.message import Message

from router.http.bodies import ChatBody, CompletionBody
from router.text import Tokenizer
from specdecode.serving import connect
from specdecode.v1 import draft_service_pb2, router_service_pb2, target_service_pb2
from tests.fuzz.messages import Maker
from tests.fuzz.watching import bounded, watched
from tests.services import DEADLINE, Services

MESSAGES = bounded("FUZZ_MESSAGES", 1500)
"""In all, over the services."""
SEED = bounded("FUZZ_SEED", 1)
MAX_MESSAGE_BYTES = 1 << 24
# What a client may be told; everything else would be a failure of ours.
CLIENTS_FAULT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


WRITTEN_AFTER_THE_END = "Internal error from Core"
"""What grpc.aio's client makes of a write that meets the end of the stream."""


async def abuse_stream(address: str, method: str, kind: type[Message], maker: Maker, count: int) -> None:
    """Sends messages on streams of one method, a new one whenever it is ended."""
    async with connect(address, MAX_MESSAGE_BYTES) as channel:
        while count > 0:
            call = channel.stream_stream(method)(timeout=DEADLINE)
            reader = asyncio.create_task(read_all(call))
            for _ in range(maker.rng.randint(1, 30)):
                count -= 1
                try:
                    await call.write(maker.data(kind))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break
            else:
                if maker.rng.random() < 0.5:
                    await call.done_writing()
                    await asyncio.sleep(0)
            call.cancel()
            await reader
            details = await call.details()
            code = await call.code()  # what a write that came too late made of it may be told before
            assert code in CLIENTS_FAULT or details == WRITTEN_AFTER_THE_END, (method, code, details)


async def read_all(call: Any) -> grpc.StatusCode:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()  # type: ignore[no-any-return]


async def abuse_calls(address: str, maker: Maker, count: int) -> None:
    """Sends requests to the router's own methods."""
    kinds: dict[str, type[Message]] = {
        "Generate": router_service_pb2.GenerateRequest,
        "GetStatus": router_service_pb2.GetStatusRequest,
        "GetFigures": router_service_pb2.GetFiguresRequest,
        "GetPolicy": router_service_pb2.GetPolicyRequest,
    }
    async with connect(address, MAX_MESSAGE_BYTES) as channel:
        for _ in range(count):
            name = maker.rng.choice(["Generate"] * 9 + list(kinds))
            data = maker.data(kinds[name])
            path = f"/specdecode.v1.RouterService/{name}"
            call: Any = channel.unary_stream(path)(data, timeout=DEADLINE)
            if maker.rng.random() < 0.2:
                call.cancel()
            code = await read_all(call)
            assert code in CLIENTS_FAULT, (name, data, code, await call.details())


@pytest.mark.timeout(24 * 3600)
async def test_messages_that_nobody_means_hurt_nobody(model: Path, byte_level: Tokenizer) -> None:
    makers = [Maker(SEED * 10 + number, byte_level.vocab_size) for number in range(3)]
    count = MESSAGES // 3
    async with watched(model) as services:
        assert services.drafts is not None
        router = f"127.0.0.1:{services.router.running.server.port}"
        decode, draft = "/specdecode.v1.TargetService/Decode", "/specdecode.v1.DraftService/Draft"
        await asyncio.gather(
            abuse_stream(services.target.address, decode, target_service_pb2.DecodeRequest, makers[0], count),
            abuse_stream(services.drafts.address, draft, draft_service_pb2.DraftRequest, makers[1], count),
            abuse_calls(router, makers[2], count // 5),
        )


def bodies(maker: Maker) -> bytes:
    """A JSON body whose values nobody means, or that is none."""
    rng = maker.rng
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        3.5,
        1e308,
        2**70,
        "",
        "the fox",
        "\x00",
        [],
        {},
        [1],
        ["a"] * 40,
    ]
    names = sorted({*ChatBody.model_fields, *CompletionBody.model_fields} - {"stream"})
    body = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, 6))}
    if rng.random() < 0.6:
        body |= {"prompt": "the fox", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        body["n"] = 1
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        at = rng.randrange(len(data))
        data[at : at + 3] = rng.randbytes(3)
    return bytes(data)


@pytest.mark.timeout(24 * 3600)
async def test_bodies_that_nobody_means_hurt_nobody(model: Path, byte_level: Tokenizer) -> None:
    maker = Maker(SEED, byte_level.vocab_size)
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    async with (
        watched(model, http_port=0) as services,
        httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as web,
    ):
        for _ in range(MESSAGES // 10):
            path, data = maker.rng.choice(paths), bodies(maker)
            answer = await web.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404, 413, 415, 422, 429), (path, data, answer.text)


RAW = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
)
PREFACE = RAW[-1]


async def send_raw(port: int, data: bytes) -> None:
    """Sends bytes, reads what comes for a moment, and goes away without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(0.05):
            await reader.read(65536)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()


@pytest.mark.timeout(24 * 3600)
async def test_bytes_that_are_no_protocol_hurt_nobody(model: Path, byte_level: Tokenizer) -> None:
    rng = Maker(SEED, byte_level.vocab_size).rng
    async with watched(model, http_port=0) as services:
        assert services.drafts is not None
        servers = (services.router.running.server, services.target.server, services.drafts.server)
        ports = [*(server.port for server in servers), int(services.router.url.rsplit(":", 1)[1])]
        for number in range(max(MESSAGES // 10, 40)):
            data = rng.choice(RAW) + rng.randbytes(rng.choice((0, 1, 9, 100, 5000)))
            await send_raw(ports[number % 4], data)


@pytest.mark.parametrize("service", ["target", "draft"])
async def test_bytes_that_are_no_message_end_their_stream_with_the_reason(model: Path, service: str) -> None:
    async with Services.started(model, model) as services:
        assert services.drafts is not None
        address = services.target.address if service == "target" else services.drafts.address
        name = "TargetService/Decode" if service == "target" else "DraftService/Draft"
        async with connect(address, MAX_MESSAGE_BYTES) as channel:
            call: Any = channel.stream_stream(f"/specdecode.v1.{name}")(timeout=DEADLINE)
            await call.write(b"\xff\xff\xff")
            assert await read_all(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert "request: is no D" in await call.details()
        await services.all_is_free()


async def test_who_floods_with_pings_is_disconnected(model: Path) -> None:
    async with Services.started(model, model) as services:
        for server in (services.router.running.server, services.target.server):
            async with asyncio.timeout(DEADLINE):
                await flood(server.port)


async def flood(port: int) -> None:
    """Sends pings until the connection is ended."""
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    try:
        while True:
            writer.write(ping)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    if not await reader.read(65536):
                        return
    except ConnectionError:
        return
    finally:
        writer.transport.abort()
