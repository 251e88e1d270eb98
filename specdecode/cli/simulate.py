"""`specdecode simulate`: the router's simulator, as a process of its own that takes the same arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import typer

from specdecode.cli.file import ConfigFlag, arguments_of

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of the command: every option is the simulator's, --help too."""


def simulate(context: typer.Context, config: ConfigFlag = None) -> None:
    """How a fleet would do under the router's own policy, by discrete events; --help lists its options."""
    child = [sys.executable, "-m", "specdecode.cli.child", str(os.getpid()), "router.simulation"]
    raise typer.Exit(subprocess.call([*child, *arguments_of("simulate", config), *context.args]))
