"""`python -m target_service`: loads the target model and serves it until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specdecode import __version__, models, tokenizer
from specdecode.announcing import Announcer
from specdecode.config import TargetSettings, load_settings
from specdecode.errors import FailedPreconditionError, SpecdecodeError
from specdecode.replicas import ReplicaRole
from specdecode.serving import Running, Server, configure_logging, on_main_thread, run_until_signalled
from specdecode.telemetry import Tracing, start_tracing
from specdecode.telemetry.meters import Meters, close_telemetry
from specdecode.types import DecodeFrame, Lease, Method, ModelInfo, OpenSequence, SamplingParams
from specdecode.v1 import target_service_pb2_grpc as pb_grpc
from target_service.calibration import Recalibration, calibrate
from target_service.engine import Engine
from target_service.group import Group, load
from target_service.loop import EngineLoop
from target_service.metrics import StepCounts
from target_service.scheduler import SchedulerLimits
from target_service.service import SERVICE_NAME, TargetServicer
from target_service.tracing import StepTracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replica:
    """An engine that is ready, and how it introduces itself."""

    engine: Engine
    info: ModelInfo
    group: Group | None = None

    def stop(self) -> None:
        """Ends the processes of the model's other ranks; the engine has ended."""
        ranks = self.engine.lm.model.ranks
        if self.group is not None and ranks is not None:
            self.group.stop(ranks)


def build_replica(settings: TargetSettings, tracing: Tracing | None = None) -> Replica:
    """Loads and warms up the model; may take a while. `tracing` takes the engine's spans.

    Raises:
        SpecdecodeError: the model can't be found, loaded or served.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    path = models.resolve(settings.model)
    tokens = tokenizer.load_tokenizer(path)
    lm, group = load(settings)
    info = replace(
        lm.model.info(tokenizer.fingerprint(tokens), tokenizer.eos_token_ids(path, tokens)),
        max_length=lm.max_length,
        block_size=settings.block_size,
        num_blocks=lm.pool.num_blocks,
        version=__version__,
    )
    limits = SchedulerLimits(
        settings.max_running, settings.max_waiting, settings.max_tokens_in_flight, settings.prefill_chunk
    )
    engine = Engine(
        lm,
        limits,
        _generator(settings.engine_seed),
        trust_draft=settings.trust_draft,
        tracer=None if tracing is None else StepTracer(tracing),
    )
    warm_up(engine)
    return Replica(engine, info, group)


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def warm_up(engine: Engine) -> None:
    """Runs one short sequence, so that the first request does not pay for what torch sets up lazily."""
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    opened = OpenSequence(0, (0,), 1, sampling, Method.GREEDY, cache_salt=b"warm-up")
    engine.apply(0, DecodeFrame(opens=(opened,), leases=(Lease(0, 1, 2),)))
    while engine.sequences:
        engine.step()
    engine.counts = StepCounts()


async def start(settings: TargetSettings) -> Running:
    """Serves itself, or has Ray place as many replicas as are asked for.

    Raises:
        SpecdecodeError: the model can't be served, or replicas find no place.
    """
    if settings.replicas:
        return await _fleet_starter()(settings)
    server = Server([SERVICE_NAME], settings.max_message_bytes, settings.exposure)
    announcer = Announcer(settings, ReplicaRole.TARGET, server)
    announcer.start()
    try:
        return await _start_replica(settings, server, announcer)
    except BaseException:
        await announcer.stop()
        raise


def _fleet_starter() -> Callable[[TargetSettings], Coroutine[Any, Any, Running]]:
    try:
        from target_service.fleet import start_fleet
    except ImportError as error:
        raise FailedPreconditionError(
            f"replicas: Ray places them and is not here ({error}); install specdecode[ray], or start "
            "replicas one by one with replicas 0"
        ) from None
    return start_fleet


async def _start_replica(settings: TargetSettings, server: Server, announcer: Announcer) -> Running:
    """Loads, warms up and calibrates the model, then listens and serves."""
    tracing = start_tracing(settings)
    replica = await on_main_thread(partial(build_replica, settings, tracing))
    announcer.calibrating(replica.info)
    engine = replica.engine
    mode, seconds = settings.calibration, settings.calibration_seconds
    stopped = threading.Event()
    try:
        await on_main_thread(partial(calibrate, engine, mode, seconds, stopped.is_set))
    finally:
        stopped.set()  # a signal that cancels the start ends measuring, too
    loop = EngineLoop(engine, None if mode == "off" else Recalibration(engine, seconds))
    servicer = TargetServicer(loop, replica.info, server.draining, settings.max_message_bytes)
    pb_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    port = await server.start(settings.host, settings.port)
    try:
        meters = Meters(settings, lambda: engine.counts.families(engine.load, engine.costs))
    except SpecdecodeError:
        await server.drain(None)
        raise
    running = on_main_thread(loop.run)
    server.set_serving()
    announcer.load = lambda: loop.load
    announcer.ready(port)
    info = replica.info
    logger.info(
        "serving %s (%s, %s, %d KV blocks of %d tokens) on %s:%d",
        *(info.name, info.dtype, info.device, info.num_blocks, info.block_size, settings.host, port),
    )

    async def stop() -> None:
        await asyncio.to_thread(loop.stop)
        await asyncio.to_thread(replica.stop)
        await announcer.stop()
        await asyncio.to_thread(close_telemetry, tracing, meters)

    return Running(server, on_stopped=stop, watched=running)


def main() -> int:
    """Runs the service; the exit code."""
    settings = load_settings(TargetSettings, sys.argv[1:])
    configure_logging("target", settings.log_level, settings.log_format)
    return run_until_signalled(partial(start, settings), settings.drain_seconds)


if __name__ == "__main__":
    sys.exit(main())
