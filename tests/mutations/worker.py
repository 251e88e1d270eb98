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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

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
    """A pytest plugin: checks that the product comes from this tree, and ends the process at a first failure.

    At once, because a service that a failing test leaves behind may keep the process from ending.
    """

    def __init__(self, answer: Path) -> None:
        self._answer = answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.finish(1, report.nodeid, str(crash.message if crash else report.longrepr))

    def finish(self, exit_code: int, failed: str = "", message: str = "") -> NoReturn:
        """Writes the report and ends the process."""
        root = Path.cwd().resolve()
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            known = name.partition(".")[0] in (*PRODUCT, "tests") and path is not None
            if known and root not in Path(path).resolve().parents:
                exit_code, message = -1, f"{name} was imported from {path}, not from {root}"
        self._answer.write_text(json.dumps(asdict(Report(exit_code, failed, message.partition("\n")[0]))))
        sys.stdout.flush()
        os._exit(0)


def _run_tests(tests: list[str], seconds: float, output: Path, answer: Path) -> NoReturn:
    """In the fork."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("no shrinking", deadline=None, phases=phases, database=None)
    plugins = ("cacheprovider", "warnings", "anyio", "unraisableexception", "threadexception")
    options = [
        "-x",
        "-q",
        "--hypothesis-seed=0",
        "--hypothesis-profile=no shrinking",
        f"--timeout={seconds}",
        *(f"-pno:{name}" for name in plugins),
    ]
    watch = _Watch(answer)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        watch.finish(int(pytest.main([*options, *tests], plugins=[watch])))


def _in_fork(tests: list[str], seconds: float) -> Report:
    output, answer = Path(".mutation-output"), Path(".mutation-report")
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _run_tests(tests, seconds, output, answer)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(child, child)
    _wait(child, began + (1 + len(tests)) * seconds)
    took = time.monotonic() - began
    said = output.read_text()[-2000:]
    if not answer.exists():
        return Report(-1, message=f"the tests' process hung or died: {said}", seconds=took)
    report = Report(**json.loads(answer.read_text()))
    return replace(report, message=report.message or said, seconds=took)


def _wait(child: int, until: float) -> None:
    """Waits for the fork, and ends it if it hangs, and whatever it has left running."""
    ended = False
    while not ended and time.monotonic() < until:
        ended = os.waitpid(child, os.WNOHANG) != (0, 0)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)


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
