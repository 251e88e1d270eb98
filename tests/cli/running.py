"""The `specdecode` program as a process, and what is left of its children."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 240.0
"""Seconds after which a test gives up waiting; three services may load at once on a busy machine."""

PROGRAM = (sys.executable, "-m", "specdecode.cli")


def environment(**variables: str) -> dict[str, str]:
    """This process's, without settings of ours, in a wide terminal; services do not measure themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDECODE_")}
    cache = {"SPECDECODE_CACHE": os.environ["SPECDECODE_CACHE"]} if "SPECDECODE_CACHE" in os.environ else {}
    off = {f"SPECDECODE_{service}_CALIBRATION": "off" for service in ("TARGET", "DRAFT")}
    return {**kept, **cache, **off, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **variables}


def run(*args: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """`specdecode` with these arguments, to its end."""
    return subprocess.run(
        [*PROGRAM, *args],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment(**variables),
        check=False,
    )


class Program:
    """A running `specdecode`, whose lines (of both its outputs) are read as they come."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env=environment(),
        )
        self.lines: list[str] = []
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from here on that has the pattern."""
        end = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._coming.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                line = None
            assert line is not None, f"never: {pattern}\n" + "\n".join(self.lines)
            self.lines.append(line)
            if (match := re.search(pattern, line)) is not None:
                return match

    def type(self, text: str) -> None:
        """One line of input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; the exit code. All lines have been read then."""
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        while (line := self._coming.get(timeout=DEADLINE)) is not None:
            self.lines.append(line)
        return code

    @property
    def output(self) -> str:
        """What was read so far."""
        return "\n".join(self.lines)

    def children(self) -> dict[str, int]:
        """Process ids of its services, by the module that they run."""
        found = {}
        for pid in _pids():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid and "specdecode.cli.child" in command:
                found[command[command.index("specdecode.cli.child") + 2]] = pid
        return found

    def child_besides(self, module: str, pid: int) -> int:
        """Process id of the service that runs `module` and is not `pid`, once there is one."""
        end = time.monotonic() + DEADLINE
        while (found := self.children().get(module, pid)) == pid:
            assert time.monotonic() < end, f"{module} was not started again"
            time.sleep(0.01)
        return found


@contextmanager
def program(*args: str) -> Iterator[Program]:
    """A `specdecode` that does not outlive the block."""
    started = Program(*args)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(DEADLINE)


def up_arguments(model: Path, *more: str) -> list[str]:
    """`up` with this model for all services, on free ports."""
    ports = [f"--{service}-port=0" for service in ("router", "target", "draft")]
    ports.append("--http-port=0")
    sizes = ["--kv-memory=16MiB", "--threads=1", "--dtype=float32"]
    return ["up", f"--model={model}", *ports, *sizes, *more]


def address_of(up: Program) -> str:
    """The router's address, once it serves."""
    return up.wait_for(r"^router at (\S+);")[1]


def wait_until_gone(pids: Collection[int]) -> None:
    """Until none of these processes runs, which need not be ours."""
    end = time.monotonic() + DEADLINE
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], max(end - time.monotonic(), 0))
            assert ended, f"process {pid} still runs"
        finally:
            os.close(descriptor)


def are_gone(pids: Collection[int]) -> bool:
    """Whether none of these processes exists now, zombies included."""
    return not set(pids) & set(_pids())


def _pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
