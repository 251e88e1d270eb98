"""Whatever an operator may be told stands in the runbook."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.reasons import DecisionReason
from specdecode.errors import Reason

RUNBOOK = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", [*Reason, *DecisionReason])
def test_every_reason_has_a_row(reason: str) -> None:
    rows = [
        line for line in RUNBOOK.splitlines() if line.startswith("|") and f"`{reason}`" in line.split("|")[1]
    ]
    assert len(rows) == 1
