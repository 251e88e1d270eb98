"""The commands, put together; what goes wrong ends as one message and an exit code."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdecode import __version__
from specdecode.cli import (
    audit,
    calibrate,
    chat,
    demo,
    distill,
    doctor,
    generate,
    keys,
    models,
    operate,
    planning,
    scale,
    show,
    simulate,
    stats,
    up,
)
from specdecode.cli.flags import bundled
from specdecode.errors import SpecdecodeError


class _Group(TyperGroup):
    """Commands whose errors are messages: exit code 1 for what failed, 2 for what was asked wrongly."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecodeError as error:
            show.complain(error)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding: serve a model, and ask it.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        show.say(__version__)
        raise typer.Exit


@app.callback()
def specdecode(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


app.command()(bundled(up.up))
app.command()(bundled(generate.generate))
app.command()(bundled(chat.chat))
app.command()(bundled(generate.status))
app.command()(demo.demo)
app.command()(bundled(planning.plan, "SPECDECODE_PLAN_"))
app.command(context_settings=simulate.PASSED_ON)(simulate.simulate)
app.command()(bundled(calibrate.calibrate, "SPECDECODE_CALIBRATE_"))
app.command()(bundled(distill.distill, "SPECDECODE_DISTILL_"))
app.command()(bundled(operate.figures))
app.command()(bundled(doctor.doctor))
app.command()(bundled(scale.scale))
app.command()(bundled(stats.stats, "SPECDECODE_STATS_"))
app.command()(bundled(audit.audit, "SPECDECODE_AUDIT_"))
app.add_typer(operate.policy, name="policy")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
