"""How threads share processor cores with a forward."""

from __future__ import annotations

import os
from contextlib import suppress

SPINS = 10_000
"""Looks for work before a thread leaves its core."""


def wait_briefly() -> None:
    """Has idle threads of a forward leave their cores soon; call it before anything imports torch.

    They look for work in a loop that keeps the core busy, which is right between two products of one
    forward. By default they go on for milliseconds after it (300,000 looks), while draft, target and router
    take turns on the same cores: a round of four drafts took half as long again (docs/performance.md).
    GOMP_SPINCOUNT and OMP_WAIT_POLICY of whoever starts the process win.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def give_way() -> None:
    """Has this process, and the threads it starts from now on, never interrupt what runs on a core.

    A router's work is short and in no hurry, but a step on the same cores waits for its slowest thread:
    whoever interrupts one of them stops all. Where nothing else runs, nothing changes. Linux only.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # a container may forbid it; then all is as without
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
