"""`make bench-step`: milliseconds of a plain decoding step of the engine, on kernels and on torch alone.

Sequences of 60 random tokens decode in process, greedily, sampled with top-p, or sampled with a seed; a step
counts when every sequence ran one token. Kernels and torch take turns.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.pictures import Panel, draw_panels
from benchmarks.results import RESULTS, begin, median_of
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.models import resolve
from specdecode.types import DecodeFrame, Lease, Method, OpenSequence, SamplingParams
from target_service.engine import Engine

COUNTS = (1, 8, 64)
PROMPT_TOKENS = 60
MAX_TOKENS = 32
SAMPLED_TOKENS = 8
TURNS = 3
LOADS = {
    "greedy": (SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), Method.GREEDY),
    "top-p": (SamplingParams(temperature=0.8, top_p=0.95, max_tokens=SAMPLED_TOKENS), Method.REJECTION),
    "seeded": (SamplingParams(temperature=0.8, max_tokens=SAMPLED_TOKENS), Method.COUPLED),
}


def step_milliseconds(engine: Engine, load: str, count: int, seed: int) -> list[float]:
    """Of every step in which each of `count` sequences ran one token."""
    drawn = random.Random(seed)
    sampling, method = LOADS[load]
    prompts = [tuple(drawn.randrange(100, 10000) for _ in range(PROMPT_TOKENS)) for _ in range(count)]
    opens = (OpenSequence(i, p, PROMPT_TOKENS, sampling, method, seed=i) for i, p in enumerate(prompts))
    leases = (Lease(i, PROMPT_TOKENS, MAX_TOKENS) for i in range(count))
    engine.apply(0, DecodeFrame(opens=tuple(opens), leases=tuple(leases)))
    seen = []
    while engine.sequences:
        done = engine.step().load
        if done.tokens_in_flight == done.num_rows == count:
            seen.append(1e3 * done.step_seconds)
    return seen


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    add_model_options(parser)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    session = begin(
        "step",
        {
            **vars(o),
            "prompt_tokens": PROMPT_TOKENS,
            "max_tokens": MAX_TOKENS,
            "sampled_tokens": SAMPLED_TOKENS,
        },
    )
    dtype = getattr(torch, o.dtype)
    engines = {
        name: Engine(PagedLM(load_model(resolve(o.model), dtype, o.device, used), NUM_BLOCKS))
        for name, used in (("kernels", True), ("torch", False))
    }
    runs = []
    groups = [(load, count) for load in LOADS for count in COUNTS]
    samples: dict[tuple[str, str, int], list[float]] = {(n, *group): [] for n in engines for group in groups}
    for turn in range(TURNS + 1):
        for load, count in groups:
            for name, engine in engines.items():
                seen = step_milliseconds(engine, load, count, turn)
                if turn:  # the first warms up
                    samples[name, load, count] += seen
                    run = {"engine": name, "load": load, "sequences": count, "turn": turn}
                    runs.append({**run, "milliseconds": seen})
    medians = {
        f"{load}, {count}": {name: median_of(samples[name, load, count]) for name in engines}
        for load, count in groups
    }

    def draw(path: Path) -> None:
        panels = [[Panel(f"{o.model}, {o.dtype}", medians)]]
        draw_panels(path, "A plain decoding step", panels, "ms", "sequences", "{:.1f}")

    summary = {n: {name: m.to_json() for name, m in group.items()} for n, group in medians.items()}
    print(f"written: {session.write(RESULTS, runs, summary, [], draw)}")


if __name__ == "__main__":
    main()
