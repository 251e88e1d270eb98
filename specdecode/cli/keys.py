"""`specdecode keys`: the file of API keys that a router checks callers against."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock

from specdecode.cli import show
from specdecode.cli.flags import checked
from specdecode.errors import NotFoundError
from specdecode.keys import ApiKey, KeyLimits, make_key, read_keys, write_keys

app = typer.Typer(help="Add, list and remove API keys of a router.", no_args_is_help=True)

FileFlag = Annotated[
    Path,
    typer.Option(
        help="File of keys, the router's keys_path (env: SPECDECODE_ROUTER_KEYS_PATH)",
        metavar="PATH",
        envvar="SPECDECODE_ROUTER_KEYS_PATH",
        show_envvar=False,
    ),
]


def _limit(what: str) -> Any:
    parser = checked(int, lambda count: 1 <= count <= 10**9, "1 to 10^9")
    return typer.Option(help=f"{what}; 1 to 10^9", parser=parser, metavar="INTEGER", show_default="no limit")


_WEIGHTS = "0.01 to 100"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two commands at once must not lose each other's keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is; several keys of one name are one tenant")],
    file: FileFlag,
    admin: Annotated[bool, typer.Option("--admin", help="May change the router's policy")] = False,
    weight: Annotated[
        float,
        typer.Option(
            help=f"Share of the turns while requests wait; {_WEIGHTS}",
            parser=checked(float, lambda value: 0.01 <= value <= 100, _WEIGHTS),
            metavar="NUMBER",
            show_default="1",
        ),
    ] = 1.0,
    requests_per_minute: Annotated[int | None, _limit("Requests that may begin in a minute")] = None,
    tokens_per_minute: Annotated[int | None, _limit("Prompt and output tokens in a minute")] = None,
    requests_at_once: Annotated[int | None, _limit("Requests that run or wait at once")] = None,
) -> None:
    """Make a key and print it, once: the file keeps its salted hash only.

    Routers that run with this file know the key from their next call on.
    """
    limits = KeyLimits(requests_per_minute, tokens_per_minute, requests_at_once)
    key, entry = make_key(name, admin=admin, weight=weight, limits=limits)
    with _locked(file):
        known = read_keys(file) if file.exists() else {}
        write_keys(file, {**known, entry.id: entry})
    show.write(f"{key}\n")
    show.note(f"key {entry.id} of {name}; it can't be shown again", "dim")


@app.command("list")
def list_keys(
    file: FileFlag, json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False
) -> None:
    """List keys by id and name, with what they may use."""
    entries = read_keys(file).values()
    if json:
        show.write_json({"keys": [_json(entry) for entry in entries]})
        return
    columns = ("id", "name", "made", "admin", "weight", "requests/min", "tokens/min", "at once")
    table = show.table(*((name, "left") for name in columns))
    for entry in entries:
        limits = (str(count) if count is not None else "" for count in asdict(entry.limits).values())
        made = time.strftime("%Y-%m-%d", time.gmtime(entry.created))
        table.add_row(entry.id, entry.name, made, "yes" if entry.admin else "", f"{entry.weight:g}", *limits)
    show.OUT.print(table)


def _json(entry: ApiKey) -> dict[str, object]:
    hidden = ("salt", "hash")
    return {name: value for name, value in asdict(entry).items() if name not in hidden}


@app.command()
def remove(
    key: Annotated[str, typer.Argument(metavar="ID", help="The key's id, its middle part")], file: FileFlag
) -> None:
    """Remove a key: calls that begin from now on are refused, those that run go on."""
    with _locked(file):
        known = read_keys(file)
        if key not in known:
            raise NotFoundError(f"there is no key {key!r} in {file}")
        write_keys(file, {identity: entry for identity, entry in known.items() if identity != key})
    show.say(f"removed {key} of {known[key].name}")
