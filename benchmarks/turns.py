"""`make bench-turns`: what draft and target, two processes on the same cores, cost each other.

Each runs alone, over and over, then both in turns, as in the rounds of one request: with idle threads that
leave their cores soon, as the services have it (`specdecode.cpu_threads`), and with libgomp's own waiting.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.in_process import add_model_options
from benchmarks.pictures import Panel, draw_panels
from benchmarks.processes import Process, stop_on_signals
from benchmarks.results import RESULTS, bar_of, begin, median_of, paired_ratio
from specdecode.cpu_threads import SPINS

GAMMA = 4
ROUNDS = 20
WARM_UP = 4
"""Rounds of each turn that are not counted."""
WAITING: Mapping[str, Mapping[str, str]] = {
    f"{SPINS} looks": {"GOMP_SPINCOUNT": str(SPINS)},
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
}


class PartWorker(Process):
    """`benchmarks.turns_worker`."""

    def wait_until_ready(self) -> None:
        """Until its model is loaded."""
        self._answer()

    def run(self, num_draft_tokens: int) -> float:
        """Milliseconds of one part of a round."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{num_draft_tokens}\n")
        self.popen.stdin.flush()
        return 1e3 * self._answer()

    def _answer(self) -> float:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.fail("ended")
        answer = json.loads(line)
        return answer if isinstance(answer, float) else 0.0


def measure(target: PartWorker, draft: PartWorker) -> dict[str, list[float]]:
    """Milliseconds of each part, of the rounds that count."""
    seen = {
        "plain step": [target.run(0) for _ in range(ROUNDS)],
        "verification, alone": [target.run(GAMMA) for _ in range(ROUNDS)],
        "drafts, alone": [draft.run(GAMMA) for _ in range(ROUNDS)],
    }
    rounds = [(draft.run(GAMMA), target.run(GAMMA)) for _ in range(ROUNDS)]
    seen["drafts, in turns"] = [drafts for drafts, _ in rounds]
    seen["verification, in turns"] = [verification for _, verification in rounds]
    seen["round, in turns"] = [sum(parts) for parts in rounds]
    return {what: values[WARM_UP:] for what, values in seen.items()}


def start(o: argparse.Namespace, stack: ExitStack) -> dict[str, tuple[PartWorker, PartWorker]]:
    """Target and draft of each way of waiting, ready."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    options = ["--device", o.device, "--dtype", o.dtype, "--threads", str(o.threads)]

    def worker_of(part: str, model: str, number: int, environment: Mapping[str, str]) -> PartWorker:
        argv = ["benchmarks.turns_worker", part, "--model", model, *options]
        worker = PartWorker(f"{part}-{number}", argv, logs, o.threads, environment)
        stack.callback(worker.stop)
        worker.wait_until_ready()
        return worker

    return {
        name: (worker_of("target", o.model, *waiting), worker_of("draft", o.draft_model, *waiting))
        for name, waiting in ((name, (number, own)) for number, (name, own) in enumerate(WAITING.items()))
    }


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--draft-model", default="smollm2-135m-instruct-draft", help="as --model")
    parser.add_argument("--turns", type=int, default=6, help="default: 6")
    o = parser.parse_args()
    stop_on_signals()
    session = begin("turns", {**vars(o), "num_draft_tokens": GAMMA, "rounds": ROUNDS - WARM_UP})
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in WAITING}
    runs = []
    with ExitStack() as stack:
        workers = start(o, stack)
        for turn in range(o.turns + 1):
            for name, (target, draft) in workers.items():
                seen = measure(target, draft)
                if not turn:  # the first warms up
                    continue
                runs.append({"waiting": name, "turn": turn, "milliseconds": seen})
                for part, values in seen.items():
                    samples[name].setdefault(part, []).extend(values)
    ours, own = samples.values()
    medians = {part: {name: median_of(samples[name][part]) for name in WAITING} for part in ours}
    whole = "round, in turns"
    bar = bar_of(f"{whole}: ours / libgomp's", paired_ratio(ours[whole], own[whole]), 1.0, "at_most")

    def draw(path: Path) -> None:
        panels = [[Panel(f"{o.model}, {o.dtype}", medians)]]
        draw_panels(path, "Draft and target in turns on the same cores", panels, "ms", "", "{:.1f}")

    summary = {part: {name: m.to_json() for name, m in group.items()} for part, group in medians.items()}
    print(f"written: {session.write(RESULTS, runs, summary, [bar], draw)}")


if __name__ == "__main__":
    main()
