"""`python -m tests.chaos`: kills replicas at random under load, and says what clients noticed.

Streams of seeded requests run through a router over a fleet that Ray keeps; a killer sends SIGKILL to the
processes of target and draft replicas, never to the last ready target. Then each target is restarted in turn
by SIGTERM. No request may fail, every text must be that of a quiet run, every block must be free at the end,
and no process left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from router.text import Tokenizer
from specdecode.replicas import Replica, ReplicaRole
from specdecode.wire import piece_from_proto
from tests.fleet.running import Fleet, are_gone, fleet
from tests.router import tiny
from tests.router.client import request_for
from tests.services import Answer, RouterUnderTest, start_router

NUM_PROMPTS = 8
NUM_TARGETS, NUM_DRAFTS = 2, 1
MAX_TOKENS = 160


@dataclass
class Load:
    """Streams, one request after another on each, and what became of them.

    Attributes:
        expected: token ids of each prompt's text in a quiet run.
        problems: what no client should have seen.
        gaps: seconds from a kill to the next piece, of texts that moved.
    """

    router: RouterUnderTest
    expected: list[list[int]]
    num_answers: int = 0
    num_moves: int = 0
    killed_at: float = 0.0
    is_over: bool = False
    problems: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    async def stream(self, number: int) -> None:
        """One client, until the load is over."""
        chance = random.Random(number)
        while not self.is_over:
            await self._ask(chance.randrange(NUM_PROMPTS))

    async def _ask(self, prompt: int) -> None:
        answer, gap = Answer(), 0.0
        last = time.monotonic()
        try:
            async for message in self.router.call(request_of(prompt), timeout=120):
                answer.hear(piece_from_proto(message))
                now = time.monotonic()
                if last < self.killed_at < now:
                    gap = now - self.killed_at
                last = now
        except grpc.aio.AioRpcError as error:
            self.problems.append(f"a request failed: {error.code().name} {error.details()}")
            return
        self.num_answers += 1
        if answer.ids != self.expected[prompt]:
            self.problems.append(f"prompt {prompt} got another text")
        if answer.usage is not None and answer.usage.num_failovers:
            self.num_moves += answer.usage.num_failovers
            self.gaps.append(gap)


def request_of(prompt: int) -> Any:
    """The seeded request of this number."""
    return request_for([prompt + 5] * (8 + prompt), seed=prompt, max_tokens=MAX_TOKENS, ignore_eos=True)


class Killer:
    """Sends signals to replicas of a fleet, and waits until all are back."""

    def __init__(self, running: Fleet, load: Load, seed: int) -> None:
        self._running = running
        self._load = load
        self._random = random.Random(seed)

    async def kill(self, count: int) -> None:
        """SIGKILL to one after another."""
        for number in range(count):
            await self._all_ready()
            await asyncio.sleep(self._random.uniform(0.2, 1.5))  # at any moment of the texts that run
            role = ReplicaRole.DRAFT if number % 4 == 3 else ReplicaRole.TARGET
            victim = self._random.choice(self._running.ready(role))
            print(f"kill {number + 1} of {count}: {victim.id}", flush=True)
            self._load.killed_at = time.monotonic()
            await self._signal(victim, signal.SIGKILL)
        await self._all_ready()

    async def restart_all(self) -> None:
        """SIGTERM to each target in turn."""
        for target in self._running.ready():
            await self._all_ready()
            print(f"restart of {target.id}", flush=True)
            await self._signal(target, signal.SIGTERM)
        await self._all_ready()

    async def _signal(self, victim: Replica, number: signal.Signals) -> None:
        os.kill(self._running.pid_of(victim), number)

        def has_left() -> bool:
            return victim.address not in [replica.address for replica in self._running.ready(victim.role)]

        await self._running.until(has_left, f"{victim.id} is seen to be gone")

    async def _all_ready(self) -> None:
        def holds() -> bool:
            drafts = len(self._running.ready(ReplicaRole.DRAFT))
            return len(self._running.ready()) == NUM_TARGETS and drafts == NUM_DRAFTS

        await self._running.until(holds, "all replicas are ready")


async def run(num_kills: int, num_streams: int, seed: int, model: Path) -> list[str]:
    """What went wrong; empty if nothing did."""
    sizes = (f"--replicas={NUM_TARGETS}", f"--draft-replicas={NUM_DRAFTS}")
    async with fleet(model, *sizes, SPECDECODE_DRAFT_CALIBRATION="off") as running:
        await running.serves()
        source = f"watch://{running.address}"
        router = await start_router(model, [source], source, failover_seconds=60)
        try:
            load = Load(router, [await quiet(router, number) for number in range(NUM_PROMPTS)])
            killer = Killer(running, load, seed)
            streams = [asyncio.create_task(load.stream(number)) for number in range(num_streams)]
            await killer.kill(num_kills)
            await killer.restart_all()
            load.is_over = True
            await asyncio.gather(*streams)
            await running.until(lambda: all_free(running.ready()), "all blocks are free")
        finally:
            await router.stop()
        processes = running.processes()
        if await running.end() != 0:
            load.problems.append("the fleet did not end in good order")
        await are_gone(processes)
    gap = f"{max(load.gaps):.2f} s" if load.gaps else "none"
    print(f"{load.num_answers} texts, {load.num_moves} moves; longest gap after a kill: {gap}")
    return load.problems


async def quiet(router: RouterUnderTest, number: int) -> list[int]:
    """Token ids of a request while nothing else happens."""
    answer = Answer()
    async for message in router.call(request_of(number)):
        answer.hear(piece_from_proto(message))
    return answer.ids


def all_free(replicas: Sequence[Replica]) -> bool:
    """Whether every block of every replica is free."""
    return all(r.load is not None and r.load.num_free_blocks == r.load.num_blocks for r in replicas)


def main() -> int:
    """The exit code: 0 if no client noticed anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=8, help="replicas to kill (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save_byte_level_tokenizer(Path(folder))
        tiny.save_llama(model, Tokenizer(model).vocab_size)
        problems = asyncio.run(run(options.kills, options.streams, options.seed, model))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
