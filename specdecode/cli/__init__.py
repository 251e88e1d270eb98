"""The `specdecode` command."""

from __future__ import annotations


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    # Imported here because every child process that this package starts passes through this module.
    from specdecode.cli.app import app

    app(prog_name="specdecode")
