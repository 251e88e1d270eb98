"""`specdecode distill`: a draft of one's own, trained on the target's distributions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from specdecode.cli import show
from specdecode.cli.flags import checked
from specdecode.distill.options import DistillOptions, Loss, Optimiser, TrainingOptions
from specdecode.distill.prompts import Prompt
from specdecode.errors import InvalidArgumentError

# What needs torch is imported inside: no other command should wait for it.


def _member(choices: type[Enum]) -> Any:
    return checked(choices, lambda member: True, _values(choices, ", "))


def _values(choices: type[Enum], between: str = "|") -> str:
    return between.join(str(member.value) for member in choices)


def _one_of(*choices: str) -> Any:
    return checked(str, lambda value: value in choices, ", ".join(choices))


def _whole(low: int) -> Any:
    return checked(int, lambda value: value >= low, f"{low} or more")


def _above_zero() -> Any:
    return checked(float, lambda value: 0 < value < float("inf"), "above 0")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(checked(int, lambda value: value >= 1, "1 or more")(part) for part in text.split(","))


def _layers(text: str) -> tuple[int, ...]:
    """A number of layers, which stands for the first ones, or their indices with commas between."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise typer.BadParameter(f"{text!r} is refused; allowed: a number of layers, or indices as in 0,1,29")
    if "," not in text:
        return tuple(range(numbers[0]))
    if list(numbers) != sorted(set(numbers)):
        raise typer.BadParameter(f"{text!r} is refused; allowed: ascending indices")
    return numbers


def distill(
    target: Annotated[str, typer.Option(help="Target: a fetched name, a directory or a hub id")],
    out: Annotated[Path, typer.Option(help="Directory to write; a stopped run in it is gone on with")],
    data: Annotated[Path | None, typer.Option(help="Prompts, JSON lines with messages or prompt")] = None,
    from_log: Annotated[
        Path | None, typer.Option(help="Logged requests, JSON lines as OpenAI's API has them")
    ] = None,
    layers: Annotated[
        Any,
        typer.Option(
            help="How many of the target's first layers to start from, or which: 0,1,29",
            parser=_layers,
            metavar="LAYERS",
        ),
    ] = "2",
    vocabulary: Annotated[
        int,
        typer.Option(
            help="Ids that the draft may propose, the most frequent ones; 0 for all",
            parser=_whole(0),
            metavar="INTEGER",
        ),
    ] = DistillOptions.vocabulary or 0,
    minutes: Annotated[
        float, typer.Option(help="For everything together", parser=_above_zero(), metavar="NUMBER")
    ] = DistillOptions.minutes,
    shards: Annotated[
        Any,
        typer.Option(
            help="Shards of text, instead of what fits; 2,4,6: in the first pass, the second, and all others",
            parser=_numbers,
            metavar="NUMBERS",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps, instead of what fits", parser=_whole(1), metavar="INTEGER"),
    ] = None,
    loss: Annotated[Loss, typer.Option(help="Loss", parser=_member(Loss), metavar=_values(Loss))] = (
        TrainingOptions.loss
    ),
    optimiser: Annotated[
        Optimiser,
        typer.Option(help="Optimiser", parser=_member(Optimiser), metavar=_values(Optimiser)),
    ] = TrainingOptions.optimiser,
    learning_rate: Annotated[
        float, typer.Option(help="Highest learning rate", parser=_above_zero(), metavar="NUMBER")
    ] = TrainingOptions.learning_rate,
    fresh: Annotated[bool, typer.Option("--fresh", help="Random layers instead of the target's")] = False,
    frozen_head: Annotated[
        bool, typer.Option("--frozen-head", help="Keep the target's head as it is")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(help="Decides texts, order and starting weights", parser=_whole(0), metavar="INTEGER"),
    ] = TrainingOptions.seed,
    device: Annotated[
        str, typer.Option(help="Device", parser=_one_of("cpu", "cuda"), metavar="cpu|cuda")
    ] = DistillOptions.device,
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format of products",
            parser=_one_of("bfloat16", "float32"),
            metavar="bfloat16|float32",
        ),
    ] = TrainingOptions.dtype,
    threads: Annotated[
        int | None, typer.Option(help="Threads on the CPU", parser=_whole(1), metavar="INTEGER")
    ] = None,
) -> None:
    """Train a draft model on what the target itself writes.

    The target answers prompts (its own and written ones, or yours), a few of its layers learn to predict its
    distributions, and a directory is written that transformers and `specdecode up --draft-model` load, with a
    card that says what it is worth on prompts held out of training. A run that was stopped goes on when the
    same command is given again.
    """
    import torch

    from specdecode.distill.run import distill
    from specdecode.models import resolve

    if threads is not None:
        torch.set_num_threads(threads)
    prompts, source = _prompts(data, from_log)
    training = TrainingOptions(
        loss=loss,
        learning_rate=learning_rate,
        optimiser=optimiser,
        seed=seed,
        dtype=dtype,
        **({} if steps is None else {"steps": steps}),
    )
    options = DistillOptions(
        target=resolve(target),
        out=out,
        layers=layers,
        vocabulary=vocabulary or None,
        fresh=fresh,
        train_head=not frozen_head,
        minutes=minutes,
        shards=shards,
        prompts=prompts,
        prompts_source=source,
        training=training,
        steps_given=steps is not None,
        device=device,
        command=shlex.join(["specdecode", *sys.argv[1:]]),
    )
    with _bar() as shown:
        recorded = distill(options, shown)
    _show(options, recorded)


def _prompts(data: Path | None, from_log: Path | None) -> tuple[tuple[Prompt, ...], str]:
    from specdecode.distill.prompts_file import read_prompts

    if data is not None and from_log is not None:
        raise InvalidArgumentError.of("--from-log", "give --data or --from-log, not both")
    if data is not None:
        return tuple(read_prompts(data, "--data")), data.name
    if from_log is not None:
        return tuple(read_prompts(from_log, "--from-log")), from_log.name
    return (), "written for this project, some by the target itself"


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar for each stage, whose estimate is made of the speed of the last minutes."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=show.ERR, speed_estimate_period=180) as progress:
        tasks: dict[str, Any] = {}

        def shown(stage: str, done: float, total: float, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, note=note)
            progress.update(tasks[stage], completed=done, total=total, note=note)

        yield shown


def _show(options: DistillOptions, recorded: dict[str, Any]) -> None:
    table = show.table(
        ("held-out prompts", "left"),
        *((name, "right") for name in ("positions", "α", "α at 1", "agreement", "emitted, γ = 4")),
    )
    for name, found in recorded["metrics"]["teacher_forced"].items():
        values = [found[key] for key in ("alpha", "alpha_temperature_1", "greedy_agreement")]
        emitted = f"{found['greedy_emitted_per_round']:.2f}"
        table.add_row(name, str(found["positions"]), *(f"{value:.3f}" for value in values), emitted)
    show.OUT.print(table)
    for name, alphas in recorded["metrics"]["self_fed_alpha_by_position"].items():
        show.say(f"feeding on itself, {name}: α {', '.join(f'{alpha:.3f}' for alpha in alphas)} by position")
    show.note(f"draft: {options.out}; what it was made from, and can be deleted: {options.work}")
