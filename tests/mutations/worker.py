"""Runs tests of the tree it stands in, each order in a fork that has only third-party modules loaded.

Importing torch and transformers takes seconds and a mutation's tests often less, so they are imported once.
`python -m tests.mutations.worker` in the copied tree reads orders from stdin and answers on stdout, both a
JSON object a line: {"tests": node ids, "seconds": limit of one test} → the fields of `Report`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

THIRD_PARTY = (
    *("torch", "transformers", "transformers.models.llama.modeling_llama", "numpy", "scipy.stats"),
    *(
        "hypothesis",
        "hypothesis.stateful",
        "grpc.aio",
        "grpc_status.rpc_status",
        "pytest_asyncio",
        "pydantic_settings",
    ),
)
PRODUCT = ("specdecode", "draft_service", "target_service", "router")


@dataclass(frozen=True)
class Report:
    """What came of one order.

    Attributes:
        exit_code: pytest's; 1 when a test failed.
        failed: node id of the first test that failed.
        message: the last line of why, or all of the output when no test ran.
        seconds: wall-clock time.
    """

    exit_code: int
    failed: str = ""
    message: str = ""
    seconds: float = 0.0


class _Watch:
    """A pytest plugin: the first failure, and whether the product came from the tree under test."""

    def __init__(self) -> None:
        self.failed = ""
        self.message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = str(crash.message if crash else report.longrepr).partition("\n")[0]

    def pytest_sessionfinish(self) -> None:
        root = Path.cwd().resolve()
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if name.partition(".")[0] in (*PRODUCT, "tests") and path is not None:
                assert root in Path(path).resolve().parents, (
                    f"{name} was imported from {path}, not from {root}"
                )


def _run_tests(tests: list[str], seconds: float, output: Path) -> Report:
    """In the fork."""
    from hypothesis import Phase, settings

    settings.register_profile("no shrinking", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("no shrinking")
    watch = _Watch()
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "--hypothesis-seed=0",
        f"--timeout={seconds}",
    ]
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = int(pytest.main([*options, *tests], plugins=[watch]))
        sys.stdout.flush()
    return Report(code, watch.failed, watch.message)


def _in_fork(tests: list[str], seconds: float) -> Report:
    output, answer = Path(".mutation-output"), Path(".mutation-report")
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        report = _run_tests(tests, seconds, output)
        answer.write_text(json.dumps(asdict(report)))
        os._exit(0)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(child, child)
    _wait(child, began + (1 + len(tests)) * seconds)
    took = time.monotonic() - began
    if not answer.exists():
        return Report(-1, message=output.read_text()[-4000:] or "the tests' process died", seconds=took)
    report = Report(**json.loads(answer.read_text()))
    message = report.message or ("" if report.exit_code == 0 else output.read_text()[-4000:])
    return Report(report.exit_code, report.failed, message, took)


def _wait(child: int, until: float) -> None:
    """Waits for the fork, and kills it with all it started if it hangs."""
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.02)


def main() -> None:
    """Answers orders until stdin ends."""
    for name in THIRD_PARTY:
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] in PRODUCT]
    assert not loaded, f"the fork would inherit {loaded}"
    gc.freeze()  # forks neither scan nor copy what is loaded
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        report = _in_fork(order["tests"], order["seconds"])
        answers.write(json.dumps(asdict(report)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
