"""`python -m target_service`: loads the target model and serves it until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial

import torch

from specdecode import __version__, models, tokenizer
from specdecode.config import TargetSettings, load_settings
from specdecode.lm.memory import choose_device, choose_num_blocks
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.serving import Running, Server, configure_logging, on_main_thread, run_until_signalled
from specdecode.telemetry import Tracing, start_tracing
from specdecode.telemetry.meters import Meters
from specdecode.types import DecodeFrame, Lease, Method, ModelInfo, OpenSequence, SamplingParams
from specdecode.v1 import target_service_pb2_grpc as pb_grpc
from target_service.calibration import Recalibration, calibrate
from target_service.engine import Engine
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


def build_replica(settings: TargetSettings, tracing: Tracing | None = None) -> Replica:
    """Loads and warms up the model; may take a while. `tracing` takes the engine's spans.

    Raises:
        SpecdecodeError: the model can't be found, loaded or served.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    path = models.resolve(settings.model)
    tokens = tokenizer.load_tokenizer(path)
    model = load_model(path, settings.dtype, choose_device(settings.device), settings.kernels)
    model = model.limited(tokenizer.vocab_size(tokens), settings.max_length)
    num_blocks = choose_num_blocks(model, settings, settings.max_running)
    lm = PagedLM(model, num_blocks, settings.block_size, settings.prefix_cache)
    info = replace(
        model.info(tokenizer.fingerprint(tokens), tokenizer.eos_token_ids(path, tokens)),
        max_length=lm.max_length,
        block_size=settings.block_size,
        num_blocks=num_blocks,
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
    return Replica(engine, info)


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
    """Loads, warms up and calibrates the model, then listens and serves."""
    server = Server([SERVICE_NAME], settings.max_message_bytes, settings.exposure)
    tracing = start_tracing(settings)
    replica = await on_main_thread(partial(build_replica, settings, tracing))
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
    meters = Meters(settings, lambda: engine.counts.families(engine.load, engine.costs))
    running = on_main_thread(loop.run)
    server.set_serving()
    info = replica.info
    logger.info(
        "serving %s (%s, %s, %d KV blocks of %d tokens) on %s:%d",
        *(info.name, info.dtype, info.device, info.num_blocks, info.block_size, settings.host, port),
    )
    return Running(
        server, on_stopped=partial(asyncio.to_thread, _stop, loop, tracing, meters), watched=running
    )


def _stop(loop: EngineLoop, tracing: Tracing | None, meters: Meters) -> None:
    loop.stop()
    meters.close()
    if tracing is not None:
        tracing.close()


def main() -> int:
    """Runs the service; the exit code."""
    settings = load_settings(TargetSettings, sys.argv[1:])
    configure_logging("target", settings.log_level)
    return run_until_signalled(partial(start, settings), settings.drain_seconds)


if __name__ == "__main__":
    sys.exit(main())
