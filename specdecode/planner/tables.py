"""Plans as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from specdecode.cost import SpeedupRow
from specdecode.planner.plan import DraftOption, Row


def speedups(rows: Sequence[SpeedupRow]) -> Table:
    """γ, survival, E and speedup."""
    table = _table("γ", "survival", "E(γ)", "speedup")
    for row in rows:
        table.add_row(
            str(row.num_draft_tokens), f"{row.survival:.3f}", f"{row.emitted:.3f}", f"{row.speedup:.2f}"
        )
    return table


def throughputs(rows: Sequence[Row]) -> Table:
    """Tokens a second by batch (and context): off, fixed γ and the policy."""
    lengths = list(rows[0].fixed)
    table = _table(*_places(rows), "off", *(f"γ = {length}" for length in lengths), "policy")
    for row in rows:
        speeds = (row.off, *row.fixed.values(), row.auto)
        table.add_row(*_place(rows, row), *(f"{speed.throughput:.0f}" for speed in speeds))
    return table


def policies(rows: Sequence[Row], other_form: Sequence[Row] | None, names: tuple[str, str]) -> Table:
    """What the policy does by batch (and context), and what it brings the batch and one user.

    Args:
        rows: of the form that is planned with.
        other_form: the same rows in the other form, for its step times and gains.
        names: of both forms.
    """
    forms = [rows, other_form] if other_form else [rows]
    heads = [f" {name}" if other_form else "" for name in names[: len(forms)]]
    table = _table(
        *_places(rows),
        *(f"ms{head}" for head in heads),
        "γ",
        *(f"gain{head}" for head in heads),
        "price",
        "user off",
        "user",
    )
    for index, row in enumerate(rows):
        same = [form[index] for form in forms]
        table.add_row(
            *_place(rows, row),
            *(f"{1e3 * each.off.seconds:.2f}" for each in same),
            f"{row.auto.num_draft_tokens:.1f}",
            *(f"{each.change(each.auto):+.1%}" for each in same),
            f"{row.price:.2f}",
            f"{row.off.per_user:.1f}",
            f"{row.auto.per_user:.1f}",
        )
    return table


def _places(rows: Sequence[Row]) -> list[str]:
    return ["context", "batch"] if len({row.context for row in rows}) > 1 else ["batch"]


def _place(rows: Sequence[Row], row: Row) -> list[str]:
    return [str(row.context), str(row.batch)][-len(_places(rows)) :]


def drafts(options: Sequence[DraftOption], rows: Sequence[Sequence[Row]]) -> Table:
    """Gain and γ of the policy with each draft, and the best draft, by batch; rows are [batches][options]."""
    table = _table("batch", "off", *(option.name for option in options), "best draft")
    for of_batch in rows:
        cells = [
            f"{row.auto.throughput:.0f} (γ {row.auto.num_draft_tokens:.1f}, {row.change(row.auto):+.0%})"
            for row in of_batch
        ]
        best = max(range(len(options)), key=lambda index: of_batch[index].auto.throughput)
        name = options[best].name if of_batch[best].auto.throughput > of_batch[best].off.throughput else "off"
        table.add_row(str(of_batch[0].batch), f"{of_batch[0].off.throughput:.0f}", *cells, name)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
