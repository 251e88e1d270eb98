"""`python -m target_service.guardian`: ends what is left of a Ray cluster once its starter has ended.

Most of Ray's own processes notice by themselves, some a minute late. The starter writes which they are,
a process id and its start on each line; its end, by whatever signal, closes this process's standard input.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

_guardians: list[subprocess.Popen[str]] = []
"""Held as long as this process lives: what is not held is closed."""


def guard() -> None:
    """Has all processes that come of this one by now end with it."""
    family = psutil.Process().children(recursive=True)
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", "target_service.guardian"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal is not meant for it
    )
    assert guardian.stdin is not None
    guardian.stdin.writelines(f"{process.pid} {process.create_time()}\n" for process in family)
    guardian.stdin.flush()
    _guardians.append(guardian)


def main() -> None:
    """Waits, and cleans up."""
    for line in sys.stdin.read().splitlines():
        pid, started = line.split()
        try:
            process = psutil.Process(int(pid))
            if process.create_time() == float(started):
                process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
