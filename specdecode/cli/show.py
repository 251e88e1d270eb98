"""What commands print: text on stdout, everything about it on stderr, so that either can be piped alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdecode.client import Completion
from specdecode.errors import SpecdecodeError
from specdecode.requests import EmittedToken, ReplicaStatus, RouterStatus
from specdecode.types import RoundRecord, Usage

OUT = Console(highlight=False)
ERR = Console(highlight=False, stderr=True)

_SHOWN = {"\n", "\t"}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _SHOWN}


def write(text: str) -> None:
    """A model's text as it comes; on a terminal, control characters can't reach the terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(text: str, style: str = "", console: Console = OUT) -> None:
    """One message, on one line however long it is."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def note(text: str, style: str = "dim") -> None:
    """As `say`, on stderr."""
    say(text, style, ERR)


def write_json(value: object) -> None:
    """One JSON object in one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def complain(error: SpecdecodeError) -> None:
    """An error as its message, with the fields that the message does not name."""
    ERR.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    for violation in error.violations:
        if f"{violation.field}:" not in error.message:
            note(f"  {violation.field}: {violation.description}", "")
    if error.retry_after is not None:
        note(f"  trying again may help after {error.retry_after:g} s", "")


def summary(usage: Usage, seconds: float, end: str = "") -> str:
    """One line about what was emitted; `seconds` from the request to its end."""
    parts = [
        f"{usage.num_emitted} tokens in {usage.num_rounds} rounds",
        f"{usage.num_accepted} of {usage.num_drafted} drafts accepted{_share(usage)}",
        f"{rate(usage, seconds):.1f} tok/s",
        end,
    ]
    return " · ".join(part for part in parts if part)


def _share(usage: Usage) -> str:
    return f" ({usage.num_accepted / usage.num_drafted:.0%})" if usage.num_drafted else ""


def rate(usage: Usage, seconds: float) -> float:
    """Emitted tokens a second."""
    return usage.num_emitted / max(seconds, 1e-9)


def end_of(completion: Completion) -> str:
    """Why the text ended, in words."""
    if completion.stop is not None:
        return f"stopped at {completion.stop!r}"
    return "" if completion.finish_reason is None else f"ended by {completion.finish_reason.value}"


