"""Options of the commands from the file that the services read, too: one section for each command."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated, Any

import typer

from specdecode.config import CLIENT, CONFIG_VARIABLE, read_section
from specdecode.errors import InvalidArgumentError

CLIENT_OPTIONS = ("address", "timeout", "api_key", "tls_ca", "tls_cert", "tls_key", "tls_name")
"""Of the section that all commands share which ask a router."""


def _take(context: typer.Context, path: str | None) -> str | None:
    """Makes the command's section its defaults, below the command line and the environment."""
    if path is not None and not context.resilient_parsing:
        try:
            context.default_map = _defaults(context, path)
        except InvalidArgumentError as error:
            raise typer.BadParameter(error.message) from None
    return path


def _defaults(context: typer.Context, path: str) -> dict[str, Any]:
    name = context.command.name or ""
    if context.ignore_unknown_options:
        return {}  # the options are another program's: `arguments_of`
    params = context.command.params
    options = {str(one.name): one for one in params if one.param_type_name == "option"}
    known = options.keys() - {"config"}
    shared = _checked(path, CLIENT, CLIENT_OPTIONS)
    given = {key: value for key, value in shared.items() if key in known} | _checked(path, name, known)
    return {key: _as_typed(options[key], value) for key, value in given.items() if value is not None}


def _checked(path: str, section: str, known: Collection[str]) -> dict[str, Any]:
    values = {key.replace("-", "_"): value for key, value in read_section(path, section).items()}
    if unknown := sorted(values.keys() - set(known)):
        description = f"unknown option; known are {', '.join(sorted(known))}"
        raise InvalidArgumentError.of(f"{path} [{section}] {unknown[0]}", description)
    for key, value in values.items():
        if any(isinstance(entry, list | dict) for entry in _entries(value)):
            description = "a value, or a list of values, is needed"
            raise InvalidArgumentError.of(f"{path} [{section}] {key}", description)
    return values


def _as_typed(option: Any, value: Any) -> Any:
    """As on the command line, so that both are read and refused alike; flags stay booleans."""
    if getattr(option, "is_flag", False) and isinstance(value, bool):
        return value
    if option.multiple:
        return [str(entry) for entry in _entries(value)]
    return str(value)


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


ConfigFlag = Annotated[
    str | None,
    typer.Option(
        "--config",
        help=f"TOML or YAML file, a section of options for each command and service (env: {CONFIG_VARIABLE})",
        metavar="PATH",
        envvar=CONFIG_VARIABLE,
        show_default=False,
        show_envvar=False,
        is_eager=True,
        callback=_take,
    ),
]


def arguments_of(command: str, path: str | None) -> list[str]:
    """Arguments of a command whose options are another program's: those of the file, then the environment's.

    Raises:
        InvalidArgumentError: the file can't be read.
    """
    prefix = f"SPECDECODE_{command.upper()}_"
    section = {} if path is None else read_section(path, command)
    variables = {
        name.removeprefix(prefix).lower(): value
        for name, value in os.environ.items()
        if name.startswith(prefix) and value
    }
    return [argument for name, value in {**section, **variables}.items() for argument in _spelt(name, value)]


def _spelt(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, list):
        return [f"{option}={entry}" for entry in value]
    if isinstance(value, bool):
        return [option] if value else []
    return [] if value is None else [f"{option}={value}"]
