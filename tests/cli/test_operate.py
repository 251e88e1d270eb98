"""`figures`, `policy` and `generate --report` against three real services."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.running import DEADLINE, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts services"),
    pytest.mark.timeout(3 * DEADLINE),
]

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox"
DRAFTED = ("--temperature=0", "--ignore-eos", "--max-tokens=24", "--speculation=on", "--num-draft-tokens=3")


def told(router: str, *command: str) -> Any:
    """What a command tells with --json."""
    ended = run(*command, f"--address={router}", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


def shown(router: str, *command: str) -> str:
    """What it prints on stdout."""
    ended = run(*command, f"--address={router}")
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.fixture
def restored(router: str) -> Iterator[dict[str, Any]]:
    """The limits in force, which are put back."""
    before = told(router, "policy", "show")
    yield before
    least = [f"--min-acceptance={name}={share}" for name, share in before["min_acceptances"].items()]
    numbers = (
        f"--{name.replace('_', '-')}={value}"
        for name, value in before.items()
        if name not in ("enabled", "min_acceptances")
    )
    assert told(router, "policy", "set", "--on" if before["enabled"] else "--off", *numbers, *least) == before


def test_limits_are_shown_set_and_kept(router: str, restored: dict[str, Any]) -> None:
    after = told(router, "policy", "set", "--max-draft-tokens=4", "--lease-seconds=0.1")
    assert after == restored | {"max_draft_tokens": 4, "lease_seconds": 0.1}
    assert told(router, "policy", "show") == after
    table = shown(router, "policy", "show")
    assert re.search(r"^ *max draft tokens +4 *$", table, re.MULTILINE)
    assert re.search(r"^ *lease +0\.1 s *$", table, re.MULTILINE)
    assert re.search(r"^ *speculation +on *$", table, re.MULTILINE)


def test_the_operator_turns_speculation_off_and_on_without_a_restart(
    router: str, restored: dict[str, Any]
) -> None:
    assert re.search(r"^ *speculation +off *$", shown(router, "policy", "set", "--off"), re.MULTILINE)
    off = told(router, "generate", PROMPT, *DRAFTED, "--drafter=model")
    shown(router, "policy", "set", "--on")
    on = told(router, "generate", PROMPT, *DRAFTED, "--drafter=model")
    assert off["usage"]["num_drafted"] == 0
    assert on["usage"]["num_drafted"] > 0
    assert on["text"] == off["text"]


def test_figures_tell_what_reports_told(router: str) -> None:
    options = (
        *DRAFTED,
        "--traffic-class=figures test",
        "--tier=batch",
        "--min-acceptance=0",
        "--drafter=model",
    )
    choice = told(router, "generate", PROMPT, *options)
    report = choice["report"]
    assert sum(entry["num_rounds"] for entry in report) == choice["usage"]["num_rounds"]
    assert sum(entry["num_drafted"] for entry in report) == choice["usage"]["num_drafted"]
    assert {entry["label"]["traffic_class"] for entry in report} == {"figures test"}
    told(router, "generate", PROMPT, *options)
    own = [
        entry
        for entry in told(router, "figures")["figures"]
        if entry["label"]["traffic_class"] == "figures test"
    ]
    assert sum(entry["num_emitted"] for entry in own) == 48
    for entry in own:
        assert sum(map(sum, entry["runs"])) == sum(entry["reasons"].values()) == entry["num_rounds"]
        assert entry["num_emitted"] == entry["num_accepted"] + entry["num_rounds"] - entry["num_cut"]
        assert entry["target_flops"] > 0


def test_figures_and_reports_are_shown_as_tables(router: str) -> None:
    reported = run("generate", PROMPT, f"--address={router}", *DRAFTED, "--drafter=ngram", "--report")
    assert reported.returncode == 0
    for table in (reported.stderr, shown(router, "figures")):
        assert re.search(r"^ *# +temperature +class +drafter", table, re.MULTILINE)
        assert "rounds that accepted 0, 1, … γ" in table
        assert "share of the rounds" in table
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", table)


def test_status_shows_price_and_idle_share(router: str) -> None:
    status = shown(router, "status")
    assert re.search(r"\bprice +idle\b", status)
    assert re.search(r"^ *127\.0\.0\.1:\d+ .* \d+\.\d\d +\d+%", status, re.MULTILINE)