def table(*columns: tuple[str, str]) -> Table:
    """A table without frames; columns are (title, justification)."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name, justify in columns:
        # Folded where there is no room: nothing that is told may get lost in a narrow terminal or a pipe.
        shown.add_column(name, justify=justify, no_wrap=justify == "right", overflow="fold")  # type: ignore[arg-type]
    return shown


def rounds_table(rounds: Sequence[RoundRecord]) -> Table:
    """One row a round: γ drafted tokens, E(γ) emitted ones expected, times in ms. Rounds in a row that had no
    drafts, for the same reason, share one.
    """
    shown = table(
        *((name, "right") for name in ("round", "γ", "accepted")),
        ("added", "left"),
        *((name, "right") for name in ("E(γ)", "ms", "draft", "step")),
        ("drafter", "left"),
    )
    for _, group in groupby(enumerate(rounds), key=_row_key):
        shown.add_row(*_row([record for _, record in group]))
    return shown


def _row_key(numbered: tuple[int, RoundRecord]) -> tuple[int, str]:
    number, record = numbered
    return (number, "") if record.num_drafted else (-1, record.reason)


def _row(rounds: Sequence[RoundRecord]) -> list[str | Text]:
    first, last = rounds[0], rounds[-1]
    origin = last.last_origin.value
    reason = Text(last.reason.replace("_", " "), "dim")
    drafted = last.num_drafted > 0
    return [
        str(first.index) if first is last else f"{first.index}-{last.index}",
        str(last.num_drafted) if drafted else "-",
        str(last.num_accepted) if drafted else "-",
        origin if first is last else f"{len(rounds)} {origin}",
        f"{last.predicted_emitted:.1f}" if drafted and last.predicted_seconds else "-",
        _milliseconds(record.seconds for record in rounds),
        _milliseconds(record.draft_seconds for record in rounds) if drafted else "-",
        _milliseconds(record.times.step for record in rounds),
        last.drafter.value if last.drafter and drafted else reason,
    ]


def _milliseconds(seconds: Iterable[float]) -> str:
    return f"{1000 * sum(seconds):.1f}"


def tokens_table(tokens: Sequence[EmittedToken]) -> Table:
    """One row a token, with its logprob, its rank and the most probable tokens."""
    columns = (
        ("token", "right"),
        ("id", "right"),
        ("origin", "left"),
        ("logprob", "right"),
        ("rank", "right"),
    )
    shown = table(*columns, ("most probable: id logprob", "left"))
    for number, token in enumerate(tokens):
        told = token.logprobs
        known = ("", "", "")
        if told is not None:
            top = ", ".join(f"{token_id} {logprob:.3f}" for token_id, logprob in told.top)
            known = (f"{told.logprob:.3f}", str(told.rank), top)
        shown.add_row(str(number), str(token.token_id), token.origin.value, *known)
    return shown


def status_tables(status: RouterStatus) -> list[Table]:
    """What every replica is, and what it has to do: one row a replica in each.

    The price is what one more token in flight costs in emitted tokens; idle is the share of the time that the
    router was waited for in which nothing ran.
    """
    what = table(*((name, "left") for name in ("service", "address", "state", "model", "dtype")))
    numbers = ("running", "waiting", "free blocks", "price", "idle")
    load = table(("address", "left"), *((name, "right") for name in numbers), ("drafters", "left"))
    for service, replicas in (("target", status.targets), ("draft", status.drafts)):
        for replica in replicas:
            what.add_row(service, replica.address, *_what_row(replica))
            load.add_row(replica.address, *_load_row(replica))
    return [what, load]


def _what_row(replica: ReplicaStatus) -> list[str | Text]:
    model = replica.model
    return [
        Text("up", "green") if replica.connected else Text("down", "red"),
        model.name if model else "",
        f"{model.dtype} {model.device}".strip() if model else "",
    ]


def _load_row(replica: ReplicaStatus) -> list[str]:
    model, load = replica.model, replica.load
    num_blocks = load.num_blocks if load and load.num_blocks else model.num_blocks if model else 0
    free = f"{load.num_free_blocks}/" if load and load.num_blocks else ""
    return [
        str(load.num_running if load else replica.num_sequences),
        str(load.num_waiting) if load else "",
        f"{free}{num_blocks}" if num_blocks else "",
        f"{load.price:.2f}" if load else "",
        f"{load.idle_share:.0%}" if load else "",
        ", ".join(drafter.value for drafter in model.drafters) if model else "",
    ]


# As JSON


def completion_json(completion: Completion, seconds: float) -> dict[str, Any]:
    """All that is known of one choice."""
    error = completion.error
    return {
        "request_id": completion.request_id,
        "choice": completion.choice,
        "text": completion.text,
        "tokens": [_token_json(token) for token in completion.tokens],
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
        "stop": completion.stop,
        "usage": asdict(completion.usage),
        "rounds": [_round_json(record) for record in completion.rounds],
        "seconds": seconds,
        "error": error and {"reason": error.reason.value, "message": error.message},
    }


def _token_json(token: EmittedToken) -> dict[str, Any]:
    value: dict[str, Any] = {"id": token.token_id, "origin": token.origin.value}
    if token.logprobs is not None:
        value |= {"logprob": token.logprobs.logprob, "rank": token.logprobs.rank, "top": token.logprobs.top}
    return value


def _round_json(record: RoundRecord) -> dict[str, Any]:
    drafter = record.drafter and record.drafter.value
    return asdict(record) | {"last_origin": record.last_origin.value, "drafter": drafter}


def status_json(status: RouterStatus) -> dict[str, Any]:
    """All that the router tells of itself."""
    return {
        "version": status.version,
        "num_requests": status.num_requests,
        "targets": [_replica_json(replica) for replica in status.targets],
        "drafts": [_replica_json(replica) for replica in status.drafts],
    }


def _replica_json(replica: ReplicaStatus) -> dict[str, Any]:
    value = asdict(replica)
    if replica.model is not None:
        value["model"]["drafters"] = [drafter.value for drafter in replica.model.drafters]
    return value
