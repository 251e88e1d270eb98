"""`python -m router` as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from specdecode.serving import connect
from specdecode.tokenizer import fingerprint, load_tokenizer
from specdecode.v1 import router_service_pb2_grpc as router_grpc
from specdecode.wire import piece_from_proto
from tests.router.client import NGRAM, request_for, speculating
from tests.services import DEADLINE, Answer, Target, start_target

LIMIT = 1 << 24


@asynccontextmanager
async def router_process(
    model: Path, target: Target, http_port: int | str = "none"
) -> AsyncIterator[asyncio.subprocess.Process]:
    options = {"model": model, "targets": target.address, "draft": "none", "port": 0, "http-port": http_port}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await target.stop()


async def log_line(process: asyncio.subprocess.Process, marker: str) -> str:
    """The next line of the log that holds `marker`."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE):
        while line := (await process.stderr.readline()).decode():
            if marker in line:
                return line
    raise AssertionError(f"the log ended without {marker!r}")


async def test_a_router_with_a_foreign_target_exits_and_says_both_fingerprints(
    model: Path, foreign_model: Path
) -> None:
    async with router_process(model, await start_target(foreign_model)) as process:
        refusal = await log_line(process, "ERROR")
        assert fingerprint(load_tokenizer(model)) in refusal
        assert fingerprint(load_tokenizer(foreign_model)) in refusal
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 1


async def test_sigterm_lets_what_runs_finish_before_the_exit(model: Path) -> None:
    async with router_process(model, await start_target(model)) as process:
        address = (await log_line(process, "INFO router serving")).split()[-1]
        async with connect(address, LIMIT) as channel:
            stub = router_grpc.RouterServiceStub(channel)
            request = speculating(request_for(seed=1, max_tokens=200, ignore_eos=True), 0, NGRAM)
            answer = Answer()
            call = stub.Generate(request, timeout=DEADLINE)
            answer.hear(piece_from_proto(await call.read()))
            process.send_signal(signal.SIGTERM)
            await log_line(process, "draining")
            while (message := await call.read()) is not grpc.aio.EOF:
                answer.hear(piece_from_proto(message))
            assert len(answer.ids) == 200
        assert await asyncio.wait_for(process.wait(), DEADLINE) == 0
