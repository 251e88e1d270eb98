"""How services have idle threads wait, and who gives way."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specdecode.cpu_threads import SPINS

_SCRIPT = "import os, sys, {}; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"


def waiting(package: str, **environment: str) -> str:
    """What a process that imports a service's package says."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", _SCRIPT.format(package)]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["target_service", "draft_service"])
def test_a_service_sets_it_before_torch_is_there_to_read_it(package: str) -> None:
    assert waiting(package) == f"False {SPINS}"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_who_starts_it_has_the_last_word(environment: dict[str, str], expected: str) -> None:
    assert waiting("target_service", **environment) == f"False {expected}"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_who_gives_way_interrupts_nobody_and_its_threads_neither() -> None:
    script = """if True:
        import os, threading
        from specdecode.cpu_threads import give_way
        give_way()
        print(os.sched_getscheduler(0) == os.SCHED_BATCH)
        thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0) == os.SCHED_BATCH))
        thread.start()
        thread.join()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
