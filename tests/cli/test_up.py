"""`specdecode up`: three processes that live and end together, whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.running import (
    DEADLINE,
    PROGRAM,
    address_of,
    are_gone,
    environment,
    program,
    run,
    up_arguments,
    wait_until_gone,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(3 * DEADLINE),
]

SERVICES = {"target_service", "draft_service", "router"}


@contextmanager
def asking(address: str, max_tokens: int) -> Iterator[subprocess.Popen[bytes]]:
    """A client whose text has begun to come."""
    options = ["--ignore-eos", "--temperature=0", f"--max-tokens={max_tokens}", f"--address={address}"]
    command = [*PROGRAM, "generate", "the quick brown fox", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as client:
        assert client.stdout is not None
        assert client.stdout.read(1)
        yield client


def test_interrupt_finishes_what_runs_and_leaves_nothing(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        with asking(address_of(up), max_tokens=1000) as client:
            url = up.wait_for(r"^OpenAI's API at (\S+)/v1")[1]
            with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE) as health:
                assert health.status == 200
            children = up.children()
            assert set(children) == SERVICES
            policies = {module: os.sched_getscheduler(pid) for module, pid in children.items()}
            assert policies == {**dict.fromkeys(SERVICES, os.SCHED_OTHER), "router": os.SCHED_BATCH}
            up.signal(signal.SIGINT)
            _, told = client.communicate(timeout=DEADLINE)
        assert b"1000 tokens" in told
        assert client.returncode == 0
        assert up.end() == 0
    assert are_gone(children.values())
    ends = [line.split()[0] for line in up.lines if line.endswith(" stopped")]
    assert ends == ["router", "draft", "target"]


def test_a_second_interrupt_ends_at_once(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        with asking(address_of(up), max_tokens=4000) as client:
            children = up.children()
            up.signal(signal.SIGINT)
            up.wait_for("^stopping")
            up.signal(signal.SIGINT)
            _, told = client.communicate(timeout=DEADLINE)
        assert client.returncode == 1
        assert told.startswith(b"error: ")
        assert up.end() == 1
    assert are_gone(children.values())


def test_when_a_service_dies_the_others_are_ended_and_it_is_named(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        address_of(up)
        children = up.children()
        subprocess.run(["kill", "-KILL", str(children["target_service"])], check=True)
        assert up.end() == 1
    assert are_gone(children.values())
    assert "target was killed by SIGKILL; stopping the others" in up.output
    assert "nothing is left running" in up.output


def test_a_draft_service_that_dies_is_started_again(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        address = address_of(up)
        before = up.children()
        subprocess.run(["kill", "-KILL", str(before["draft_service"])], check=True)
        up.wait_for("draft was killed by SIGKILL; starting it again")
        # The router goes on without it meanwhile.
        assert run("generate", "--address", address, "--max-tokens=2", "Hi").returncode == 0
        up.wait_for(r"draft ready at .*")
        after = up.children()
        assert after["draft_service"] != before["draft_service"]
        assert {name: after[name] for name in ("router", "target_service")} == {
            name: before[name] for name in ("router", "target_service")
        }
        up.wait_for(r"draft 127.* is connected")
        up.signal(signal.SIGINT)
        assert up.end() == 0
    assert are_gone(after.values())


def test_a_draft_service_that_dies_while_it_starts_ends_nobody(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        address_of(up)
        before = up.children()

        def kill_twice() -> None:
            killed = up.children()["draft_service"]
            subprocess.run(["kill", "-KILL", str(killed)], check=True)
            up.wait_for("draft was killed by SIGKILL; starting it again$")
            starting = up.child_besides("draft_service", killed)
            subprocess.run(["kill", "-KILL", str(starting)], check=True)
            up.wait_for("draft was killed by SIGKILL; starting it again in 1 s$")

        kill_twice()
        up.wait_for(r"draft ready at .*")
        after = up.children()
        assert {name: after[name] for name in ("router", "target_service")} == {
            name: before[name] for name in ("router", "target_service")
        }
        kill_twice()
        up.signal(signal.SIGINT)
        assert up.end() == 0
    assert are_gone([*before.values(), *after.values()])


def test_a_service_that_cannot_start_ends_all(model: Path, tmp_path: Path) -> None:
    with program(*up_arguments(model, f"--draft-model={tmp_path}")) as up:
        up.wait_for(r"draft ended with exit code 1; stopping the others")
        children = up.children()
        assert up.end() == 1
    assert are_gone(children.values())
    assert f"{tmp_path} holds no model" in up.output


def test_a_killed_parent_leaves_no_child(model: Path) -> None:
    with program(*up_arguments(model)) as up:
        up.wait_for("router .*waiting for a target")  # long before all serve
        children = up.children()
        assert set(children) == SERVICES
        up.signal(signal.SIGKILL)
        wait_until_gone(children.values())


def test_the_status_names_every_service(router: str, model: Path) -> None:
    answer = subprocess.run(
        [*PROGRAM, "status", "--json", f"--address={router}"],
        capture_output=True,
        timeout=DEADLINE,
        env=environment(),
        check=True,
    )
    status = json.loads(answer.stdout)
    (target,), (draft,) = status["targets"], status["drafts"]
    assert target["connected"]
    assert target["model"]["name"] == model.name
    assert target["model"]["dtype"] == "float32"
    assert target["load"]["num_blocks"] == target["model"]["num_blocks"]
    assert draft["model"]["drafters"] == ["ngram", "model"]
