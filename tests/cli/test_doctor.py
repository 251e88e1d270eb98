"""`specdecode doctor` against real services, and what it makes of deployments that are not well."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from typing import Any

import pytest

from specdecode.cli.doctor import gpus
from specdecode.client import Completion
from specdecode.diagnosis import Finding, Severity, examine, judge_generation
from specdecode.errors import UnavailableError
from specdecode.requests import ReplicaStatus, RouterStatus
from specdecode.types import DrafterKind, LoadSnapshot, ModelInfo, Origin, RoundRecord
from tests.cli.running import DEADLINE, run

VERSION = "1.0"
TARGET_MODEL = ModelInfo("m", "f" * 64, 100, 100, "float32", "cpu", version=VERSION)
DRAFT_MODEL = replace(TARGET_MODEL, drafters=(DrafterKind.NGRAM, DrafterKind.MODEL))
NGRAM = replace(DRAFT_MODEL, drafters=(DrafterKind.NGRAM,))
TARGET = ReplicaStatus("t:1", True, TARGET_MODEL, LoadSnapshot(), 0)
DRAFT = ReplicaStatus("d:1", True, DRAFT_MODEL, None, 0)
WELL = RouterStatus((TARGET,), (DRAFT,), 0, VERSION)


def findings(status: RouterStatus) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(status, VERSION)}


def test_a_deployment_that_is_well_needs_no_change() -> None:
    assert {f.severity for f in findings(WELL).values()} == {Severity.GOOD}
    assert [f.advice for f in findings(WELL).values()] == [""] * 5


@pytest.mark.parametrize(
    ("status", "check", "severity", "found"),
    [
        (replace(WELL, targets=()), "targets", Severity.PROBLEM, "none can be used: none is set"),
        (
            replace(WELL, targets=(replace(TARGET, connected=False),)),
            "targets",
            Severity.PROBLEM,
            "none can be used: t:1",
        ),
        (
            replace(WELL, targets=(TARGET, replace(TARGET, address="t:2", connected=False))),
            "targets",
            Severity.WARNING,
            "1 of 2 up, away: t:2",
        ),
        (replace(WELL, drafts=()), "drafts", Severity.WARNING, "the router has no draft service"),
        (
            replace(WELL, drafts=(replace(DRAFT, connected=False),)),
            "drafts",
            Severity.WARNING,
            "away: d:1",
        ),
        (
            replace(
                WELL, drafts=(replace(DRAFT, model=replace(DRAFT_MODEL, drafters=(DrafterKind.NGRAM,))),)
            ),
            "drafts",
            Severity.WARNING,
            "up, without a draft model",
        ),
        (
            replace(WELL, drafts=(replace(DRAFT, model=replace(DRAFT_MODEL, version="0.9")),)),
            "versions",
            Severity.WARNING,
            "this program 1.0, router 1.0, t:1 1.0, d:1 0.9",
        ),
        (
            replace(WELL, drafts=(replace(DRAFT, model=replace(DRAFT_MODEL, fingerprint="0" * 64)),)),
            "fingerprints",
            Severity.PROBLEM,
            f"vocabularies differ: t:1 {'f' * 12}, d:1 {'0' * 12}",
        ),
        (
            replace(WELL, targets=(replace(TARGET, load=LoadSnapshot(cost_ratio=2.5)),)),
            "costs",
            Severity.WARNING,
            "steps are not as calibrated: t:1 takes 2.50 times of it",
        ),
    ],
)
def test_what_is_wrong_is_found_and_comes_with_advice(
    status: RouterStatus, check: str, severity: Severity, found: str
) -> None:
    finding = findings(status)[check]
    assert (finding.severity, finding.found) == (severity, found)
    assert finding.advice


def test_a_machine_with_gpus_that_serves_without_them_is_noticed() -> None:
    assert gpus(WELL, 4).severity is Severity.WARNING
    assert gpus(WELL, 0).severity is Severity.GOOD
    on_gpu = replace(WELL, targets=(replace(TARGET, model=replace(TARGET_MODEL, device="cuda:0")),))
    assert gpus(on_gpu, 4).severity is Severity.GOOD


def test_rounds_say_when_costs_are_not_known() -> None:
    record = RoundRecord(0, 0, 0, 1, Origin.PLAIN, None, "uncalibrated")
    told = judge_generation([Completion(0, rounds=[record])], 1.0)
    assert [finding.severity for finding in told] == [Severity.GOOD, Severity.WARNING]
    failed = judge_generation([Completion(0, error=UnavailableError("gone"))], 1.0)
    assert [(f.severity, f.found) for f in failed] == [(Severity.PROBLEM, "gone")]


def told(*command: str, code: int = 0) -> dict[str, Any]:
    """Findings of the command, by check."""
    ended = run("doctor", "--json", *command)
    assert ended.returncode == code, ended.stderr
    return {finding["check"]: finding for finding in json.loads(ended.stdout)["findings"]}


@pytest.mark.skipif(sys.platform != "linux", reason="starts services")
@pytest.mark.timeout(3 * DEADLINE)
def test_running_services_are_examined_with_a_text(router: str) -> None:
    found = told(f"--address={router}")
    for check in ("router", "targets", "drafts", "versions", "fingerprints", "generation"):
        assert found[check]["severity"] == "good", found[check]
    assert found["generation"]["found"].startswith("8 tokens in")
    assert found["calibration"]["severity"] == "warning"  # these services were told not to calibrate
    table = run("doctor", f"--address={router}", "--no-generate")
    assert table.returncode == 0
    assert "generation" not in table.stdout


def test_a_router_that_is_not_there_is_a_problem_and_a_collector_a_warning() -> None:
    with socket.socket() as bound:  # bound, but nobody listens
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        found = told(f"--address={address}", f"--collector={address}", code=1)
    assert found["router"]["severity"] == "problem"
    assert found["collector"]["severity"] == "warning"
    assert found["collector"]["found"] == f"nobody answers at {address}"
