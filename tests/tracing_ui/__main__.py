"""`make test-tracing-ui`: a trace is found in a real tracing UI, behind a real collector, with its rounds.

Starts arize-phoenix, a rotel collector before it and the three services with the demo model; asks for a text;
looks for the trace by Phoenix's API; and takes a picture of its page. Phoenix and rotel have an environment
of their own (--environment), which the Makefile makes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from specdecode.serving import connect
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as pb_grpc
from specdecode.v1 import types_pb2
from tests.cli.running import Program, address_of, program

DEADLINE = 180.0
PROJECT = "specdecode"
ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "trace.png"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(stack: ExitStack, argv: Sequence[str], log: Path, **variables: str) -> None:
    """A process that does not outlive the stack."""
    output = stack.enter_context(log.open("w"))
    process = subprocess.Popen(
        list(argv), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    """What `found` finds, once it finds anything."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            if result := found():
                return result
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.5)


def get(url: str) -> Any:
    """JSON from a URL."""
    with urllib.request.urlopen(url, timeout=20) as reply:
        return json.loads(reply.read())


async def ask(router: str, traceparent: str) -> pb.Usage:
    """A text within a trace; its usage."""
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Write a haiku about rivers.")]),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=24),
        speculation=pb.SpeculationOptions(
            mode=pb.SPECULATION_MODE_ON, num_draft_tokens=4, drafter=types_pb2.DRAFTER_KIND_MODEL
        ),
    )
    usage = pb.Usage()
    async with connect(router, 1 << 24) as channel:
        call = pb_grpc.RouterServiceStub(channel).Generate(request, metadata=[("traceparent", traceparent)])
        while (piece := await call.read()) is not grpc.aio.EOF:
            if piece.HasField("usage"):
                usage = piece.usage
    return usage


def check(spans: Sequence[dict[str, Any]], usage: pb.Usage) -> None:
    """The UI has the whole trace, and its sums."""
    named: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        named.setdefault(span["name"], []).append(span)
    rounds = named["specdecode.round"]
    assert len(named["specdecode.draft"]) == len(named["specdecode.verify"]) == len(rounds) > 0
    told = [span["attributes"] for span in (*rounds, *named.get("specdecode.lease", []))]
    for name, expected in (("emitted", usage.num_emitted), ("accepted", usage.num_accepted)):
        assert sum(int(each[f"specdecode.{name}"]) for each in told) == expected, name


def take_picture(url: str, path: Path) -> None:
    """The page as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert browser is not None, "chromium is needed for the picture"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        argv += [f"--user-data-dir={profile}", "--window-size=1500,1000", "--virtual-time-budget=20000"]
        subprocess.run([*argv, f"--screenshot={path}", url], check=True, timeout=120, capture_output=True)
    assert path.stat().st_size > 20_000, "the picture is empty"


def run(environment: Path, picture: Path, directory: Path) -> None:
    """From the start of everything to the picture."""
    ui, ui_grpc, collector, collector_http = free_ports(4)
    trace_id = secrets.token_hex(16)
    # The package has no command of its own.
    (agent,) = environment.glob("lib/python*/site-packages/rotel/rotel-agent")
    with ExitStack() as stack:
        quiet = {"PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_WORKING_DIR": str(directory / "phoenix")}
        where = {"PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(ui), "PHOENIX_GRPC_PORT": str(ui_grpc)}
        start(
            stack,
            [str(environment / "bin" / "phoenix"), "serve"],
            directory / "phoenix.log",
            **quiet,
            **where,
        )
        start(
            stack,
            [
                *(str(agent), "start", "--exporter", "otlp"),
                *("--otlp-grpc-endpoint", f"127.0.0.1:{collector}"),
                *("--otlp-http-endpoint", f"127.0.0.1:{collector_http}"),
                *("--otlp-exporter-endpoint", f"http://127.0.0.1:{ui_grpc}"),
                *("--otlp-exporter-protocol", "grpc"),
            ],
            directory / "rotel.log",
        )
        base = f"http://127.0.0.1:{ui}"
        wait_for("Phoenix is healthy", lambda: urllib.request.urlopen(f"{base}/healthz", timeout=5).status)
        usage = serve_once(f"127.0.0.1:{collector}", f"00-{trace_id}-{secrets.token_hex(8)}-01")
        url = f"{base}/v1/projects/{PROJECT}/spans?trace_id={trace_id}&limit=1000"

        def all_spans() -> Any:
            spans = get(url)["data"]
            try:
                check(spans, usage)
            except (AssertionError, KeyError):
                return None
            return spans

        spans = wait_for("the trace with its rounds", all_spans)
        project = get(f"{base}/v1/projects/{PROJECT}")["data"]["id"]
        take_picture(f"{base}/projects/{project}/traces/{trace_id}", picture)
    print(f"{len(spans)} spans of {usage.num_rounds} rounds are in the UI; {picture}")


def serve_once(collector: str, traceparent: str) -> pb.Usage:
    """Starts the services, asks once and drains them; by then all spans are sent."""
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] = f"openinference.project.name={PROJECT}"
    draft = "--draft-model=smollm2-135m-instruct-draft"
    ports = ("--router-port=0", "--target-port=0", "--draft-port=0", "--http-port=0")
    up: Program
    with program("up", *ports, draft, "--kv-memory=128MiB", f"--otlp-endpoint={collector}") as up:
        usage = asyncio.run(ask(address_of(up), traceparent))
        up.signal(signal.SIGINT)
        assert up.end() == 0, up.output
    return usage


def main() -> None:
    """Runs the test."""
    parser = argparse.ArgumentParser(prog="python -m tests.tracing_ui", description=__doc__)
    parser.add_argument("--environment", type=Path, required=True, help="of arize-phoenix and rotel")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="(default: docs/images/trace.png)")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            run(o.environment, o.picture, Path(directory))
        except BaseException:
            for log in sorted(Path(directory).glob("*.log")):
                print(f"--- {log.name}", log.read_text(errors="replace")[-3000:], sep="\n")
            raise


if __name__ == "__main__":
    main()
