"""Requests cancelled at random moments leave nothing: no block, task, stream, descriptor or memory."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from specdecode.v1 import router_service_pb2 as pb
from tests.fuzz.watching import bounded, watched
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import DEADLINE, Services

REQUESTS = bounded("STORM_REQUESTS", 600)
SEED = bounded("FUZZ_SEED", 1)
AT_ONCE = 24
MAX_GROWTH = 0.02


def random_request(rng: random.Random) -> Any:
    prompt = [20 + rng.randrange(200) for _ in range(rng.choice((1, 5, 17, 40, 120)))]
    options: dict[str, Any] = rng.choice(
        ({"temperature": 0}, {"seed": rng.randrange(99)}, {}, {"logprobs": 3}, {"stop": ["e"]})
    )
    request = request_for(prompt, max_tokens=rng.choice((1, 8, 60, 100)), ignore_eos=True, **options)
    request.n = rng.choice((1, 1, 1, 2, 5))
    request.cache_salt = rng.choice((b"", b"a", b"b"))
    return speculating(request, rng.choice((0, 2, 5)), rng.choice((NGRAM, MODEL)))


async def cancelled(services: Services, request: pb.GenerateRequest, rng: random.Random) -> None:
    """Sends a request and takes it back: at once, after some pieces, after a while, or never."""
    call = services.router.call(request)
    moment = rng.random()
    if moment < 0.15:
        await asyncio.sleep(0)
    elif moment < 0.5:
        await asyncio.sleep(rng.random() * 0.2)
    else:
        for _ in range(rng.choice((1, 2, 5, 1000))):
            if await read(call) is grpc.aio.EOF:
                return
    call.cancel()


async def read(call: Any) -> Any:
    async with asyncio.timeout(DEADLINE):
        return await call.read()


async def storm(services: Services, count: int, rng: random.Random) -> None:
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await cancelled(services, random_request(rng), rng)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    # Answered on the same connection, so that whatever was sent before has come.
    await services.router.channel.unary_unary("/specdecode.v1.RouterService/GetStatus")(b"", timeout=DEADLINE)
    await services.all_is_free()


@pytest.mark.timeout(24 * 3600)
async def test_requests_cancelled_at_random_moments_leave_nothing(model: Path) -> None:
    rng = random.Random(SEED)
    process = psutil.Process()
    async with watched(model) as services:
        await storm(services, REQUESTS // 3, rng)  # fills what is kept on purpose: caches, pools of memory
        gc.collect()
        before = process.memory_info().rss
        await storm(services, REQUESTS - REQUESTS // 3, rng)
        gc.collect()
        after = process.memory_info().rss
        # What was sent and taken back at the very end may be opened for a moment even now.
        await services.all_is_free()
        assert after <= before * (1 + MAX_GROWTH), f"{before} bytes before, {after} after"
