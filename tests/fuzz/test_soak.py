"""Three processes under steady load for a long time: memory, descriptors and latency stay as they are.

make soak                       # 4 minutes
make soak SOAK_MINUTES=30
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from router.text import Tokenizer
from specdecode.client import RouterClient
from specdecode.requests import GenerateRequest, SamplingOptions, TokenPrompt
from tests.cli.running import address_of, program, up_arguments
from tests.router import tiny

MINUTES = float(os.environ.get("SOAK_MINUTES", 0))
LOAD = 0.8
"""Of the capacity that is measured at first."""
CAPACITY_SECONDS = 15.0
CLIENTS = 16
SAMPLE_SECONDS = 2.0
MAX_GROWTH = 0.05
MAX_LATENCY_GROWTH = 0.3


@dataclass(frozen=True)
class Sample:
    """What the services hold at one moment."""

    seconds: float
    rss: int
    descriptors: int


class Load:
    """Requests to a router, and how long each took."""

    def __init__(self, client: RouterClient, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self.began = time.monotonic()
        self.latencies: list[tuple[float, float]] = []

    def _request(self) -> GenerateRequest:
        prompt = tuple(20 + self._rng.randrange(200) for _ in range(self._rng.choice((4, 20, 60))))
        options = SamplingOptions(
            temperature=self._rng.choice((0.0, 1.0)),
            seed=self._rng.choice((None, 7)),
            max_tokens=self._rng.choice((8, 24, 48)),
            ignore_eos=True,
        )
        return GenerateRequest(TokenPrompt(prompt), options, cache_salt=self._rng.choice((b"", b"a")))

    async def one(self) -> None:
        """One request, to its end; one in ten is taken back after its first piece."""
        request, leaves = self._request(), self._rng.random() < 0.1
        began = time.monotonic()
        pieces = self._client.generate(request, timeout_seconds=120.0)
        async for _ in pieces:
            if leaves:
                break
        await pieces.aclose()
        if not leaves:
            self.latencies.append((began - self.began, time.monotonic() - began))

    async def closed(self, seconds: float) -> float:
        """Requests a second that are served when there are always enough."""
        end, count = time.monotonic() + seconds, 0

        async def client() -> None:
            nonlocal count
            while time.monotonic() < end:
                await self.one()
                count += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / seconds

    async def open(self, rate: float, seconds: float, sample: Callable[[], None]) -> None:
        """Requests at random moments, `rate` a second."""
        end, running = time.monotonic() + seconds, set[asyncio.Task[None]]()
        next_sample = time.monotonic()
        while time.monotonic() < end:
            running.add(asyncio.create_task(self.one()))
            for task in [task for task in running if task.done()]:
                running.remove(task)
                task.result()
            if time.monotonic() >= next_sample:
                sample()
                next_sample += SAMPLE_SECONDS
            await asyncio.sleep(self._rng.expovariate(rate))
        await asyncio.gather(*running)


@pytest.mark.skipif(not MINUTES, reason="takes minutes: make soak")
@pytest.mark.timeout(24 * 3600)
async def test_memory_descriptors_and_latency_stay_flat(tmp_path: Path) -> None:
    model = tiny.save_byte_level_tokenizer(tmp_path)
    tiny.save_llama(model, Tokenizer(model).vocab_size)
    samples: list[Sample] = []
    with program(*up_arguments(model, f"--draft-model={model}", "--log-level=warning")) as up:
        address = await asyncio.to_thread(address_of, up)
        processes = [psutil.Process(pid) for pid in up.children().values()]
        async with await RouterClient.open(address) as client:
            rate = LOAD * await Load(client, 1).closed(CAPACITY_SECONDS)
            load = Load(client, 2)

            def sample() -> None:
                rss = sum(process.memory_info().rss for process in processes)
                descriptors = sum(process.num_fds() for process in processes)
                samples.append(Sample(time.monotonic() - load.began, rss, descriptors))

            await load.open(rate, 60 * MINUTES, sample)
            status = await client.get_status()
    assert status.num_requests == 0
    _check(samples, load.latencies, 60 * MINUTES)


def _check(samples: list[Sample], latencies: list[tuple[float, float]], seconds: float) -> None:
    """Compares the last quarter with the second: in the first caches fill."""
    early = [s for s in samples if seconds / 4 <= s.seconds < seconds / 2]
    late = [s for s in samples if s.seconds >= seconds * 3 / 4]
    rss = [statistics.median(s.rss for s in part) for part in (early, late)]
    descriptors = [max(s.descriptors for s in part) for part in (early, late)]
    early_latency = statistics.median(t for at, t in latencies if seconds / 4 <= at < seconds / 2)
    late_latency = statistics.median(t for at, t in latencies if at >= seconds * 3 / 4)
    latency = f"median latency {early_latency:.3f} s, then {late_latency:.3f} s"
    print(f"{len(latencies)} requests; RSS {rss} bytes, descriptors {descriptors}, {latency}")
    assert rss[1] <= rss[0] * (1 + MAX_GROWTH)
    assert descriptors[1] <= descriptors[0]
    assert late_latency <= early_latency * (1 + MAX_LATENCY_GROWTH)
