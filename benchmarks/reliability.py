"""`make bench-reliability`: ten times as many requests as can be served; who is admitted must not notice.

First as many clients as there are slots, each with its next request at once: that is capacity. Then requests
at random moments, ten times as many as were served then; nobody waits for anybody. Compared are the time
between tokens of those who were admitted and the tokens served; of the refused, how soon they knew.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.processes import ProcessFailedError, Services, stop_on_signals
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, Bar, begin
from specdecode.client import RouterClient
from specdecode.errors import ResourceExhaustedError, SpecdecodeError
from specdecode.requests import ChatMessage, ChatPrompt, GenerateRequest, SamplingOptions
from specdecode.types import RoundRecord

FACTOR = 10
MAX_TOKENS = 48
WAITING = 8
"""Requests that may wait beside those that run."""
MAX_LATENCY_RATIO = 1.2
MAX_REFUSAL_SECONDS = 0.05
MIN_GOODPUT = 0.97


@dataclass(frozen=True)
class Served:
    """A request to its end: when, seconds since the phase began, and each round's seconds a token."""

    at: float
    num_tokens: int
    token_seconds: list[float]


@dataclass(frozen=True)
class Phase:
    """What came of one phase of `seconds`; `refusals` in seconds until the refusal came."""

    seconds: float
    served: list[Served]
    refusals: list[float]

    @property
    def goodput(self) -> float:
        """Tokens a second, of requests that ended within the phase."""
        return sum(s.num_tokens for s in self.served if s.at <= self.seconds) / self.seconds

    def p99(self) -> float:
        """Of the seconds between tokens."""
        return float(np.percentile([t for s in self.served for t in s.token_seconds], 99))


class Crowd:
    """Clients of one router, and what came of their requests."""

    def __init__(self, client: RouterClient, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._prompts = prompts_of(PromptKind.FREE_FORM, 64)
        self._rng = random.Random(1)
        self._began = time.perf_counter()
        self._served: list[Served] = []
        self._refusals: list[float] = []

    async def closed(self, num_clients: int) -> Phase:
        """`num_clients`, each with its next request at once."""

        async def ask_again() -> None:
            while self._now < self._seconds:
                await self._ask()

        await asyncio.gather(*(ask_again() for _ in range(num_clients)))
        return Phase(self._seconds, self._served, self._refusals)

    async def open(self, rate: float) -> Phase:
        """Requests at random moments, `rate` a second."""
        tasks: set[asyncio.Task[None]] = set()
        while self._now < self._seconds:
            task = asyncio.create_task(self._ask())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(self._rng.expovariate(rate))
        await asyncio.gather(*tasks)
        return Phase(self._seconds, self._served, self._refusals)

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _ask(self) -> None:
        text = self._rng.choice(self._prompts).text
        request = GenerateRequest(
            ChatPrompt((ChatMessage("user", text),)),
            SamplingOptions(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
            include_rounds=True,
        )
        began = self._now
        rounds: list[RoundRecord] = []
        try:
            async for piece in self._client.generate(request):
                rounds += piece.rounds
        except ResourceExhaustedError:
            self._refusals.append(self._now - began)
            return
        token_seconds = [r.seconds / max(r.num_emitted, 1) for r in rounds[1:]]
        self._served.append(Served(self._now, sum(r.num_emitted for r in rounds), token_seconds))


async def measure(address: str, slots: int, seconds: float) -> tuple[Phase, Phase]:
    """Capacity, then overload."""
    async with await RouterClient.open(address) as client:
        await Crowd(client, seconds / 4).closed(slots)  # warms up
        capacity = await Crowd(client, seconds).closed(slots)
        rate = len(capacity.served) / capacity.seconds
        return capacity, await Crowd(client, seconds).open(FACTOR * rate)


def bars_of(capacity: Phase, overload: Phase) -> list[Bar]:
    """What is promised."""
    refusal = float(np.percentile(overload.refusals, 99)) if overload.refusals else float("nan")
    ratio = overload.p99() / capacity.p99()
    goodput = overload.goodput / capacity.goodput
    return [
        Bar("p99 time between tokens, over that at capacity", ratio, MAX_LATENCY_RATIO, "at_most"),
        Bar("p99 time until a refusal, s", refusal, MAX_REFUSAL_SECONDS, "at_most"),
        Bar("tokens served, over those at capacity", goodput, MIN_GOODPUT, "at_least"),
    ]


def draw(capacity: Phase, overload: Phase, path: Path) -> None:
    """Time between tokens in both phases, as shares of the tokens."""
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, phase in (("capacity", capacity), (f"{FACTOR} × capacity", overload)):
        times = sorted(1000 * t for s in phase.served for t in s.token_seconds)
        axis.plot(times, np.linspace(0, 1, len(times)), label=name)
    axis.set_xlabel("ms between tokens of admitted requests")
    axis.set_ylabel("share of tokens")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _runs(name: str, phase: Phase) -> Sequence[dict[str, object]]:
    served = [{"phase": name, **asdict(s)} for s in phase.served]
    return [*served, {"phase": name, "refusals": [round(t, 5) for t in phase.refusals]}]


def main() -> int:
    """Measures and writes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--slots", type=int, default=8, help="requests that run at once (default: 8)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each phase (default: 120)")
    parser.add_argument("--quick", action="store_true", help="4 seconds, written to build/results")
    o = parser.parse_args()
    if o.quick:
        o.seconds = 4.0
    stop_on_signals()
    session = begin("reliability", {**vars(o), "num_blocks": NUM_BLOCKS, "max_tokens": MAX_TOKENS})
    service = ["--device", o.device, "--dtype", o.dtype, "--num-threads", str(o.threads)]
    limits = ["--max-running", str(o.slots), "--max-requests", str(o.slots + WAITING)]
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs, ExitStack() as stack:
        try:
            target = [*service, "--num-blocks", str(NUM_BLOCKS)]
            services = Services(stack, o.model, target, Path(logs), o.threads, router_options=limits)
            capacity, overload = asyncio.run(measure(services.address, o.slots, o.seconds))
        except (ProcessFailedError, SpecdecodeError) as error:
            print(error, file=sys.stderr)
            return 1
    bars = bars_of(capacity, overload)
    path = session.write(
        QUICK_RESULTS if o.quick else RESULTS,
        [*_runs("capacity", capacity), *_runs("overload", overload)],
        {
            "goodput": {"capacity": capacity.goodput, "overload": overload.goodput},
            "p99_token_seconds": {"capacity": capacity.p99(), "overload": overload.p99()},
            "served": {"capacity": len(capacity.served), "overload": len(overload.served)},
            "refused": len(overload.refusals),
        },
        bars,
        lambda picture: draw(capacity, overload, picture),
    )
    for bar in bars:
        print(
            f"{'holds' if bar.holds else 'MISSED'}  {bar.name}: {bar.value:.3f} ({bar.direction} {bar.bound})"
        )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
