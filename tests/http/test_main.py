"""The HTTP front of `python -m router` as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import openai
import pytest

from tests.http.conftest import openai_client
from tests.router.client import PROMPT
from tests.router.test_main import log_line, router_process
from tests.services import DEADLINE, start_target


async def test_sigterm_lets_a_stream_finish_before_the_exit(model: Path) -> None:
    async with router_process(model, await start_target(model), http_port=0) as process:
        address = (await log_line(process, "answering HTTP")).split()[-1]
        await log_line(process, "INFO router serving")
        async with openai_client(f"http://{address}") as client:
            stream = await client.completions.create(
                model="",
                prompt=PROMPT,
                seed=1,
                max_tokens=200,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            chunks = aiter(stream)
            await anext(chunks)
            process.send_signal(signal.SIGTERM)
            await log_line(process, "draining")
            usages = [chunk.usage async for chunk in chunks]
            assert usages[-1] is not None
            assert usages[-1].completion_tokens == 200
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 0


async def test_the_api_answers_that_it_is_unavailable_until_a_target_is_there(model: Path) -> None:
    target = await start_target(model)
    await target.stop()
    async with router_process(model, target, http_port=0) as process:
        address = (await log_line(process, "answering HTTP")).split()[-1]
        async with openai_client(f"http://{address}") as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="", prompt=PROMPT)
            assert caught.value.status_code == 503


async def test_a_port_in_use_is_said_and_ends_the_router(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with router_process(model, await start_target(model), http_port=port) as process:
            assert f"http_port: can't listen on 127.0.0.1:{port}" in await log_line(process, "ERROR")
            assert await asyncio.wait_for(process.wait(), DEADLINE) == 1
