"""`specdecode audit`: whether recorded texts are what the target itself would have said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode.cli import show
from specdecode.config import TargetSettings
from specdecode.errors import InvalidArgumentError
from specdecode.records import RequestRecord, read_records
from specdecode.types import Method

if TYPE_CHECKING:
    from specdecode.audit import Audit
    from specdecode.lm.runner import PagedLM

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Audited:
    record: RequestRecord
    audit: Audit


def audit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Records with tokens")],
    model: Annotated[
        str | None, typer.Option(help="Target: a fetched name or a directory", show_default="the records'")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format that the texts were made in: auto, float32, bfloat16, float16")
    ] = "auto",
    limit: Annotated[int | None, typer.Option(help="Requests at most", min=1, show_default="all")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Confirm that recorded texts are the target's own.

    Scores the tokens of greedy and seeded requests with one plain prefill and compares each with the target's
    own pick for that seed. Where they differ by less than the number format can tell, that is a tie, not a
    fault. Exit code 1 where a token is not the target's. Needs records with tokens: --record-tokens of the
    router.
    """
    audited = list(_audited(files, model, dtype, limit))
    if not audited:
        raise InvalidArgumentError.of(
            "FILE", "no record with tokens of a greedy or seeded request; the router needs --record-tokens"
        )
    if json:
        show.write_json({"requests": [_told(each) for each in audited]})
    else:
        _print(audited)
    if any(each.audit.num_violations for each in audited):
        raise typer.Exit(1)


def _audited(files: Sequence[Path], model: str | None, dtype: str, limit: int | None) -> Iterator[_Audited]:
    from specdecode.audit import AUDITABLE
    from specdecode.audit import audit as score

    lm: PagedLM | None = None
    loaded = ""
    count = 0
    for record in read_records(files):
        if record.tokens is None or Method(record.method) not in AUDITABLE:
            continue
        if count == limit:
            return
        wanted = model or record.model
        if lm is None or wanted != loaded:
            lm, loaded = _load(wanted, dtype), wanted
        count += 1
        yield _Audited(record, score(lm, Method(record.method), record.tokens))


def _load(name: str, dtype: str) -> PagedLM:
    """The target alone, with room for one text."""
    from specdecode import models, tokenizer
    from specdecode.lm.memory import choose_device
    from specdecode.lm.model import load_model
    from specdecode.lm.runner import PagedLM

    settings = TargetSettings(model=name)
    path = models.resolve(name)
    with show.ERR.status(f"loading {name}"):
        found = load_model(path, dtype, choose_device(settings.device), settings.kernels)
        found = found.limited(tokenizer.vocab_size(tokenizer.load_tokenizer(path)), 0)
    return PagedLM(found, -(-found.max_length // _BLOCK_SIZE) + 1, _BLOCK_SIZE, prefix_cache=False)


def _told(audited: _Audited) -> dict[str, object]:
    return {"id": audited.record.id, "method": audited.record.method, **asdict(audited.audit)}


def _print(audited: Sequence[_Audited]) -> None:
    findings = show.table(
        *(("request", "left"), ("choice", "right"), ("position", "right"), ("emitted", "right")),
        *(("expected", "right"), ("margin", "right"), ("", "left")),
    )
    for each in audited:
        for found in each.audit.findings:
            findings.add_row(
                each.record.id,
                *(str(v) for v in (found.choice, found.position, found.emitted, found.expected)),
                f"{found.margin:.2g}",
                "tie" if found.is_tie else "not the target's",
            )
    num_tokens = sum(each.audit.num_tokens for each in audited)
    num_violations = sum(each.audit.num_violations for each in audited)
    num_ties = sum(len(each.audit.findings) for each in audited) - num_violations
    if findings.row_count:
        show.OUT.print(findings)
    show.say(
        f"{num_tokens} tokens of {len(audited)} requests: {num_violations} not the target's, {num_ties} ties",
        "bold red" if num_violations else "bold",
    )
