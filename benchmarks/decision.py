"""`make bench-decision`: CPU time of one joint decision, against the millisecond that it may cost a step."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pictures import Panel, draw_panels
from benchmarks.results import RESULTS, Bar, begin, median_of
from specdecode.cost import Candidate, DraftCosts, DueCandidates, StepCosts, choose

COUNTS = (1, 4, 16, 64, 256)
NUM_INSTANCES = 40
NUM_REPEATS = 5
STEPS = StepCosts(0.006, 2e-5, buckets=(1, 2, 4, *range(8, 256, 8), *range(256, 2560, 16)))
MODEL = DraftCosts(base_seconds=4e-4, pass_seconds=1.2e-3, token_seconds=1e-6)
LOOKUP = DraftCosts(base_seconds=2e-4, sequence_seconds=1e-5, token_seconds=1e-6, single_pass=True)


def realistic_due(rng: random.Random, count: int) -> list[DueCandidates[str]]:
    """A model whose acceptance falls with depth beside a look-up that is all or nothing: the curves cross."""
    due = []
    for _ in range(count):
        alpha, first, later = (
            rng.uniform(0.5, 0.85),
            rng.choice([0.05, 0.2, 0.4, 0.6, 0.85]),
            rng.uniform(0.85, 0.97),
        )
        model = tuple(alpha ** (i + 1) for i in range(8))
        due.append(
            DueCandidates((Candidate("m", model), Candidate("n", tuple(first * later**i for i in range(8)))))
        )
    return due


def decision_seconds(due: list[DueCandidates[str]]) -> float:
    """CPU time of this thread for one decision: other work on the machine is no part of it."""
    start = time.thread_time()
    choose(due, {"m": MODEL, "n": LOOKUP}, STEPS, round_trip_seconds=2e-4)
    return time.thread_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="directory to write to (default: docs/results)"
    )
    o = parser.parse_args(argv)
    session = begin("decision", {"instances": NUM_INSTANCES, "repeats": NUM_REPEATS, "drafters": 2, "γ": 8})
    runs = []
    least: dict[int, list[float]] = {count: [] for count in COUNTS}
    for seed in range(NUM_INSTANCES):
        for count in COUNTS:
            due = realistic_due(random.Random(seed), count)
            milliseconds = [1e3 * decision_seconds(due) for _ in range(NUM_REPEATS)]
            # What is on top of the least is the machine's, not the decision's.
            least[count].append(min(milliseconds))
            runs.append({"sequences": count, "instance": seed, "milliseconds": milliseconds})
    medians = {count: median_of(values) for count, values in least.items()}
    value = medians[64]
    bar = Bar("one decision for 64 sequences, ms", value.value, 1.0, "at_most", value.interval)
    groups = {str(count): {"decision": median} for count, median in medians.items()}

    def draw(path: Path) -> None:
        panels = [[Panel("two drafters, γ up to 8", groups)]]
        draw_panels(path, "CPU time of one joint decision", panels, "ms", "sequences", "{:.2f}")

    summary = {str(count): median.to_json() for count, median in medians.items()}
    path = session.write(o.results, runs, summary, [bar], draw)
    print(f"{value.value:.2f} ms for 64 sequences; {path}")


if __name__ == "__main__":
    main()
