"""`make bench-observability`: what tracing costs, in throughput and in requests' times, with speculation on.

Three ways in turn, on the same prompts: services that trace nothing; services that trace, asked in a trace
that is not sampled; the same, asked in one that is, with a span for each round. The collector takes all and
looks at nothing, so that its work is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.pictures import Panel, draw_panels
from benchmarks.processes import Services, stop_on_signals
from benchmarks.prompts import PromptKind, prompts_of
from benchmarks.results import RESULTS, Estimate, bar_of, begin, paired_ratio
from specdecode.config import DEFAULT_MODEL, MIB
from specdecode.serving import connect
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as pb_grpc
from specdecode.v1 import types_pb2

OFF, UNSAMPLED, ROUNDS = "off", "not sampled", "rounds"
BOUNDS = {16: 0.97, 64: 0.99}
"""Least throughput with spans of rounds over that without, by streams."""
MAX_TOKENS = 64
NUM_DRAFT_TOKENS = 4
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class _Sink(grpc.GenericRpcHandler):
    """Takes spans as bytes."""

    num_bytes = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._take) if details.method == _EXPORT else None

    def _take(self, request: bytes, context: object) -> bytes:
        self.num_bytes += len(request)
        return b""


@contextmanager
def sink() -> Iterator[tuple[_Sink, str]]:
    """A collector and its address."""
    taken = _Sink()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[taken])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield taken, f"127.0.0.1:{port}"
    finally:
        server.stop(None)


async def run(address: str, streams: int, start: int, way: str) -> dict[str, Any]:
    """All streams at once, to their end."""
    prompts = prompts_of(PromptKind.COPY_HEAVY, streams, start)
    async with connect(address, 16 * MIB) as channel:
        stub = pb_grpc.RouterServiceStub(channel)
        began = time.perf_counter()
        taken = await asyncio.gather(*(_one(stub, prompt.text, way) for prompt in prompts))
        seconds = time.perf_counter() - began
    return {
        "streams": streams,
        "way": way,
        "tokens_per_second": streams * MAX_TOKENS / seconds,
        "p99_seconds": float(np.percentile(taken, 99)),
    }


async def _one(stub: Any, text: str, way: str) -> float:
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling=pb.SamplingOptions(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        speculation=pb.SpeculationOptions(
            mode=pb.SPECULATION_MODE_ON,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            drafter=types_pb2.DRAFTER_KIND_NGRAM,
        ),
        cache_salt=secrets.token_bytes(8),
    )
    flags = "01" if way == ROUNDS else "00"
    metadata = [("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}")]
    began = time.perf_counter()
    async for _ in stub.Generate(request, metadata=metadata):
        pass
    return time.perf_counter() - began


def measure(
    stack: ExitStack, collector: str, repeats: dict[int, int], logs: Path, threads: int
) -> list[dict[str, Any]]:
    """Runs in turn, each way once a turn, beginning with another one each time."""
    kv = ("--calibration", "off", "--kv-memory", "512MiB", "--max-running", "64")
    addresses = {}
    for name, traced in ((OFF, ()), (ROUNDS, ("--otlp-endpoint", collector))):
        directory = logs / name
        directory.mkdir()
        services = Services(
            stack,
            DEFAULT_MODEL,
            (*kv, *traced),
            directory,
            threads,
            draft_options=("--calibration", "off", *traced),
            router_options=traced,
        )
        addresses[name] = services.address
    addresses[UNSAMPLED] = addresses[ROUNDS]
    ways = (OFF, UNSAMPLED, ROUNDS)
    runs = []
    for streams, count in repeats.items():
        for way in ways:
            asyncio.run(run(addresses[way], min(streams, 8), 0, way))
        for turn in range(count):
            for way in (*ways[turn % 3 :], *ways[: turn % 3]):
                found = asyncio.run(run(addresses[way], streams, turn * streams, way))
                runs.append({"turn": turn, **found})
                print(f"{streams:3} streams, {way:12} {found['tokens_per_second']:7.1f} tok/s", flush=True)
    return runs


def ratios(runs: Sequence[dict[str, Any]], streams: int, way: str, figure: str) -> Estimate:
    """Of a way over off, turn by turn."""

    def by_turn(name: str) -> list[float]:
        own = [run for run in runs if run["streams"] == streams and run["way"] == name]
        return [run[figure] for run in sorted(own, key=lambda run: run["turn"])]

    return paired_ratio(by_turn(way), by_turn(OFF))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64], help="(default: 16 64)")
    parser.add_argument("--repeats", type=int, nargs="+", default=[9, 4], help="of each (default: 9 4)")
    parser.add_argument("--threads", type=int, default=2, help="of a forward (default: 2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory (default: docs/results)")
    o = parser.parse_args(argv)
    stop_on_signals()
    repeats = dict(zip(o.streams, o.repeats, strict=True))
    setup = {"repeats": repeats, "max_tokens": MAX_TOKENS, "γ": NUM_DRAFT_TOKENS, "threads": o.threads}
    session = begin("observability", setup)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs, sink() as (taken, collector):
        runs = measure(stack, collector, repeats, Path(logs), o.threads)
    summary: dict[str, Any] = {"span_bytes": taken.num_bytes}
    bars, panels = [], []
    for streams in repeats:
        speed = {way: ratios(runs, streams, way, "tokens_per_second") for way in (UNSAMPLED, ROUNDS)}
        tail = {way: ratios(runs, streams, way, "p99_seconds") for way in (UNSAMPLED, ROUNDS)}
        for what, found in (("throughput", speed), ("p99", tail)):
            summary[f"{streams} streams: {what} over off"] = {w: e.to_json() for w, e in found.items()}
        bound = BOUNDS.get(streams, 0.97)
        bars.append(bar_of(f"{streams} streams: throughput, rounds / off", speed[ROUNDS], bound, "at_least"))
        if streams == 16:
            bars.append(bar_of("16 streams: p99, rounds / off", tail[ROUNDS], 1.03, "at_most"))
        panels.append(Panel(f"{streams} streams", {"throughput": speed, "p99": tail}))

    def draw(path: Path) -> None:
        draw_panels(path, "What tracing costs", [panels], "over services that trace nothing", "", "{:.3f}")

    path = session.write(o.results, runs, summary, bars, draw)
    for bar in bars:
        print(f"{bar.name}: {bar.value:.3f}, {'holds' if bar.holds else 'does not hold'}")
    print(path)


if __name__ == "__main__":
    main()
