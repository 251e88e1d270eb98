"""Whatever an operator may be told stands in the runbook."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from router.reasons import DecisionReason
from specdecode.errors import Reason

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def rows_of(name: str) -> list[str]:
    lines = RUNBOOK.splitlines()
    return [line for line in lines if line.startswith("|") and f"`{name}`" in line.split("|")[1]]


@pytest.mark.parametrize("reason", [*Reason, *DecisionReason])
def test_every_reason_has_a_row(reason: str) -> None:
    assert len(rows_of(reason)) == 1


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_row(alert: str) -> None:
    assert len(rows_of(alert)) == 1
