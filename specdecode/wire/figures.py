"""What is measured about speculation, and the operator's limits on it (`router_service.proto`)."""

from __future__ import annotations

from typing import Any

from specdecode.figures import FigureLabel, Figures, Predictions, Regret
from specdecode.requests import PolicyOptions
from specdecode.types import MAX_DRAFT_TOKENS
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire.parts import DRAFTERS, METHODS, refuse

_SUMS = (
    "num_emitted",
    "num_recovered",
    "num_cut",
    "num_fallbacks",
    "num_timed",
    "timed_emitted",
    "seconds",
    "draft_seconds",
    "step_seconds",
    "target_flops",
)
_PREDICTIONS = tuple(field.name for field in pb.Predictions.DESCRIPTOR.fields)
_LIMITS = (
    "enabled",
    "num_draft_tokens",
    "max_draft_tokens",
    "max_tokens_in_flight",
    "min_acceptance",
    "max_temperature",
    "lease_seconds",
    "batch_weight",
)


def figures_to_proto(figures: Figures) -> pb.Figures:
    label, regret = figures.label, figures.regret
    return pb.Figures(
        label=pb.FigureLabel(
            temperature=label.temperature,
            traffic_class=label.traffic_class,
            drafter=DRAFTERS.to_proto(label.drafter),
            method=METHODS.to_proto(label.method),
        ),
        runs=[
            pb.AcceptedRuns(num_drafted=length, num_rounds=counts)
            for length, counts in enumerate(figures.runs)
            if any(counts)
        ],
        tested=figures.tested,
        passed=figures.passed,
        reasons=[pb.ReasonCount(reason=reason, num_rounds=count) for reason, count in figures.reasons],
        predictions=pb.Predictions(**{name: getattr(figures.predictions, name) for name in _PREDICTIONS}),
        regret=pb.Regret(num_rounds=regret.num_rounds, expected=regret.expected, lost=regret.lost),
        **{name: getattr(figures, name) for name in _SUMS},
    )


def figures_from_proto(message: pb.Figures) -> Figures:
    label, regret = message.label, message.regret
    if len(message.tested) != len(message.passed):
        raise refuse("passed", f"{len(message.passed)} positions, {len(message.tested)} tested")
    return Figures(
        label=FigureLabel(
            temperature=label.temperature,
            traffic_class=label.traffic_class,
            drafter=DRAFTERS.optional_from_proto(label.drafter, "label.drafter"),
            method=METHODS.from_proto(label.method, "label.method"),
        ),
        runs=_runs_from_proto(message.runs),
        tested=tuple(message.tested),
        passed=tuple(message.passed),
        reasons=tuple((entry.reason, entry.num_rounds) for entry in message.reasons),
        predictions=Predictions(**{name: getattr(message.predictions, name) for name in _PREDICTIONS}),
        regret=Regret(regret.num_rounds, regret.expected, tuple(regret.lost)),
        **{name: getattr(message, name) for name in _SUMS},
    )


def _runs_from_proto(messages: Any) -> tuple[tuple[int, ...], ...]:
    """Every γ up to the largest that occurred; those that did not are zeros."""
    known: dict[int, tuple[int, ...]] = {}
    for index, entry in enumerate(messages):
        length, counts = entry.num_drafted, tuple(entry.num_rounds)
        if length > MAX_DRAFT_TOKENS or len(counts) != length + 1:
            raise refuse(f"runs[{index}]", f"{len(counts)} counts for {length} drafted tokens")
        known[length] = counts
    return tuple(known.get(length, (0,) * (length + 1)) for length in range(max(known, default=-1) + 1))


def policy_to_proto(policy: PolicyOptions) -> pb.Policy:
    return pb.Policy(
        min_acceptances=[
            pb.DrafterLimit(drafter=DRAFTERS.to_proto(drafter), min_acceptance=limit)
            for drafter, limit in policy.min_acceptances
        ],
        **{name: getattr(policy, name) for name in _LIMITS},
    )


def policy_from_proto(message: pb.Policy) -> PolicyOptions:
    return PolicyOptions(
        min_acceptances=tuple(
            (
                DRAFTERS.from_proto(entry.drafter, f"policy.min_acceptances[{index}].drafter"),
                entry.min_acceptance,
            )
            for index, entry in enumerate(message.min_acceptances)
        ),
        **{name: getattr(message, name) if message.HasField(name) else None for name in _LIMITS},
    )
