"""`python -m target_service --tensor-parallel 2`: one service of two processes, which end together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from router.text import Tokenizer
from specdecode.wire import piece_from_proto
from tests.router import tiny
from tests.router.client import PROMPT, greedy, request_for, speculating
from tests.services import Answer, start_router

DEADLINE = 150.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size)


class Service:
    """The process that leads, and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""

    async def read_until(self, line: str) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            while line not in self.log:
                new = (await self.process.stderr.readline()).decode()
                assert new, self.log
                self.log += new

    async def ended(self) -> int:
        """Its exit code; the rest of its log is read."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()

    def others(self) -> list[psutil.Process]:
        """Processes of the other ranks."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@asynccontextmanager
async def service(model: Path, *options: str) -> AsyncIterator[Service]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "target_service", "--port=0", f"--model={model}", "--num-blocks=64"),
        *("--num-threads=1", "--dtype=float32", "--calibration=off", "--tensor-parallel=2", *options),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    started = Service(process)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_two_processes_serve_the_text_of_one_and_end_together(model: Path) -> None:
    async with service(model) as running:
        await running.read_until(" on 127.0.0.1:")
        address = running.log.split()[-1]
        (other,) = running.others()
        router = await start_router(model, [address], None)
        answer = Answer()
        async for message in router.call(speculating(request_for(temperature=0, max_tokens=40), 0, 1)):
            answer.hear(piece_from_proto(message))
        assert answer.ids == greedy(model, Tokenizer(model).encode_text(PROMPT), 40)
        await router.stop()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0, running.log
        assert not other.is_running()


async def test_a_rank_that_is_killed_ends_the_replica(model: Path) -> None:
    async with service(model) as running:
        await running.read_until(" on 127.0.0.1:")
        running.others()[0].kill()
        assert await running.ended() == 1
        assert "a rank of the model ended" in running.log


async def test_a_model_that_can_not_be_dealt_out_is_refused_with_the_reason(model: Path) -> None:
    async with service(model, "--tensor-parallel=3") as running:
        assert await running.ended() == 1
        assert "4 attention heads can't be dealt out to 3 ranks" in running.log
        assert "Traceback" not in running.log
