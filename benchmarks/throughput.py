"""`make bench-throughput`: tokens a second of transformers, of the engine in process, and of the services.

All processes are started once and measured in turn, in an order that rotates, while the others are idle;
every ratio is taken between runs of the same turn on the same prompts. Each text is exactly as long as every
other (end-of-sequence ids are ignored), at temperature 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.jobs import Answer, Job, JobPrompt
from benchmarks.pictures import draw_panels
from benchmarks.processes import Process, ProcessFailedError, Services, Worker, stop_on_signals
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, begin
from benchmarks.schedule import Display, Step
from benchmarks.throughput_figures import Configuration, Options, Run, Summary, bars_of
from specdecode import models, tokenizer
from specdecode.errors import SpecdecodeError

WARM_UP_TOKENS = 24
NUM_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class PlannedRun(Step):
    """One run of one configuration."""

    configuration: Configuration
    kind: PromptKind
    concurrency: int
    repeat: int
    warm_up: bool = False


class Bench:
    """The processes, ready to be measured.

    Args:
        stack: stops them when it is closed.
        logs: directory of their logs.
    """

    def __init__(self, options: Options, stack: ExitStack, logs: Path) -> None:
        self._options = options
        self._tokenizer = tokenizer.load_tokenizer(models.resolve(options.model))
        model = ["--model", options.model, "--device", options.device, "--dtype", options.dtype]
        in_worker = [*model, "--threads", str(options.threads)]
        service = ["--device", options.device, "--dtype", options.dtype, "--num-blocks", str(NUM_BLOCKS)]
        service += ["--num-threads", str(options.threads), "--calibration", "off"]
        transformers = self._worker(
            "transformers", ["benchmarks.transformers_worker", *in_worker], stack, logs
        )
        engine = self._worker("engine", ["benchmarks.engine_worker", *in_worker], stack, logs)
        services = Services(stack, options.model, service, logs, options.threads, ["--calibration", "off"])
        client = self._worker("client", ["benchmarks.client_worker", services.address], stack, logs)
        self.processes: list[Process] = [transformers, engine, client, *services.processes]
        self._workers = {
            Configuration.TRANSFORMERS: transformers,
            Configuration.IN_PROCESS: engine,
            Configuration.OFF: client,
            Configuration.NGRAM: client,
        }

    def _worker(self, name: str, arguments: list[str], stack: ExitStack, logs: Path) -> Worker:
        worker = Worker(name, arguments, logs, self._options.threads)
        stack.callback(worker.stop)
        worker.wait_until_ready()
        return worker

    def run(self, planned: PlannedRun) -> Answer:
        """One run; each repeat has prompts of its own, as far as there are enough."""
        configuration, count = planned.configuration, planned.concurrency
        prompts = prompts_of(planned.kind, count, start=planned.repeat * count)
        job = Job(
            prompts=tuple(JobPrompt(prompt.text, self._token_ids(prompt.text)) for prompt in prompts),
            max_tokens=_num_tokens(self._options, planned.warm_up),
            salt=f"{planned.cell}/{planned.repeat}",
            num_draft_tokens=NUM_DRAFT_TOKENS if configuration is Configuration.NGRAM else 0,
            # With drafts some sequences sit steps out, and the status does not tell their KV.
            watch_kv=planned.warm_up and configuration is not Configuration.NGRAM,
        )
        answer = self._workers[configuration].run(job)
        if any(len(token_ids) != job.max_tokens for token_ids in answer.token_ids):
            lengths = sorted({len(token_ids) for token_ids in answer.token_ids})
            raise ProcessFailedError(f"{configuration}: texts of {lengths} tokens, not {job.max_tokens}")
        return answer

    def _token_ids(self, text: str) -> tuple[int, ...]:
        message = [{"role": "user", "content": text}]
        encoded = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return tuple(encoded["input_ids"])


def plan(options: Options) -> list[PlannedRun]:
    """All runs in order: short ones that are not counted, then turns, in each of which every configuration
    runs a cell once, one after another.
    """
    free_form = PromptKind.FREE_FORM
    runs = [
        _planned(options, configuration, free_form, concurrency, 0, warm_up=True)
        for configuration, concurrency in product(options.configurations(free_form), options.concurrencies)
    ]
    for repeat in range(max(map(options.repeats_at, options.concurrencies))):
        for concurrency, kind in product(options.concurrencies, PromptKind):
            if repeat < options.repeats_at(concurrency):
                for configuration in _rotated(options.configurations(kind), repeat):
                    runs.append(_planned(options, configuration, kind, concurrency, repeat))
    return runs


def _planned(
    options: Options,
    configuration: Configuration,
    kind: PromptKind,
    concurrency: int,
    repeat: int,
    warm_up: bool = False,
) -> PlannedRun:
    # Two cores: a step costs 30 ms and 1.2 ms a sequence, a prompt token 1.1 ms.
    prompt_tokens = concurrency * (180 if kind is PromptKind.COPY_HEAVY else 50)
    guess = _num_tokens(options, warm_up) * (0.03 + 0.0012 * concurrency) + prompt_tokens * 0.0011
    what = f"{'warm-up, ' if warm_up else ''}{kind}, {concurrency} at once: {configuration}"
    cell = (configuration, kind, concurrency, warm_up)
    return PlannedRun(what, cell, guess, configuration, kind, concurrency, repeat, warm_up)


def _num_tokens(options: Options, warm_up: bool) -> int:
    return min(options.max_tokens, WARM_UP_TOKENS) if warm_up else options.max_tokens


def _rotated(configurations: Sequence[Configuration], by: int) -> Iterator[Configuration]:
    for index in range(len(configurations)):
        yield configurations[(index + by) % len(configurations)]


@dataclass
class Measurements:
    """What the plan's runs gave."""

    runs: list[Run] = field(default_factory=list)
    kv_waste: dict[str, float] = field(default_factory=dict)
    """KV blocks wasted by a sequence at the worst moment of each warm-up."""


