"""`python -m specdecode.cli.child PARENT MODULE ARGS...`: runs a service that dies with the process PARENT.

On Linux the kernel sees to it, whatever kills the parent. Elsewhere a killed parent leaves its services
running; every other end of the parent stops them.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when process `parent`, which started it, ends."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Becomes the service."""
    parent, module, *argv = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
