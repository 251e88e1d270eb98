"""What the page asks for beside texts: load, costs and figures now, and what is planned for this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.router import Router
from specdecode.cost import DraftCosts, StepCosts, survivals
from specdecode.figures import Figures
from specdecode.planner.plan import MeasuredSystem, Question, Row, plan_row
from specdecode.requests import ReplicaStatus
from specdecode.types import DrafterKind

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512
"""Tokens of each sequence that is planned for."""
MAX_DRAFT_TOKENS = 8
_UNKNOWN_ALPHA = 0.6
"""Where nothing was drafted yet."""


def state_of(router: Router) -> dict[str, Any]:
    """Load of every replica, costs of the target, and sums over all rounds since the start."""
    status = router.status()
    return {
        "version": status.version,
        "num_requests": status.num_requests,
        "targets": [_replica(replica) for replica in status.targets],
        "drafts": [_replica(replica) for replica in status.drafts],
        "costs": None if router.step_costs is None else _costs(router.step_costs),
        "figures": _sums(router.figures()),
    }


def _replica(replica: ReplicaStatus) -> dict[str, Any]:
    model = replica.model
    return {
        "address": replica.address,
        "connected": replica.connected,
        "model": None if model is None else model.name,
        "dtype": None if model is None else model.dtype,
        "drafters": [] if model is None else [kind.value for kind in model.drafters],
        "load": None if replica.load is None else vars(replica.load),
        "num_sequences": replica.num_sequences,
    }


def _costs(costs: StepCosts) -> dict[str, Any]:
    """The measured staircase, and where tokens in flight begin to cost more than the step itself."""
    return {
        "ridge": costs.ridge if math.isfinite(costs.ridge) else None,
        "tokens": costs.tokens,
        "seconds": costs.seconds,
    }


def _sums(figures: Iterable[Figures]) -> dict[str, int]:
    """Counts that differences are taken of: γ of the last second is what was drafted by what was run."""
    entries = list(figures)
    names = ("num_rounds", "num_speculated", "num_drafted", "num_accepted", "num_emitted")
    return {name: sum(getattr(entry, name) for entry in entries) for name in names}


def plan_of(
    steps: StepCosts | None, drafts: Mapping[DrafterKind, DraftCosts], figures: Sequence[Figures]
) -> dict[str, Any]:
    """Throughput by batch without drafts and as the policy would draft; no rows if nothing was measured."""
    if steps is None or not drafts:
        return {"rows": []}
    kind, alphas = _drafter(figures, drafts)
    system = MeasuredSystem("this machine", steps, drafts[kind])
    question = Question(survivals(alphas), (1,))
    rows = [_row(plan_row(system, question, batch, CONTEXT)) for batch in BATCHES]
    return {"drafter": kind.value, "alphas": alphas, "context": CONTEXT, "rows": rows}


def _drafter(
    figures: Sequence[Figures], drafts: Mapping[DrafterKind, DraftCosts]
) -> tuple[DrafterKind, tuple[float, ...]]:
    """The drafter that drafted most of those that are calibrated, and its α by position."""
    own = {kind: [entry for entry in figures if entry.label.drafter is kind] for kind in drafts}
    kind = max(own, key=lambda kind: sum(entry.num_drafted for entry in own[kind]))
    return kind, _alphas(own[kind])


def _alphas(figures: Sequence[Figures]) -> tuple[float, ...]:
    tested, passed = [0.0] * MAX_DRAFT_TOKENS, [0.0] * MAX_DRAFT_TOKENS
    for entry in figures:
        for position in range(min(len(entry.tested), MAX_DRAFT_TOKENS)):
            tested[position] += entry.tested[position]
            passed[position] += entry.passed[position]
    alphas: list[float] = []
    for reached, accepted in zip(tested, passed, strict=True):
        last = alphas[-1] if alphas else _UNKNOWN_ALPHA
        alphas.append(min(accepted / reached, 1.0) if reached > 0 else last)
    return tuple(alphas)


def _row(row: Row) -> dict[str, float]:
    return {
        "batch": row.batch,
        "off": row.off.throughput,
        "auto": row.auto.throughput,
        "num_draft_tokens": row.auto.num_draft_tokens,
        "price": row.price,
    }