def measure(bench: Bench, options: Options, display: Display[PlannedRun]) -> Measurements:
    """Runs the plan."""
    measured = Measurements()
    turn: dict[Configuration, Answer] = {}
    for planned in display.follow(plan(options)):
        answer = bench.run(planned)
        if planned.warm_up:
            if answer.kv_waste is not None:
                name = f"{planned.configuration}, {planned.concurrency} at once"
                measured.kv_waste[name] = round(answer.kv_waste, 4)
            continue
        turn[planned.configuration] = answer
        if len(turn) == len(options.configurations(planned.kind)):
            measured.runs += _runs_of_turn(planned, turn, options)
            turn = {}
    return measured


def _runs_of_turn(planned: PlannedRun, turn: Mapping[Configuration, Answer], options: Options) -> list[Run]:
    expected = turn[Configuration.OFF].token_ids
    return [
        Run(
            configuration=configuration,
            kind=planned.kind,
            concurrency=planned.concurrency,
            repeat=planned.repeat,
            seconds=round(answer.seconds, 4),
            tokens_per_second=round(planned.concurrency * options.max_tokens / answer.seconds, 2),
            usage=answer.usage,
            num_held_blocks=answer.num_held_blocks,
            agreement=round(_agreement(answer.token_ids, expected), 4),
        )
        for configuration, answer in turn.items()
    ]


def _agreement(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    shares = []
    for a, b in zip(found, expected, strict=True):
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))
        shares.append(common / len(b))
    return sum(shares) / len(shares)


def parse_options() -> tuple[Options, Path]:
    """What to measure, and where to write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each text (default: 96)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns at 8 (default: 5); 2 times as many at 1, 0.6 from 32 on"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one turn of 24 tokens, at 1 and 4, written to build/results: proves that it works",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="give copy-heavy prompts to transformers too: takes half as long again",
    )
    parser.add_argument("--results", type=Path, help="directory to write to (default: docs/results)")
    o = parser.parse_args()
    if o.quick:
        o.concurrency, o.max_tokens, o.repeats = [1, 4], 24, 1
    options = Options(
        concurrencies=tuple(o.concurrency),
        max_tokens=o.max_tokens,
        repeats=o.repeats,
        model=o.model,
        device=o.device,
        dtype=o.dtype,
        threads=o.threads,
        full=o.full,
    )
    return options, o.results or (QUICK_RESULTS if o.quick else RESULTS)


def main() -> int:
    """Measures and writes; the exit code."""
    options, directory = parse_options()
    stop_on_signals()
    session = begin(
        "throughput", {**asdict(options), "num_draft_tokens": NUM_DRAFT_TOKENS, "num_blocks": NUM_BLOCKS}
    )
    with (
        tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs,
        Display[PlannedRun](time.monotonic) as display,
        ExitStack() as stack,
    ):
        try:
            display.say("Starting transformers, the engine and the three services")
            bench = Bench(options, stack, Path(logs))
            measured = measure(bench, options, display)
            memory = {process.name: process.peak_rss_mib() for process in bench.processes}
        except (ProcessFailedError, SpecdecodeError) as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    summary = Summary(measured.runs, options)
    bars = bars_of(summary, measured.runs, measured.kv_waste, options)
    path = session.write(
        directory,
        [asdict(run) for run in measured.runs],
        {
            "cells": summary.to_json(),
            "peak_rss_mib": memory,
            "kv_blocks_wasted_per_sequence": measured.kv_waste,
        },
        bars,
        lambda png: draw_panels(
            png,
            f"{options.model}, {options.dtype}, {options.max_tokens} tokens a text, median and 95 % interval",
            summary.panels(),
            y_label="tokens a second",
            first=tuple(Configuration),
        ),
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
