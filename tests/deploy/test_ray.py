"""`engine.mode: ray` as processes: head and worker start as the RayCluster says, and the fleet serves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from specdecode.cli.stack import free_port
from specdecode.probe import probe
from tests.cli.running import DEADLINE
from tests.deploy.cases import DEMO, RAY
from tests.deploy.chart import Case, serving_pods
from tests.deploy.test_configuration import file_of
from tests.deploy.test_processes import here, queue_wait

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.usefixtures("real_helm"),
    pytest.mark.skipif("HELM" not in os.environ, reason="starts a Ray cluster: make test-deploy"),
    pytest.mark.timeout(3 * DEADLINE),
]

CASE = Case("ray", DEMO, RAY)
RAY_COMMAND = [sys.executable, "-m", "ray.scripts.scripts"]
OF_A_POD = ("port", "node-manager-port")
"""Start parameters that are the pod's own ports; here all share one machine."""


@contextmanager
def process(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends as a whole."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def listens(port: int, log: Path) -> bool:
    """Waits for it, as KubeRay has workers and the kubelet's restarts have the fleet wait for the head."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < end, log.read_text()
            queue_wait(0.2)
        else:
            return True


def parameters(wanted: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in wanted.items() if name not in OF_A_POD]


@pytest.fixture
def short() -> Iterator[str]:
    """A folder whose name leaves room for Ray's sockets, which may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        yield directory


def test_the_fleet_places_a_replica_on_the_worker_and_ends_in_order(tmp_path: Path, short: str) -> None:
    (cluster,) = CASE.of_kind("RayCluster")
    spec = cluster["spec"]
    head, worker = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    pod = next(pod for pod in serving_pods(CASE.objects) if pod.role == "ray")
    (fleet,) = [container for container in pod.containers if container["name"] == "fleet"]
    *command, _ = here(fleet)
    file = file_of(CASE, pod, tmp_path)
    gcs = free_port("127.0.0.1")
    port = free_port("127.0.0.1", [gcs])
    declared = {entry["name"]: entry["value"] for entry in fleet["env"] if entry["name"].startswith("RAY_")}
    environment = {
        **os.environ,
        **declared,
        "OMP_NUM_THREADS": "1",
        "SPECDECODE_CONFIG": str(file),
        "SPECDECODE_TARGET_HOST": "127.0.0.1",
        "SPECDECODE_TARGET_PORT": str(port),
        "SPECDECODE_TARGET_RAY_ADDRESS": f"127.0.0.1:{gcs}",
        "SPECDECODE_TARGET_CALIBRATION": "off",
        "SPECDECODE_TARGET_NUM_THREADS": "1",
    }
    local = ["--block", "--node-ip-address=127.0.0.1"]
    at_head = ["--head", f"--port={gcs}", f"--temp-dir={short}", *local]
    at_worker = [f"--address=127.0.0.1:{gcs}", *local]
    log = tmp_path / "log"
    start = [*RAY_COMMAND, "start"]
    with ExitStack() as stack:
        head_command = [*start, *parameters(head["rayStartParams"]), *at_head]
        stack.enter_context(process(head_command, log, environment))
        assert listens(gcs, log)
        worker_command = [*start, *parameters(worker["rayStartParams"]), *at_worker]
        stack.enter_context(process(worker_command, log, environment))
        running = stack.enter_context(process([*command, str(file)], log, environment))
        end = time.monotonic() + DEADLINE
        while reason := probe(f"127.0.0.1:{port}"):
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < end, f"{reason}\n{log.read_text()}"
            queue_wait(0.5)
        running.send_signal(signal.SIGTERM)
        assert running.wait(pod.spec["terminationGracePeriodSeconds"]) == 0
    assert "registry of 1 target replicas" in log.read_text()
