"""Outcomes as a table for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from router.simulation.fleet import Outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """One column a way to decode."""
    found = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    found.add_column("", overflow="fold")
    for outcome in outcomes:
        found.add_column(outcome.way.name, justify="right", no_wrap=True)
    for name, texts in _rows(outcomes):
        found.add_row(name, *texts)
    return found


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    rows = [
        ("tokens/s", [f"{o.throughput:.0f}" for o in outcomes]),
        ("ms a token", [f"{1e3 * o.mean_token_seconds:.2f}" for o in outcomes]),
        ("ms a token, p99 of requests", [f"{1e3 * o.token_seconds(99):.2f}" for o in outcomes]),
        ("first token ms, median", [f"{1e3 * o.first_seconds(50):.0f}" for o in outcomes]),
        ("first token ms, p99", [f"{1e3 * o.first_seconds(99):.0f}" for o in outcomes]),
        ("γ", [f"{o.mean_draft_tokens:.2f}" for o in outcomes]),
        ("acceptance", ["-" if o.acceptance is None else f"{o.acceptance:.1%}" for o in outcomes]),
        ("emitted a round", [f"{o.tally.num_emitted / o.tally.num_rounds:.2f}" for o in outcomes]),
        ("utilisation", [f"{sum(o.utilisation) / len(o.utilisation):.0%}" for o in outcomes]),
        ("least, most of a replica", [_ends(o.utilisation) for o in outcomes]),
    ]
    reasons = sorted({reason for outcome in outcomes for reason in outcome.tally.reasons})
    for reason in reasons:
        shares = [o.tally.reasons[reason] / o.tally.num_rounds for o in outcomes]
        rows.append((f"rounds: {reason.value}", [f"{share:.1%}" if share else "-" for share in shares]))
    return rows


def _ends(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%}, {max(shares):.0%}"


def document(outcome: Outcome) -> dict[str, Any]:
    """One way's figures; times in seconds."""
    tally = outcome.tally
    return {
        "way": outcome.way.name,
        "seconds": outcome.seconds,
        "num_requests": len(outcome.served),
        "num_emitted": tally.num_emitted,
        "num_rounds": tally.num_rounds,
        "num_steps": tally.num_steps,
        "num_drafted": tally.num_drafted,
        "num_accepted": tally.num_accepted,
        "throughput": outcome.throughput,
        "mean_token_seconds": outcome.mean_token_seconds,
        "token_seconds": {str(p): outcome.token_seconds(p) for p in (50, 90, 99)},
        "first_token_seconds": {str(p): outcome.first_seconds(p) for p in (50, 90, 99)},
        "mean_draft_tokens": outcome.mean_draft_tokens,
        "acceptance": outcome.acceptance,
        "rounds_by_reason": {reason.value: count for reason, count in sorted(tally.reasons.items())},
        "drafted_by_drafter": {kind.value: count for kind, count in tally.drafters.items()},
        "utilisation": list(outcome.utilisation),
    }
