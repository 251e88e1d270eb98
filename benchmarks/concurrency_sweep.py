"""`make bench-concurrency_sweep`: the router's own decision against off and every fixed γ, over concurrency.

Three services on loopback; every configuration runs every cell in turn, in an order that rotates, on the same
prompts. The best fixed γ of a cell (off is one of them) is chosen on the odd turns and compared on the even
ones, so that luck does not choose it. Fixed γ drafts by n-gram look-up; auto may use whatever is offered.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.jobs import Answer, Job, JobPrompt
from benchmarks.processes import Process, ProcessFailedError, Services, Worker, stop_on_signals
from benchmarks.prompts import Prompt, PromptKind, prompts_of
from benchmarks.results import QUICK_RESULTS, RESULTS, begin
from benchmarks.schedule import Display, Step
from benchmarks.sweep_figures import AUTO, OFF, Load, Run, SweepFigures
from benchmarks.sweep_picture import draw_sweep
from specdecode import models, tokenizer
from specdecode.errors import SpecdecodeError

SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Options:
    """What to measure."""

    concurrencies: tuple[int, ...]
    mixed: tuple[int, ...]
    lengths: tuple[int, ...]
    max_tokens: int
    repeats: int
    model: str
    draft_model: str | None
    device: str
    dtype: str
    threads: int

    @property
    def configurations(self) -> tuple[str, ...]:
        """off, every fixed γ, auto."""
        return (OFF, *(f"γ={length}" for length in self.lengths), AUTO)

    @property
    def cells(self) -> list[tuple[Load, int]]:
        """Every load at every concurrency."""
        plain = [load for load in Load if load is not Load.MIXED]
        return [*product(plain, self.concurrencies), *((Load.MIXED, count) for count in self.mixed)]


@dataclass(frozen=True)
class PlannedRun(Step):
    """One run of one configuration."""

    configuration: str
    load: Load
    concurrency: int
    repeat: int


class Bench:
    """The three services and a client, each a process."""

    def __init__(self, options: Options, stack: ExitStack, logs: Path) -> None:
        self._options = options
        self._tokenizer = tokenizer.load_tokenizer(models.resolve(options.model))
        service = ["--device", options.device, "--dtype", options.dtype]
        service += ["--num-threads", str(options.threads)]
        target = [*service, "--num-blocks", str(NUM_BLOCKS)]
        draft = [] if options.draft_model is None else ["--model", options.draft_model, *service]
        services = Services(stack, options.model, target, logs, options.threads, draft)
        self._client = Worker("client", ["benchmarks.client_worker", services.address], logs, options.threads)
        stack.callback(self._client.stop)
        self._client.wait_until_ready()
        self.processes: list[Process] = [self._client, *services.processes]

    def run(self, planned: PlannedRun) -> Answer:
        """One run; each turn has prompts of its own, the same for all configurations."""
        prompts = _prompts(planned.load, planned.concurrency, planned.repeat)
        length = planned.configuration.removeprefix("γ=")
        return self._client.run(
            Job(
                prompts=tuple(JobPrompt(prompt.text, self._token_ids(prompt.text)) for prompt in prompts),
                max_tokens=self._options.max_tokens,
                salt=f"{planned.cell}/{planned.repeat}",
                num_draft_tokens=int(length) if length.isdigit() else 0,
                auto=planned.configuration == AUTO,
                temperature=SAMPLED_TEMPERATURE if planned.load is Load.SAMPLED else 0.0,
            )
        )

    def _token_ids(self, text: str) -> tuple[int, ...]:
        message = [{"role": "user", "content": text}]
        encoded = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return tuple(encoded["input_ids"])


def _prompts(load: Load, count: int, repeat: int) -> list[Prompt]:
    match load:
        case Load.COPY_HEAVY:
            return prompts_of(PromptKind.COPY_HEAVY, count, start=repeat * count)
        case Load.MIXED:
            half = count // 2
            copied = prompts_of(PromptKind.COPY_HEAVY, half, start=repeat * half)
            return [*copied, *prompts_of(PromptKind.FREE_FORM, count - half, start=repeat * half)]
        case _:
            return prompts_of(PromptKind.FREE_FORM, count, start=repeat * count)


def plan(options: Options) -> list[PlannedRun]:
    """All runs in order; the first turn warms up and is not counted."""
    runs = []
    for repeat in range(options.repeats + 1):
        for load, concurrency in options.cells:
            order = options.configurations
            turned = order[repeat % len(order) :] + order[: repeat % len(order)]
            for configuration in turned:
                guess = options.max_tokens * (0.02 + 0.0006 * concurrency)
                what = f"{load}, {concurrency} at once: {configuration}"
                cell = (configuration, load, concurrency)
                runs.append(PlannedRun(what, cell, guess, configuration, load, concurrency, repeat))
    return runs


def measure(bench: Bench, options: Options, display: Display[PlannedRun]) -> list[Run]:
    """Runs the plan."""
    runs = []
    for planned in display.follow(plan(options)):
        answer = bench.run(planned)
        if planned.repeat == 0:
            continue
        runs.append(
            Run(
                configuration=planned.configuration,
                load=planned.load,
                concurrency=planned.concurrency,
                repeat=planned.repeat,
                seconds=round(answer.seconds, 4),
                tokens_per_second=round(planned.concurrency * options.max_tokens / answer.seconds, 2),
                num_drafted=answer.usage["num_drafted"],
                num_accepted=answer.usage["num_accepted"],
                num_rounds=answer.usage["num_rounds"],
            )
        )
    return runs


def parse_options(arguments: Sequence[str] | None = None) -> tuple[Options, Path]:
    """What to measure, and where to write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency_sweep", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--draft-model", default="smollm2-135m-instruct-draft", help="none: n-gram only")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--mixed", type=int, nargs="*", default=[4, 16, 64], metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7], metavar="γ")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each text (default: 64)")
    parser.add_argument("--repeats", type=int, default=6, help="counted turns, at least 2 (default: 6)")
    parser.add_argument("--quick", action="store_true", help="two turns at 1 and 4, written to build/results")
    parser.add_argument("--results", type=Path, help="directory to write to (default: docs/results)")
    o = parser.parse_args(arguments)
    if o.quick:
        o.concurrency, o.mixed, o.lengths, o.max_tokens, o.repeats = [1, 4], [4], [3], 24, 2
    if o.repeats < 2:
        parser.error("--repeats: at least 2, odd turns choose and even ones compare")
    draft = None if o.draft_model == "none" else o.draft_model
    options = Options(
        *(tuple(o.concurrency), tuple(o.mixed), tuple(o.lengths), o.max_tokens, o.repeats),
        *(o.model, draft, o.device, o.dtype, o.threads),
    )
    return options, o.results or (QUICK_RESULTS if o.quick else RESULTS)


def main() -> int:
    """Measures and writes; the exit code."""
    options, directory = parse_options()
    stop_on_signals()
    session = begin("concurrency_sweep", {**asdict(options), "num_blocks": NUM_BLOCKS})
    with (
        tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs,
        Display[PlannedRun](time.monotonic) as display,
        ExitStack() as stack,
    ):
        try:
            display.say("Starting the three services")
            bench = Bench(options, stack, Path(logs))
            runs = measure(bench, options, display)
        except (ProcessFailedError, SpecdecodeError) as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    figures = SweepFigures(runs, options.configurations, options.cells)
    title = f"{options.model}, {options.dtype}, {options.max_tokens} tokens a text"
    path = session.write(
        directory,
        [asdict(run) for run in runs],
        {"cells": figures.to_json()},
        figures.bars(),
        lambda png: draw_sweep(png, title, figures),
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
