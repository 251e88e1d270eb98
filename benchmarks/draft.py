"""`make bench-draft`: what the shipped draft is worth, on prompts that it was not trained on.

In process, beside the target: tokens emitted a round and α by draft position when the draft feeds on its own
tokens, by kind of prompt and temperature; and a draft step against a plain step of the target, in turns. Then
through the three services, one request at a time: the router's own decision against speculation off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.draft_figures import AUTO, OFF, AcceptanceRun, DraftFigures, Kind, Load, ServiceRun, StepRun
from benchmarks.draft_in_process import STEP_METHODS, Pair, Tokens
from benchmarks.in_process import NUM_BLOCKS, add_model_options
from benchmarks.jobs import Job, JobPrompt
from benchmarks.pictures import draw_panels
from benchmarks.processes import ProcessFailedError, Services, Worker, stop_on_signals
from benchmarks.prompts import CODE_WANTED, COPY_HEAVY, FREE_FORM
from benchmarks.results import QUICK_RESULTS, RESULTS, begin
from benchmarks.schedule import Display, Step
from specdecode import models, tokenizer
from specdecode.errors import SpecdecodeError

NUM_DRAFT_TOKENS = 4
TEMPERATURES = (0.0, 1.0)
SAMPLED_TEMPERATURE = 0.8
TEXTS = {
    Kind.CHAT: tuple(prompt.text for prompt in FREE_FORM),
    Kind.CODE: CODE_WANTED,
    Kind.COPY_HEAVY: tuple(prompt.text for prompt in COPY_HEAVY),
}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: str
    draft_model: str
    device: str
    dtype: str
    threads: int
    num_prompts: int
    max_tokens: int
    step_turns: int
    repeats: int


@dataclass(frozen=True)
class AcceptanceStep(Step):
    """All prompts of a kind at one temperature."""

    kind: Kind
    temperature: float


@dataclass(frozen=True)
class CostStep(Step):
    """One turn of steps."""

    method: str
    turn: int


@dataclass(frozen=True)
class ServiceStep(Step):
    """One request through the services."""

    configuration: str
    load: Load
    repeat: int


class Prompts:
    """Texts as the model reads them."""

    def __init__(self, model: str) -> None:
        self._path = models.resolve(model)
        self._tokenizer = tokenizer.load_tokenizer(self._path)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return tokenizer.eos_token_ids(self._path, self._tokenizer)

    def token_ids(self, text: str) -> Tokens:
        """With the chat template."""
        message = [{"role": "user", "content": text}]
        encoded = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return tuple(encoded["input_ids"])


def in_process_plan(options: Options) -> list[AcceptanceStep | CostStep]:
    """Acceptance of every kind and temperature, then turns of steps; the first turn warms up."""
    guess = options.num_prompts * options.max_tokens * 0.004
    accepted: list[AcceptanceStep | CostStep] = [
        AcceptanceStep(f"{kind}, temperature {heat:g}", (kind, heat), guess, kind, heat)
        for kind in Kind
        for heat in TEMPERATURES
    ]
    costs = [
        CostStep(f"steps, {method}", method, 1.5, method, turn)
        for turn in range(options.step_turns + 1)
        for method in STEP_METHODS
    ]
    return [*accepted, *costs]


def service_plan(options: Options) -> list[ServiceStep]:
    """Every load by both configurations in turn, whose order rotates; the first turn warms up."""
    steps = []
    for repeat in range(options.repeats + 1):
        for load in Load:
            for name in (OFF, AUTO) if repeat % 2 else (AUTO, OFF):
                guess = options.max_tokens * 0.02
                steps.append(ServiceStep(f"{load}: {name}", (load, name), guess, name, load, repeat))
    return steps


def measure_in_process(
    options: Options, prompts: Prompts, display: Display[AcceptanceStep | CostStep]
) -> tuple[list[AcceptanceRun], list[StepRun]]:
    """Runs the first plan in this process, on its first thread."""
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    pair = Pair(options.model, options.draft_model, dtype, options.device, prompts.eos_token_ids)
    accepted: list[AcceptanceRun] = []
    costs: list[StepRun] = []
    for step in display.follow(in_process_plan(options)):
        if isinstance(step, CostStep):
            run = pair.step(step.method, step.turn, NUM_DRAFT_TOKENS)
            costs += [run] if step.turn else []
        else:
            texts = [prompts.token_ids(text) for text in TEXTS[step.kind][: options.num_prompts]]
            accepted += pair.accept(step.kind, texts, step.temperature, NUM_DRAFT_TOKENS, options.max_tokens)
    return accepted, costs


class ServiceBench:
    """The three services and a client, each a process."""

    def __init__(self, options: Options, prompts: Prompts, stack: ExitStack, logs: Path) -> None:
        self._options = options
        self._prompts = prompts
        service = ["--device", options.device, "--dtype", options.dtype, "--calibration", "refresh"]
        service += ["--num-threads", str(options.threads)]
        target, draft = (
            [*service, "--num-blocks", str(NUM_BLOCKS)],
            ["--model", options.draft_model, *service],
        )
        services = Services(stack, options.model, target, logs, options.threads, draft)
        self._client = Worker("client", ["benchmarks.client_worker", services.address], logs, options.threads)
        stack.callback(self._client.stop)
        self._client.wait_until_ready()

    def run(self, step: ServiceStep) -> ServiceRun:
        """One request; each turn has a prompt of its own, the same for both configurations."""
        texts = TEXTS[step.load.kind]
        # From the end: prompts of the first part are not the only ones that are tried.
        text = texts[-1 - step.repeat % len(texts)]
        answer = self._client.run(
            Job(
                prompts=(JobPrompt(text, self._prompts.token_ids(text)),),
                max_tokens=self._options.max_tokens,
                salt=f"{step.cell}/{step.repeat}",
                auto=step.configuration == AUTO,
                temperature=SAMPLED_TEMPERATURE if step.load is Load.SAMPLED else 0.0,
            )
        )
        return ServiceRun(
            configuration=step.configuration,
            load=step.load,
            repeat=step.repeat,
            seconds=round(answer.seconds, 4),
            tokens_per_second=round(self._options.max_tokens / answer.seconds, 2),
            num_rounds=answer.usage["num_rounds"],
            num_drafted=answer.usage["num_drafted"],
            num_accepted=answer.usage["num_accepted"],
        )


def measure_services(
    options: Options, prompts: Prompts, display: Display[ServiceStep], logs: Path
) -> list[ServiceRun]:
    """Starts the services and runs the second plan."""
    with ExitStack() as stack:
        display.say("Starting and calibrating the three services")
        bench = ServiceBench(options, prompts, stack, logs)
        runs = [bench.run(step) for step in display.follow(service_plan(options))]
    return [run for run in runs if run.repeat]


def parse_options(arguments: Sequence[str] | None = None) -> tuple[Options, Path]:
    """What to measure, and where to write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--draft-model", default="smollm2-135m-instruct-draft", help="as --model")
    parser.add_argument("--num-prompts", type=int, default=32, help="of each kind, in process (default: 32)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each text (default: 96)")
    parser.add_argument("--step-turns", type=int, default=9, help="turns of steps (default: 9)")
    parser.add_argument("--repeats", type=int, default=12, help="turns through the services (default: 12)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="4 prompts, 24 tokens and 2 turns, written to build/results: proves that it works",
    )
    parser.add_argument("--results", type=Path, help="directory to write to (default: docs/results)")
    o = parser.parse_args(arguments)
    if o.quick:
        o.num_prompts, o.max_tokens, o.step_turns, o.repeats = 4, 24, 2, 2
    options = Options(
        *(o.model, o.draft_model, o.device, o.dtype, o.threads),
        *(o.num_prompts, o.max_tokens, o.step_turns, o.repeats),
    )
    return options, o.results or (QUICK_RESULTS if o.quick else RESULTS)


def main() -> int:
    """Measures and writes; the exit code."""
    options, directory = parse_options()
    stop_on_signals()
    settings = {**asdict(options), "num_draft_tokens": NUM_DRAFT_TOKENS, "num_blocks": NUM_BLOCKS}
    session = begin("draft", settings)
    try:
        prompts = Prompts(options.model)
        with Display[AcceptanceStep | CostStep](time.monotonic) as display:
            accepted, costs = measure_in_process(options, prompts, display)
        with (
            tempfile.TemporaryDirectory(prefix="specdecode-bench-") as logs,
            Display[ServiceStep](time.monotonic) as shown,
        ):
            services = measure_services(options, prompts, shown, Path(logs))
    except (ProcessFailedError, SpecdecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    figures = DraftFigures(accepted, costs, services)
    title = f"{options.draft_model} for {options.model}, {options.dtype}"
    path = session.write(
        directory,
        [*map(asdict, accepted), *map(asdict, costs), *map(asdict, services)],
        figures.to_json(),
        figures.bars(),
        lambda png: draw_panels(png, title, figures.panels(), "", value_format="{:.2f}"),
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
