"""`python -m tests.mutations [NAME …]`: breaks the code on purpose and names the test that notices.

The working tree is copied once. Each mutation of `tests.mutations.table` is applied to the copy, the tests
that should catch it are run there, and the copy is restored. A mutation that no test notices is a failure,
and so is one whose source text is not there any more. Names, or parts of them, choose among the mutations.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS
from tests.mutations.worker import Report

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
"""Limit of one test; a mutation that hangs is caught by it."""

console = Console(width=None if sys.stdout.isatty() else 240)


class MutationError(Exception):
    """A mutation that can't be applied."""


@dataclass(frozen=True)
class Verdict:
    """What came of one mutation."""

    mutation: Mutation
    caught_by: str
    problem: str
    seconds: float


def copy_tree(destination: Path) -> None:
    """Everything in the working tree that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        source, target = ROOT / name, destination / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


@contextmanager
def applied(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The tree with the mutation in it.

    Raises:
        MutationError: an old text is not there exactly once, or a new one is no Python.
    """
    originals = {edit.path: (tree / edit.path).read_text() for edit in mutation.edits}
    changed = dict(originals)
    for edit in mutation.edits:
        count = changed[edit.path].count(edit.old)
        if count != 1:
            raise MutationError(f"{edit.path} holds the text to change {count} times: {edit.old!r}")
        changed[edit.path] = changed[edit.path].replace(edit.old, edit.new)
    for path, source in changed.items():
        if not path.endswith(".py"):
            continue
        try:
            compile(source, path, "exec")
        except SyntaxError as error:
            raise MutationError(f"{path} would be no Python: {error}") from error
    try:
        for path, source in changed.items():
            (tree / path).write_text(source)
        yield
    finally:
        for path, source in originals.items():
            (tree / path).write_text(source)


class Worker:
    """`tests.mutations.worker` in the copied tree."""

    def __init__(self, tree: Path) -> None:
        # Byte code is told apart by seconds and size, which a mutation may leave alone: none is written.
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.worker"],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str]) -> Report:
        """The tests, until the first that fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"tests": list(tests), "seconds": SECONDS}) + "\n")
        self._process.stdin.flush()
        return Report(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def judge(mutation: Mutation, tree: Path, worker: Worker) -> Verdict:
    """Applies one mutation and runs its tests."""
    try:
        with applied(mutation, tree):
            report = worker.run(mutation.tests)
    except MutationError as error:
        return Verdict(mutation, "", str(error), 0.0)
    if report.exit_code == 1 and report.failed:
        return Verdict(mutation, report.failed, "", report.seconds)
    problem = "SURVIVED" if report.exit_code == 0 else f"the tests could not run: {report.message}"
    return Verdict(mutation, "", problem, report.seconds)


def chosen(names: Sequence[str]) -> list[Mutation]:
    """The mutations whose name holds one of these; all of them without names."""
    return [m for m in MUTATIONS if not names or any(name in m.name for name in names)]


def show(verdicts: Sequence[Verdict], seconds: float) -> None:
    """The table of who caught what."""
    table = Table("mutation", "caught by", "s")
    for verdict in verdicts:
        outcome = Text(verdict.caught_by) if verdict.caught_by else Text(verdict.problem, "bold red")
        table.add_row(verdict.mutation.name, outcome, f"{verdict.seconds:.1f}")
    console.print(table)
    missed = sum(not verdict.caught_by for verdict in verdicts)
    console.print(f"{len(verdicts) - missed} of {len(verdicts)} mutations caught in {seconds:.0f} s")


def main(names: Sequence[str]) -> int:
    """0 when every chosen mutation was caught."""
    mutations = chosen(names)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specdecode-mutations-") as directory:
        tree = Path(directory).resolve()
        copy_tree(tree)
        worker = Worker(tree)
        tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        unmutated = worker.run(tests)
        if unmutated.exit_code != 0:
            console.print(f"without any mutation: {unmutated.failed} {unmutated.message}", style="bold red")
            return 1
        console.print(f"{len(tests)} tests pass unmutated ({unmutated.seconds:.0f} s)")
        verdicts = []
        for mutation in mutations:
            verdicts.append(judge(mutation, tree, worker))
            mark = "[green]caught[/]" if verdicts[-1].caught_by else "[bold red]missed[/]"
            console.print(f"{mark} {mutation.name}")
        worker.close()
    show(verdicts, time.monotonic() - began)
    return 0 if verdicts and all(verdict.caught_by for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
