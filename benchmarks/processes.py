"""The processes that are measured: workers that take jobs, and the three services on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Never

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.jobs import Answer, Job
from benchmarks.results import ROOT

START_SECONDS = 300.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2


class ProcessFailedError(Exception):
    """A process ended or did not answer; the message holds the end of its log."""


class Process:
    """A running Python module; its stderr goes to a file of its own."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        logs: Path,
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches us alone, and we stop it in order.
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env={**_environment(threads), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def fail(self, what: str) -> Never:
        """Raises with the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        raise ProcessFailedError("\n".join([f"{self.name} {what}; the end of its log:", *lines]))

    def peak_rss_mib(self) -> float | None:
        """Largest resident memory so far; None where the system does not tell."""
        status = Path(f"/proc/{self.popen.pid}/status")
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
        return round(int(found[1]) / 1024, 1) if found else None

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not."""
        self.popen.terminate()
        try:
            self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Worker(Process):
    """A process that takes jobs (`benchmarks.jobs.serve`)."""

    def wait_until_ready(self) -> None:
        """Until its model is loaded."""
        self._answer()

    def run(self, job: Job) -> Answer:
        """Runs a job there, to its end."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(asdict(job)) + "\n")
        self.popen.stdin.flush()
        return Answer(**self._answer())

    def _answer(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.fail("ended")
        return json.loads(line)


class Services:
    """Target, draft service (n-gram only unless it is given a model) and router on free ports of loopback.

    Attributes:
        address: the router's host:port.
        http_address: its HTTP front's; "" unless `http`.
        processes: all three, the router last.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: str,
        target_options: Sequence[str],
        logs: Path,
        threads: int,
        draft_options: Sequence[str] = (),
        router_options: Sequence[str] = (),
        http: bool = False,
    ) -> None:
        target_port, draft_port, router_port, http_port = _free_ports(4)
        self.http_address = f"127.0.0.1:{http_port}" if http else ""
        target, draft, self.address = (f"127.0.0.1:{p}" for p in (target_port, draft_port, router_port))
        arguments = {
            "target": ["target_service", "--port", str(target_port), "--model", model, *target_options],
            "draft": ["draft_service", "--port", str(draft_port), *draft_options],
            "router": [
                *("router", "--port", str(router_port), "--model", model),
                *("--targets", target, "--draft", draft, "--estimates-path", "none"),
                *("--http-port", str(http_port) if http else "none"),
                *router_options,
            ],
        }
        addresses = {"target": target, "draft": draft, "router": self.address}
        self.processes: list[Process] = []
        for name, argv in arguments.items():
            process = Process(name, argv, logs, threads)
            stack.callback(process.stop)
            self.processes.append(process)
            # In this order: the router then finds both at its first attempt.
            _wait_until_serving(process, addresses[name])


def stop_on_signals() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that it stops what it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


def _environment(threads: int) -> dict[str, str]:
    """Ours without settings of services, which would change what is measured."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPECDECODE_") or name == "SPECDECODE_CACHE"
    }
    return {**kept, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_until_serving(process: Process, address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not _is_serving(stub):
            if process.popen.poll() is not None:
                process.fail(f"ended with code {process.popen.returncode}")
            if time.monotonic() > deadline:
                process.fail(f"does not serve after {START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)


def _is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_POLL_SECONDS * 5)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
