"""`specdecode calibrate`: what steps and drafts cost on this machine, measured as the services measure it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specdecode.cli import show
from specdecode.cli.file import ConfigFlag
from specdecode.config import DraftSettings, ModelServiceSettings, TargetSettings, read_settings
from specdecode.cost_tables import Calibration, DraftCosts, StepCosts
from specdecode.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from specdecode.measuring import Work

_PNG = "specdecode-calibration.png"

S = TypeVar("S", bound=ModelServiceSettings)


def _option(text: str, default: str, metavar: str) -> Any:
    return typer.Option(help=text, metavar=metavar, show_default=default)


@dataclass(frozen=True)
class CalibrateFlags:
    """What is measured, as texts; what is not given is as the services would have it."""

    model: Annotated[
        str | None, _option("Target: a fetched name or a directory", "the target's", "MODEL")
    ] = None
    draft_model: Annotated[
        str | None, _option("Draft model, as --model; without one look-ups alone", "the draft's", "MODEL")
    ] = None
    dtype: Annotated[str | None, _option("Number format of weights and KV", "auto", "DTYPE")] = None
    device: Annotated[str | None, _option("auto, cpu or cuda", "auto", "DEVICE")] = None
    num_threads: Annotated[str | None, _option("Threads of a forward on the CPU", "torch's", "INTEGER")] = (
        None
    )
    num_blocks: Annotated[str | None, _option("KV blocks", "what the memory holds", "INTEGER")] = None
    seconds: Annotated[
        str | None, _option("Budget of the target, and of the drafts", "20, 10", "SECONDS")
    ] = None
    out: Annotated[str | None, _option("Picture to write; none for none", _PNG, "PATH")] = None
    config: ConfigFlag = None


_NAMES = {"seconds": "calibration-seconds"}


def calibrate(
    flags: CalibrateFlags,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure even what is kept")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Measure how long steps and drafts take on this machine, and keep it for the services.

    Shows the table, the fit through it and the ridge: the tokens in flight at which a step spends as long on
    its tokens as on reading the weights, beyond which drafting has to be paid for. What is kept for these
    models, this machine and these libraries is shown without measuring again.
    """
    target = _settings(TargetSettings, flags, model=flags.model)
    draft = _settings(DraftSettings, flags, model=flags.draft_model)
    steps, drafts = _target(target, refresh), _drafts(draft, refresh)
    assert steps.step is not None
    if json:
        found = {"target": steps.to_json(), "draft": drafts.to_json(), "ridge": _finite(steps.step.ridge)}
        show.write_json(found)
    else:
        show.say(_title(steps), "bold")
        _show_steps(steps.step)
        for name, costs in drafts.drafts.items():
            _show_drafts(name, costs)
    _picture(flags.out, steps.step, _title(steps))


def _settings(cls: type[S], flags: CalibrateFlags, model: str | None) -> S:
    shared = ("dtype", "device", "num_threads", "num_blocks", "seconds")
    given = {name: getattr(flags, name) for name in shared} | {"model": model}
    given = {"config": flags.config} | given
    argv = [
        f"--{_NAMES.get(name, name.replace('_', '-'))}={value}"
        for name, value in given.items()
        if value is not None
    ]
    try:
        return read_settings(cls, argv)
    except InvalidArgumentError as error:
        shown = {f"--{long}": f"--{short}" for short, long in _NAMES.items()}
        lines = [f"{shown.get(v.field, v.field)}: {v.description}" for v in error.violations]
        raise typer.BadParameter("\n".join(lines)) from None


def _target(settings: TargetSettings, refresh: bool) -> Calibration:
    from specdecode.calibrations import path_of
    from target_service.__main__ import build_replica
    from target_service.calibration import calibration_of

    with show.ERR.status(f"loading {settings.model}"):
        engine = build_replica(settings).engine
    with _bar() as progress:
        run = _Shown(progress)
        found = calibration_of(engine, settings.calibration_seconds, refresh, run)
    show.note(f"{'measured and kept' if run.used else 'kept'} in {path_of(found.key)}")
    return found


