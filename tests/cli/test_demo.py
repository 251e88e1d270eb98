"""The demo as a user runs it, on the real model."""

from __future__ import annotations

import re
import sys

import pytest

from specdecode.cli.demo import CASES, DRAFT_MODEL
from specdecode.config import DEFAULT_MODEL
from specdecode.models import KNOWN_MODELS, fetch
from tests.cli.running import DEADLINE, program

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(6 * DEADLINE),
]


def test_the_demo_proves_its_promise_and_leaves_nothing() -> None:
    for name in (DEFAULT_MODEL, DRAFT_MODEL):
        assert name in KNOWN_MODELS
        fetch(name)
    with program("demo") as demo:
        for _ in CASES:
            demo.wait_for("^identical text with speculation off: yes$")
        demo.wait_for("no process and no open port is left")
        assert demo.end() == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", demo.output)
    assert demo.output.count("tok/s with speculation") == len(CASES)
    for drafter in ("ngram", "model"):
        rows = re.findall(rf"^ *\d+ +\d+ +\d+ +(bonus|recovered) .* {drafter} *$", demo.output, re.MULTILINE)
        assert len(rows) > 5
