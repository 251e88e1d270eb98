"""`specdecode stats`: what the records of requests say, by any of their fields."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode.cli import show
from specdecode.cli.flags import refused
from specdecode.errors import FailedPreconditionError, InvalidArgumentError
from specdecode.records import RequestRecord, TimedRounds, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BUCKETS = ((0.0, "0"), (0.5, "0-0.5"), (0.9, "0.5-0.9"), (1.2, "0.9-1.2"))


class Format(Enum):
    """What is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True)
class Group:
    """Requests that are alike in one field; shares and seconds, None where nothing says them.

    Attributes:
        acceptance_p50, acceptance_p99: of the requests' own shares of tested drafts that were accepted; 99 %
            of the requests have more than `acceptance_p99`.
        speedup_p50, speedup_p99: of the requests' own observed speedups, as above.
        theory_p50: of what Leviathan's formula gives for them.
        speedup: of all requests together: seconds per token of rounds without drafts over those with.
        gap: median of observed less theoretical, of requests that have both.
        draft, queue, verification, rtt: mean seconds of a round with drafts asked for: drafts computed,
            waiting for a step, the step, the way between the services.
        plain_step: mean seconds of a step of rounds without drafts; what verification takes beyond it is the
            price of verifying several tokens.
        fallback_rate: requests in which drafts were wanted and did not come.
    """

    group: str
    requests: int
    tokens: int
    acceptance_p50: float | None
    acceptance_p99: float | None
    speedup_p50: float | None
    speedup_p99: float | None
    theory_p50: float | None
    speedup: float | None
    gap: float | None
    draft: float | None
    verification: float | None
    plain_step: float | None
    rtt: float | None
    queue: float | None
    fallback_rate: float
    seconds_p50: float | None
    seconds_p99: float | None
    first_token_p50: float | None
    first_token_p99: float | None


