"""`specdecode models`: the model cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from specdecode.cli import show
from specdecode.errors import InvalidArgumentError

if TYPE_CHECKING:
    from specdecode.models import ModelEntry

# specdecode.models is imported inside the commands: no other command should wait for what it imports.

app = typer.Typer(help="Fetch, list and convert models.", no_args_is_help=True)


def fetch_shown(names: Sequence[str]) -> list[Path]:
    """Directories of models (for none named, of all known), fetched if needed; progress goes to stderr."""
    from specdecode import models

    names = names or list(models.KNOWN_MODELS)
    complete = {entry.name for entry in models.list_models() if entry.state == "complete"}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    # A display without a line in it would still print an empty one.
    with nullcontext() if complete.issuperset(names) else Progress(*columns, console=show.ERR) as progress:
        return [_fetch(name, progress) for name in names]


def _fetch(name: str, progress: Progress | None) -> Path:
    from specdecode import models

    here = "/" in name or (models.cache_dir() / name).is_dir()
    if here and name not in models.KNOWN_MODELS:
        return models.resolve(name)
    return models.fetch(name, progress)


@app.command()
def fetch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Known models (default: all of them), or hub ids as in org/name",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download, check and convert known models, once; prints their directories.

    A model of the hub is downloaded as the hub has it, and not again; one that lies here already is only
    looked for.
    """
    for directory in fetch_shown(names or []):
        show.say(str(directory))


@app.command("list")
def list_models(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """List known and converted models, and which of them are in the cache."""
    from specdecode import models

    entries = models.list_models()
    if json:
        show.write_json(
            {"cache": str(models.cache_dir()), "models": [_entry_json(entry) for entry in entries]}
        )
        return
    table = show.table(("model", "left"), ("state", "left"), ("size", "right"))
    for entry in entries:
        table.add_row(entry.name, entry.state, decimal(entry.size_bytes) if entry.size_bytes else "")
    show.OUT.print(table)
    show.say(f"in {models.cache_dir()}", "dim")


def _entry_json(entry: ModelEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "state": entry.state,
        "size_bytes": entry.size_bytes,
        "path": str(entry.path),
    }


@app.command()
def convert(
    gguf: Annotated[Path, typer.Argument(help="A GGUF file", exists=True, dir_okay=False)],
    output: Annotated[
        Path | None, typer.Option(help="Directory to write", show_default="in the cache, by the file's name")
    ] = None,
) -> None:
    """Convert a GGUF file to a model directory of safetensors, which every --model option takes."""
    from specdecode import models

    directory = output or models.cache_dir() / gguf.stem.lower()
    if output is None and directory.name in models.KNOWN_MODELS:
        raise InvalidArgumentError.of(
            "output", f"{directory.name} is a known model's name; choose a directory"
        )
    with show.ERR.status(f"converting {gguf.name}"):
        models.convert(gguf, directory)
    name = directory.name if output is None else directory
    show.say(f"{directory}\nserve it with: specdecode up --model {name}")
