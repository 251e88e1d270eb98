"""What is wrong with a running deployment, by what its router tells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from specdecode.client import Completion
from specdecode.requests import ReplicaStatus, RouterStatus
from specdecode.types import DrafterKind

_UNCALIBRATED = "uncalibrated"
"""The reason of rounds that are not drafted because costs are not known."""
_MISFIT = 1.5
"""Steps that take so many times as long as calibrated, or as short, were calibrated elsewhere."""


class Severity(Enum):
    """How bad a finding is."""

    GOOD = "good"
    WARNING = "warning"
    """It serves, but not as well as it could."""
    PROBLEM = "problem"
    """It does not serve."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        check: what was looked at, one word.
        found: what it is like.
        advice: what to change; empty where nothing is to be changed.
    """

    check: str
    severity: Severity
    found: str
    advice: str = ""


def good(check: str, found: str) -> Finding:
    """Nothing to change."""
    return Finding(check, Severity.GOOD, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Serves, but not as well as it could."""
    return Finding(check, Severity.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """Does not serve."""
    return Finding(check, Severity.PROBLEM, found, advice)


def examine(status: RouterStatus, version: str) -> list[Finding]:
    """All that can be told from a router's status; `version` is the package's here."""
    return [
        _targets(status),
        _drafts(status),
        _versions(status, version),
        _fingerprints(status),
        _costs(status),
    ]


def _targets(status: RouterStatus) -> Finding:
    up = [target for target in status.targets if target.connected]
    away = _addresses(target for target in status.targets if not target.connected)
    if not up:
        advice = (
            "look at the targets' logs: one that loads or calibrates does not listen yet; check the router's "
            "option targets"
        )
        return problem("targets", f"none can be used: {away or 'none is set'}", advice)
    if away:
        return warning(
            "targets", f"{len(up)} of {len(status.targets)} up, away: {away}", "look at their logs"
        )
    return good("targets", f"{len(up)} up")


def _drafts(status: RouterStatus) -> Finding:
    if not status.drafts:
        return warning("drafts", "the router has no draft service", "set its option draft to speculate")
    away = _addresses(draft for draft in status.drafts if not draft.connected)
    if away:
        return warning("drafts", f"away: {away}", "look at its log; until then nothing is drafted")
    kinds = {kind for draft in status.drafts if draft.model for kind in draft.model.drafters}
    if DrafterKind.MODEL not in kinds:
        return warning("drafts", "up, without a draft model", "set the draft service's option model")
    return good("drafts", f"up, by {', '.join(sorted(kind.value for kind in kinds))}")


def _versions(status: RouterStatus, version: str) -> Finding:
    found = {"this program": version, "router": status.version}
    found |= {r.address: r.model.version for r in _known(status) if r.model}
    if len(set(found.values())) == 1:
        return good("versions", version)
    listed = ", ".join(f"{who} {which or 'unknown'}" for who, which in found.items())
    return warning("versions", listed, "run one version everywhere")


def _fingerprints(status: RouterStatus) -> Finding:
    prints = {r.address: r.model.fingerprint for r in _known(status) if r.model and r.model.fingerprint}
    if len(set(prints.values())) > 1:
        listed = ", ".join(f"{address} {value[:12]}" for address, value in prints.items())
        advice = "use target and draft of one tokenizer and vocabulary"
        return problem("fingerprints", f"vocabularies differ: {listed}", advice)
    return good("fingerprints", "one vocabulary" if prints else "no replica has told one yet")


def _costs(status: RouterStatus) -> Finding:
    ratios = {t.address: t.load.cost_ratio for t in status.targets if t.load is not None}
    off = {a: ratio for a, ratio in ratios.items() if not 1 / _MISFIT <= ratio <= _MISFIT}
    if off:
        listed = ", ".join(f"{address} takes {ratio:.2f} times of it" for address, ratio in off.items())
        advice = (
            "something else uses these cores or this GPU, or did when it was calibrated; start the target "
            "with calibration refresh"
        )
        return warning("costs", f"steps are not as calibrated: {listed}", advice)
    return good("costs", "steps take what was calibrated" if ratios else "no step has run yet")


def _known(status: RouterStatus) -> list[ReplicaStatus]:
    return [replica for replica in (*status.targets, *status.drafts) if replica.model is not None]


def _addresses(replicas: Iterable[ReplicaStatus]) -> str:
    return ", ".join(replica.address for replica in replicas)


def judge_generation(completions: Sequence[Completion], seconds: float) -> list[Finding]:
    """What a short text tells: that it came, and why nothing was drafted for it."""
    errors = [completion.error for completion in completions if completion.error is not None]
    if errors:
        return [problem("generation", errors[0].message, "look at the router's and the target's logs")]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    findings = [good("generation", f"{num_tokens} tokens in {seconds:.2f} s")]
    reasons = {record.reason for completion in completions for record in completion.rounds}
    if _UNCALIBRATED in reasons:
        advice = "start targets and draft service with calibration auto, and look at what they log of it"
        return [*findings, warning("calibration", "what steps or drafts cost is not measured", advice)]
    return [*findings, good("calibration", "the router knows what steps and drafts cost")]
