"""`specdecode doctor`: checks a running deployment, and says what to change."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.text import Text

from specdecode import __version__
from specdecode.cli import show
from specdecode.cli.flags import ConnectionFlags
from specdecode.cli.generate import router
from specdecode.client import STATUS_SECONDS, Completion, RouterClient
from specdecode.diagnosis import Finding, Severity, examine, good, judge_generation, problem, warning
from specdecode.errors import SpecdecodeError
from specdecode.requests import GenerateRequest, RouterStatus, SamplingOptions, TextPrompt

_GENERATION_SECONDS = 60.0
_COLLECTOR_SECONDS = 3.0
_NUM_TOKENS = 8
_STYLES = {Severity.GOOD: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
_CLOCK_UNSYNCHRONISED = 5
"""What adjtimex returns while nobody disciplines the kernel's clock."""
_TIMEX_BYTES = 208


def doctor(
    connection: ConnectionFlags,
    collector: Annotated[
        str | None,
        typer.Option(
            help="Also look for an OTLP collector; host:port", metavar="ADDRESS", show_default="none"
        ),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate/--no-generate", help="Ask for a short text")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Check a running deployment, and say what to change.

    Asks the router for its status and for a short text: versions, vocabularies, calibration, replicas. Looks
    at this machine's clock and GPUs. The exit code is 1 where something does not serve.
    """
    findings = asyncio.run(_examine(connection, collector, generate))
    if json:
        show.write_json({"findings": [asdict(f) | {"severity": f.severity.value} for f in findings]})
    else:
        _print(findings)
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _print(findings: Sequence[Finding]) -> None:
    table = show.table(("check", "left"), ("state", "left"), ("found", "left"), ("what to change", "left"))
    for finding in findings:
        state = Text(finding.severity.value, _STYLES[finding.severity])
        table.add_row(finding.check, state, finding.found, finding.advice)
    show.OUT.print(table)


async def _examine(connection: ConnectionFlags, collector: str | None, generate: bool) -> list[Finding]:
    findings: list[Finding] = []
    try:
        async with router(connection) as client:
            status = await client.get_status(timeout_seconds=connection.timeout or STATUS_SECONDS)
            findings += [good("router", f"answers at {connection.address}"), *examine(status, __version__)]
            if generate:
                findings += await _generation(client, connection.timeout or _GENERATION_SECONDS)
            findings.append(gpus(status, _gpu_files()))
    except SpecdecodeError as error:
        findings.append(problem("router", error.message, "start it, or name its address by --address"))
    findings.append(clock())
    if collector is not None:
        findings.append(await _collector(collector))
    return findings


async def _generation(client: RouterClient, seconds: float) -> list[Finding]:
    sampling = SamplingOptions(temperature=0.0, max_tokens=_NUM_TOKENS)
    request = GenerateRequest(TextPrompt("The capital of France is"), sampling, include_rounds=True)
    completion = Completion(0)
    began = time.monotonic()
    try:
        async for piece in client.generate(request, timeout_seconds=seconds):
            completion.add(piece)
    except SpecdecodeError as error:
        completion.error = error
    return judge_generation([completion], time.monotonic() - began)


def gpus(status: RouterStatus, here: int) -> Finding:
    """Whether a machine with GPUs serves without them."""
    devices = sorted({t.model.device for t in status.targets if t.model is not None})
    shown = ", ".join(devices) or "unknown"
    if here and devices and not any(device.startswith("cuda") for device in devices):
        advice = "install torch with CUDA there, and give the container its GPUs; device cuda refuses without"
        return warning("gpus", f"{here} on this machine, targets run on {shown}", advice)
    return good("gpus", f"targets run on {shown}; {here or 'none'} on this machine")


def _gpu_files() -> int:
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


def clock() -> Finding:
    """Whether somebody keeps this machine's clock right: deadlines and traces go by it."""
    if sys.platform != "linux":
        return good("clock", "not looked at on this system")
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) == _CLOCK_UNSYNCHRONISED:
        advice = "run chrony or systemd-timesyncd: traces of several machines go by their clocks"
        return warning("clock", "nobody synchronises this machine's clock", advice)
    return good("clock", "is synchronised")


async def _collector(address: str) -> Finding:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async with asyncio.timeout(_COLLECTOR_SECONDS):
                await channel.channel_ready()
        except TimeoutError:
            advice = "start it, or correct the services' otlp_endpoint; until then traces are lost"
            return warning("collector", f"nobody answers at {address}", advice)
    return good("collector", f"answers at {address}")
