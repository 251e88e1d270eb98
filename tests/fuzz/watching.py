"""What must hold while services are abused: others' texts stay the same, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import DEADLINE, Services, eventually


def bounded(name: str, usual: int) -> int:
    """How much is done: `usual`, or what the environment says (FUZZ_MESSAGES=200000)."""
    return int(os.environ.get(name, usual))


class Bystander:
    """Somebody else's requests, over and over: a seeded and a greedy one, with drafts and without."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._requests = [
            speculating(request_for(temperature=0, max_tokens=24), 4, MODEL),
            speculating(request_for(seed=7, max_tokens=24, ignore_eos=True), 3, NGRAM),
        ]
        self._expected: list[list[int]] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Learns what the texts are, and goes on asking for them."""
        self._expected = [(await self._services.generate_one(r)).ids for r in self._requests]
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self.check()

    async def check(self) -> None:
        """Asks once and compares."""
        for request, expected in zip(self._requests, self._expected, strict=True):
            async with asyncio.timeout(DEADLINE):
                answer = await self._services.generate_one(request)
            assert answer.ids == expected

    async def end(self) -> None:
        """Stops asking; raises what went wrong."""
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._task.cancelled():
            self._task.result()


@asynccontextmanager
async def watched(model: Path, **settings: Any) -> AsyncIterator[Services]:
    """Services that somebody else uses all the time; at the end all is as it was."""
    roomy = {"num_blocks": 256, "max_waiting": 64}
    async with Services.started(
        model, model, target=roomy, draft={"num_blocks": 256, "suffix_tokens": 2000}, **settings
    ) as services:
        await services.draft_is(True)
        bystander = Bystander(services)
        await bystander.begin()
        before = num_open()
        try:
            yield services
        finally:
            await bystander.end()
        await bystander.check()
        await services.all_is_free()
        assert not services.target.loop.ended.done()
        assert services.drafts is not None
        assert not services.drafts.loop.ended.done()
        assert (await services.router.status()).num_requests == 0
        await eventually(lambda: num_open() <= before, "descriptors and tasks are as before")


def num_open() -> int:
    """File descriptors and tasks of this process."""
    gc.collect()
    return psutil.Process().num_fds() + len(asyncio.all_tasks())
