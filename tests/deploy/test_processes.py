"""The demo, as the chart renders it: its commands start, its probes tell, its test pod gets a text."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdecode.cache import CACHE_VARIABLE, cache_root
from specdecode.cli.stack import free_port
from tests.cli.running import DEADLINE
from tests.deploy.chart import Case, Object, Pod, pods, serving_pods
from tests.deploy.test_configuration import file_of

pytestmark = pytest.mark.usefixtures("real_helm")

DEMO = Case("cpu-demo")
ORDER = ("target", "draft", "router")


class Started:
    """A pod's only container as a process of this machine, on a port of its own."""

    def __init__(self, pod: Pod, file: Path, ports: dict[str, int], directory: Path) -> None:
        (self.container,) = pod.containers
        self.pod = pod
        self.port = ports[pod.role]
        self.log = directory / f"{pod.role}.log"
        *command, config = here(self.container)
        assert config == "/etc/specdecode/specdecode.yaml"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(file)],
                env=environment(pod.role, ports),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def probe(self, kind: str) -> bool:
        """The answer to one of the pod's probes, by this machine's port instead of the pod's."""
        name = self.container[kind]["grpc"].get("service", "")
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=name)
                found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
            return bool(found.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, kind: str) -> None:
        end = time.monotonic() + DEADLINE
        while not self.probe(kind):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"{kind} of {self.pod} fails:\n{self.log.read_text()}"
            queue_wait(0.1)

    def stop(self) -> int:
        """As the kubelet does it, without the announcement; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.pod.spec["terminationGracePeriodSeconds"])
        finally:
            self.process.kill()
            self.process.wait()


def queue_wait(seconds: float) -> None:
    """Between two questions to a service that can't say by itself when it is there."""
    try:
        queue.SimpleQueue[None]().get(timeout=seconds)
    except queue.Empty:
        return


def here(container: Object) -> list[str]:
    """A container's command with this machine's interpreter."""
    program, *rest = container["command"]
    assert program == "python"
    return [sys.executable, *rest]


def environment(role: str, ports: dict[str, int]) -> dict[str, str]:
    """Names and ports of a cluster as this machine has them; the cache is this machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDECODE_")}
    prefix = f"SPECDECODE_{role.upper()}_"
    own = {f"{prefix}HOST": "127.0.0.1", f"{prefix}PORT": str(ports[role])}
    if role == "router":
        own |= {
            f"{prefix}TARGETS": f"127.0.0.1:{ports['target']}",
            f"{prefix}DRAFT": f"127.0.0.1:{ports['draft']}",
            f"{prefix}HTTP_PORT": str(ports["http"]),
            f"{prefix}ESTIMATES_PATH": "none",
        }
    else:
        own |= {f"{prefix}CALIBRATION": "off", f"{prefix}NUM_THREADS": "1"}
    return {**kept, CACHE_VARIABLE: str(cache_root()), "OMP_NUM_THREADS": "1", **own}


@pytest.fixture(scope="module")
def started(
    free_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Started]]:
    directory = tmp_path_factory.mktemp("pods")
    by_role = {pod.role: pod for pod in serving_pods(DEMO.objects)}
    running: dict[str, Started] = {}
    with ExitStack() as stack:
        for role in ORDER:
            pod = by_role[role]
            running[role] = Started(pod, file_of(DEMO, pod, directory), free_ports, directory)
            stack.callback(running[role].process.wait)
            stack.callback(running[role].process.kill)
        yield running


@pytest.fixture(scope="module")
def free_ports() -> dict[str, int]:
    ports: dict[str, int] = {}
    for name in (*ORDER, "http"):
        ports[name] = free_port("127.0.0.1", ports.values())
    return ports


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, CACHE_VARIABLE: str(cache_root())}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_models_are_fetched_by_the_init_containers() -> None:
    for pod in serving_pods(DEMO.objects):
        (fetch,) = pod.spec["initContainers"]
        done = run(here(fetch))
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).is_dir()


def test_services_start_and_become_ready(started: dict[str, Started]) -> None:
    for role in ORDER:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            started[role].wait_for(kind)


def test_the_test_pod_gets_a_text(started: dict[str, Started], free_ports: dict[str, int]) -> None:
    started["router"].wait_for("readinessProbe")
    (pod,) = [pod for pod in pods(DEMO.objects) if pod.owner["kind"] == "Pod"]
    address = f"127.0.0.1:{free_ports['router']}"
    for container in pod.containers:
        command = here(container)
        assert command[-2] == "--address"
        done = run([*command[:-1], address])
        assert done.returncode == 0, f"{container['name']}: {done.stdout}{done.stderr}"
        if container["name"] == "generate":
            assert "Paris" in done.stdout


def test_the_http_api_answers_as_notes_say(started: dict[str, Started], free_ports: dict[str, int]) -> None:
    import urllib.request

    started["router"].wait_for("readinessProbe")
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{free_ports['http']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE) as response:
        answer: dict[str, Any] = json.load(response)
    assert "Paris" in answer["choices"][0]["text"]


def test_a_router_without_a_target_is_alive_and_not_ready(started: dict[str, Started]) -> None:
    started["router"].wait_for("readinessProbe")
    assert started["target"].stop() == 0
    end = time.monotonic() + DEADLINE
    while started["router"].probe("readinessProbe"):
        assert time.monotonic() < end
        queue_wait(0.1)
    assert started["router"].probe("livenessProbe")
    assert started["router"].stop() == 0
    assert started["draft"].stop() == 0