def group_of(name: str, records: Sequence[RequestRecord]) -> Group:
    """Figures of requests; at least one."""
    drafted = sum((record.drafted for record in records), TimedRounds())
    plain = sum((record.plain for record in records), TimedRounds())
    slow, fast = plain.seconds_per_token, drafted.seconds_per_token
    gaps = [
        record.speedup_observed - record.speedup_theoretical
        for record in records
        if record.speedup_observed is not None and record.speedup_theoretical is not None
    ]
    acceptances = _known(record.acceptance for record in records)
    observed = _known(record.speedup_observed for record in records)
    first = _known(record.first_token_seconds for record in records)
    seconds = [record.seconds for record in records]
    per_round = max(drafted.num_rounds, 1)
    has_drafts = drafted.num_rounds > 0
    return Group(
        group=name,
        requests=len(records),
        tokens=sum(record.num_emitted for record in records),
        acceptance_p50=quantile(acceptances, 0.5),
        acceptance_p99=quantile(acceptances, 0.01),
        speedup_p50=quantile(observed, 0.5),
        speedup_p99=quantile(observed, 0.01),
        theory_p50=quantile(_known(record.speedup_theoretical for record in records), 0.5),
        speedup=slow / fast if slow and fast else None,
        gap=quantile(gaps, 0.5),
        draft=drafted.draft / per_round if has_drafts else None,
        verification=drafted.step / per_round if has_drafts else None,
        plain_step=plain.step / plain.num_rounds if plain.num_rounds else None,
        rtt=drafted.rest / per_round if has_drafts else None,
        queue=drafted.queue / per_round if has_drafts else None,
        fallback_rate=sum(record.fallback_triggered for record in records) / len(records),
        seconds_p50=quantile(seconds, 0.5),
        seconds_p99=quantile(seconds, 0.99),
        first_token_p50=quantile(first, 0.5),
        first_token_p99=quantile(first, 0.99),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is at least as large as this share of them; None of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def groups(records: Iterable[RequestRecord], by: str) -> list[Group]:
    """One group for each value of a field, in their order.

    Raises:
        InvalidArgumentError: records have no such field, or it holds more than one value.
    """
    key = _key(by)
    found: dict[str, list[RequestRecord]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return [group_of(name, own) for name, own in sorted(found.items())]


def _key(by: str) -> Callable[[RequestRecord], str]:
    if by == "temperature":
        return lambda record: temperature_bucket(record.temperature)
    if by == "drafter":
        return lambda record: "+".join(record.drafters) or "none"
    plain = [field.name for field in fields(RequestRecord) if field.name not in _COMPOUND]
    if by not in plain:
        known = ", ".join(["drafter", *plain])
        raise InvalidArgumentError.of(
            "--by", f"{by!r} is no field that requests can be told apart by: {known}"
        )
    return lambda record: str(getattr(record, by))


_COMPOUND = {"drafters", "alphas", "tested", "passed", "runs", "reasons", "drafted", "plain", "tokens"}


def temperature_bucket(temperature: float) -> str:
    """As the router's figures name it."""
    if temperature == 0:
        return "0"
    return next((name for bound, name in _BUCKETS if temperature < bound), "1.2-2")


def stats(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Records that a router wrote")],
    by: Annotated[str, typer.Option(help="Field that groups requests, or drafter")] = "temperature",
    format: Annotated[Format, typer.Option(help="What is printed")] = Format.TABLE,
    png: Annotated[Path | None, typer.Option(help="Draw a picture, too", show_default="none")] = None,
) -> None:
    """Show what records of requests say.

    Acceptance and observed speedup against theory, where a round's time went, and how often drafts were
    wanted and did not come. P50 and P99 are over requests: for acceptance and speedup P99 is what 99 % of
    them exceed. A router writes records with --record-path FILE.
    """
    if png is not None and png.suffix != ".png":
        raise refused(png, "a path that ends in .png")
    found = groups(read_records(files), by)
    if not found:
        show.note("no records")
        return
    if format is Format.CSV:
        _write_csv(found)
    elif format is Format.JSON:
        show.write_json({"by": by, "groups": [asdict(each) for each in found]})
    else:
        _print(found, by)
    if png is not None:
        draw(found, by, png)


def _write_csv(found: Sequence[Group]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = [field.name for field in fields(Group)]
    writer.writerow(names)
    writer.writerows([["" if v is None else v for v in asdict(each).values()] for each in found])


def _print(found: Sequence[Group], by: str) -> None:
    numbers = ("requests", "tokens", "accepted", "P99", "speedup", "P50", "P99", "theory", "gap", "fallback")
    shown = show.table((by, "left"), *((name, "right") for name in numbers))
    times = show.table(
        (by, "left"),
        *((name, "right") for name in ("draft", "verify", "plain step", "rtt", "queue")),
        *((name, "right") for name in ("first token", "P99", "whole", "P99")),
    )
    for each in found:
        shown.add_row(
            each.group,
            str(each.requests),
            str(each.tokens),
            _text(each.acceptance_p50, "{:.0%}"),
            _text(each.acceptance_p99, "{:.0%}"),
            *(_text(v, "{:.2f}") for v in (each.speedup, each.speedup_p50, each.speedup_p99)),
            _text(each.theory_p50, "{:.2f}"),
            _text(each.gap, "{:+.2f}"),
            f"{each.fallback_rate:.0%}",
        )
        parts = (each.draft, each.verification, each.plain_step, each.rtt, each.queue)
        whole = (each.first_token_p50, each.first_token_p99, each.seconds_p50, each.seconds_p99)
        times.add_row(each.group, *(_text(v and v * 1000, "{:.1f}") for v in (*parts, *whole)))
    show.OUT.print(shown)
    show.say("milliseconds: of a round with drafts, and of requests")
    show.OUT.print(times)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def draw(found: Sequence[Group], by: str, path: Path) -> None:
    """Writes a PNG: acceptance, speedup against theory, and where a round's time went, for each group.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FailedPreconditionError(
            "a picture needs matplotlib: pip install 'specdecode[bench]'"
        ) from error
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    accepted, speed, parts = figure.subplots(1, 3)
    _bars(accepted, found, "accepted / tested", {"P50": "acceptance_p50", "P99": "acceptance_p99"})
    _bars(speed, found, "speedup", {"observed": "speedup_p50", "theory": "theory_p50"})
    speed.axhline(1.0, color="grey", linewidth=0.8)
    columns = {"draft": "draft", "verification": "verification", "rtt": "rtt", "queue": "queue"}
    _bars(parts, found, "ms of a round with drafts", columns, 1000.0)
    for axes in (accepted, speed, parts):
        axes.set_xlabel(by)
    figure.savefig(path, dpi=110)


def _bars(
    axes: Axes, found: Sequence[Group], title: str, columns: dict[str, str], scale: float = 1.0
) -> None:
    width = 0.8 / len(columns)
    for index, (name, field) in enumerate(columns.items()):
        heights = [(getattr(each, field) or 0.0) * scale for each in found]
        axes.bar([place + index * width for place in range(len(found))], heights, width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(found))], [each.group for each in found])
    axes.set_title(title)
    axes.legend()