def _drafts(settings: DraftSettings, refresh: bool) -> Calibration:
    from draft_service.__main__ import build_offer
    from draft_service.calibration import calibration_of
    from specdecode.calibrations import path_of

    with show.ERR.status(f"loading {settings.model or 'the n-gram drafter'}"):
        drafters = build_offer(settings).drafters
    with _bar() as progress:
        run = _Shown(progress)
        limits = (settings.max_sequences, settings.calibration_seconds)
        found = calibration_of(drafters, *limits, refresh, run)
    show.note(f"{'measured and kept' if run.used else 'kept'} in {path_of(found.key)}")
    return found


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=show.ERR)
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


class _Shown:
    """Does work under a bar.

    Attributes:
        used: whether there was anything to do.
    """

    def __init__(self, progress: Progress) -> None:
        self.used = False
        self._progress = progress

    def __call__(self, work: Work, what: str) -> None:
        self.used = True
        # A display without a line in it would still print an empty one.
        self._progress.start()
        task = self._progress.add_task(what, total=1.0)
        while work.progress < 1:
            work.advance()
            self._progress.update(task, completed=work.progress)


def _finite(ridge: float) -> float | None:
    """None where tokens in flight are free: JSON has no infinity."""
    return ridge if math.isfinite(ridge) else None


def _title(found: Calibration) -> str:
    key = found.key
    threads = f", {key['threads']} threads" if key.get("threads") else ""
    return f"{key.get('model')} ({key.get('dtype')}) on {key.get('device')}{threads}"


def _show_steps(costs: StepCosts) -> None:
    table = show.table(
        *((name, "right") for name in ("tokens", "rows", "sequences", "cached", "ms", "fit ms"))
    )
    for s in sorted(costs.samples, key=lambda s: (s.tokens, s.sequences, s.cached_tokens)):
        fit = costs.fitted(s.tokens, s.rows, s.cached_tokens, s.sequences)
        cells = (s.tokens, s.rows, s.sequences, s.cached_tokens, f"{1e3 * s.seconds:.2f}", f"{1e3 * fit:.2f}")
        table.add_row(*map(str, cells))
    show.OUT.print(table)
    show.say(
        f"fit: {1e3 * (costs.overhead_seconds + costs.base_seconds):.2f} ms"
        f" + {1e6 * costs.token_seconds:.1f} µs a token ({costs.prefill_share:.0%} of it without logits)"
        f" + {1e6 * costs.sequence_seconds:.1f} µs a sequence"
        f" + {1e6 * costs.cached_token_seconds:.3f} µs a cached token"
        f" + {1e6 * costs.attention_seconds:.3f} µs for each token that attends to it;"
        f" typical error {costs.residual:.1%}"
    )
    show.say(f"ridge: {costs.ridge:.0f} tokens in flight")


def _show_drafts(name: str, costs: DraftCosts) -> None:
    show.say(f"drafting by {name}", "bold")
    table = show.table(*((title, "right") for title in ("γ", "batch", "cached", "ms", "fit ms")))
    for s in sorted(costs.samples, key=lambda s: (s.cached_tokens // s.batch, s.batch, s.num_draft_tokens)):
        fit = costs.round([s.num_draft_tokens] * s.batch, [s.cached_tokens / s.batch] * s.batch)
        cells = (s.num_draft_tokens, s.batch, s.cached_tokens, f"{1e3 * s.seconds:.3f}", f"{1e3 * fit:.3f}")
        table.add_row(*map(str, cells))
    show.OUT.print(table)
    show.say(f"typical error {costs.residual:.1%}")


def _picture(out: str | None, costs: StepCosts, title: str) -> None:
    from specdecode.cli.calibration_picture import draw

    if out is not None and out.lower() == "none":
        return
    path = Path(out or _PNG)
    try:
        draw(costs, title, path)
    except FailedPreconditionError as error:
        if out is not None:
            raise
        show.note(f"no picture: {error.message}")
        return
    except OSError as error:
        raise InvalidArgumentError.of("out", f"{path} can't be written: {error}") from error
    show.note(f"picture: {path}")
