"""`make bench-load_step`: one request, 64 more beside it, then one again: how soon γ follows, who stalls.

The one request copies a text, and is measured round by round; the router decides on it as on all others. γ
has followed a change of load when the mean over its last rounds is nearer to what it settles at than to what
it was. A stall is the time between two steps of a request, in its median steps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
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

from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.processes import ProcessFailedError, Services, stop_on_signals
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, Bar, begin
from specdecode.client import RouterClient
from specdecode.errors import SpecdecodeError
from specdecode.requests import ChatMessage, ChatPrompt, GenerateRequest, SamplingOptions

ALONE_SECONDS = 4.0
CROWD_TOKENS = 48
WINDOW = 4
FOLLOW_SECONDS = 2.0
STALL_STEPS = 3.0


@dataclass(frozen=True)
class Moment:
    """One round of the request that is watched: seconds since the start, γ, and the step's own time."""

    at: float
    num_drafted: int
    step_seconds: float


@dataclass(frozen=True)
class Watched:
    """What was seen.

    Attributes:
        moments: rounds of the request that runs throughout.
        crowd: when the others began and when the last of them ended.
        gaps: longest time between two pieces of work of each of the others, after its first token; seconds.
    """

    moments: list[Moment]
    crowd: tuple[float, float]
    gaps: list[float]


def _request(text: str, max_tokens: int, salt: str) -> GenerateRequest:
    return GenerateRequest(
        ChatPrompt((ChatMessage("user", text),)),
        SamplingOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        include_rounds=True,
        cache_salt=salt.encode(),
    )


async def watch(address: str, crowd: int, rest_tokens: int) -> Watched:
    """Runs the three phases."""
    async with await RouterClient.open(address) as client:
        start = time.perf_counter()
        moments: list[Moment] = []
        others: asyncio.Task[list[float]] | None = None
        crowd_at = [0.0, 0.0]
        text = prompts_of(PromptKind.COPY_HEAVY, 1)[0].text
        async for piece in client.generate(_request(text, rest_tokens, "watched")):
            now = time.perf_counter() - start
            moments += [Moment(now, r.num_drafted, r.times.step) for r in piece.rounds]
            if others is None and now > ALONE_SECONDS:
                crowd_at[0] = now
                others = asyncio.create_task(_crowd(client, crowd))
            if others is not None and others.done():
                crowd_at[1] = crowd_at[1] or now
                if now > crowd_at[1] + ALONE_SECONDS:
                    break
        if others is None or not others.done() or not crowd_at[1]:
            raise ProcessFailedError("the watched request ended before the others: give it more --tokens")
        return Watched(moments, (crowd_at[0], crowd_at[1]), await others)


async def _crowd(client: RouterClient, count: int) -> list[float]:
    prompts = prompts_of(PromptKind.FREE_FORM, count)
    return await asyncio.gather(*(_longest_gap(client, i, p.text) for i, p in enumerate(prompts)))


async def _longest_gap(client: RouterClient, index: int, text: str) -> float:
    """The longest round of a request after its first, in median steps."""
    rounds = [
        r
        async for piece in client.generate(_request(text, CROWD_TOKENS, f"crowd {index}"))
        for r in piece.rounds
    ]
    step = statistics.median(r.times.step for r in rounds)
    return max(r.seconds for r in rounds[1:]) / step


def followed_after(moments: Sequence[Moment], begin: float, end: float, before: float) -> float:
    """Seconds after `begin` until γ is nearer to what it settles at before `end` than to `before`."""
    phase = [moment for moment in moments if begin <= moment.at < end]
    settled = statistics.mean(m.num_drafted for m in phase[len(phase) // 2 :])
    for index in range(WINDOW, len(phase) + 1):
        mean = statistics.mean(m.num_drafted for m in phase[index - WINDOW : index])
        if abs(mean - settled) <= abs(mean - before):
            return phase[index - 1].at - begin
    return end - begin


def main() -> int:
    """Measures and writes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_step", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--crowd", type=int, default=64, help="requests that come and go (default: 64)")
    parser.add_argument("--tokens", type=int, default=1400, help="of the one that stays (default: 1400)")
    parser.add_argument("--quick", action="store_true", help="4 others, written to build/results")
    o = parser.parse_args()
    if o.quick:
        o.crowd = 4
    stop_on_signals()
    session = begin("load_step", {**vars(o), "num_blocks": NUM_BLOCKS})
    service = ["--device", o.device, "--dtype", o.dtype, "--num-threads", str(o.threads)]
    with tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs, ExitStack() as stack:
        try:
            target = [*service, "--num-blocks", str(NUM_BLOCKS)]
            services = Services(stack, o.model, target, Path(logs), o.threads)
            seen = asyncio.run(watch(services.address, o.crowd, o.tokens))
        except (ProcessFailedError, SpecdecodeError) as error:
            print(error, file=sys.stderr)
            return 1
    came, went = seen.crowd
    end = seen.moments[-1].at
    lengths = {
        "alone": statistics.mean(m.num_drafted for m in seen.moments if m.at < came),
        "among others": statistics.mean(m.num_drafted for m in seen.moments if came + 1 <= m.at < went),
        "alone again": statistics.mean(m.num_drafted for m in seen.moments if m.at >= went + 1),
    }
    down = followed_after(seen.moments, came, went, lengths["alone"])
    up = followed_after(seen.moments, went, end, lengths["among others"])
    bars = [
        Bar(f"1 → {o.crowd}: γ follows, s", down, FOLLOW_SECONDS, "at_most"),
        Bar(f"{o.crowd} → 1: γ follows, s", up, FOLLOW_SECONDS, "at_most"),
        Bar("longest stall of any request, median steps", max(seen.gaps), STALL_STEPS, "at_most"),
    ]

    def draw(path: Path) -> None:
        figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
        axis.step([m.at for m in seen.moments], [m.num_drafted for m in seen.moments], color="#d55e00")
        axis.axvspan(came, went, color="#dddddd", label=f"{o.crowd} others")
        axis.set_xlabel("seconds")
        axis.set_ylabel("γ of the request that stays")
        axis.legend(frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)

    path = session.write(
        QUICK_RESULTS if o.quick else RESULTS,
        [asdict(moment) for moment in seen.moments],
        {"crowd": seen.crowd, "mean_draft_length": lengths, "stalls": sorted(seen.gaps)[-5:]},
        bars,
        draw,
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
