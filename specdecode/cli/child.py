"""`python -m specdecode.cli.child PARENT MODULE ARGS...`: runs a service that dies with the process PARENT.

On Linux the kernel sees to it, whatever kills the parent. Elsewhere a killed parent leaves its services
running; every other end of the parent stops them.
"""

from __future__ import annotations

import runpy
import sys

from specdecode.lifetime import die_with


def main() -> None:
    """Becomes the service."""
    parent, module, *argv = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
