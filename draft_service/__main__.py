"""`python -m draft_service`: loads the draft model, if one is set, and serves until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from draft_service.calibration import calibrate
from draft_service.drafting import Drafter, SequenceKey
from draft_service.lookup import NgramDrafter
from draft_service.loop import DraftLoop
from draft_service.model import DraftLimits, ModelDrafter
from draft_service.ngram_index import MatchChoice, NgramOptions
from draft_service.service import SERVICE_NAME, DraftServicer
from draft_service.suffix import SuffixDrafter
from draft_service.suffix_index import SuffixOptions
from draft_service.tracing import DraftTracer
from specdecode import __version__, models, tokenizer
from specdecode.announcing import Announcer
from specdecode.config import DraftSettings, load_settings
from specdecode.cores import cores_id
from specdecode.errors import SpecdecodeError
from specdecode.lm.memory import choose_device, choose_num_blocks
from specdecode.lm.model import load_model
from specdecode.lm.runner import PagedLM
from specdecode.replicas import ReplicaRole
from specdecode.serving import Running, Server, configure_logging, on_main_thread, run_until_signalled
from specdecode.telemetry import start_tracing
from specdecode.telemetry.meters import Meters, close_telemetry
from specdecode.types import DrafterKind, Method, ModelInfo, OpenDraft, Propose, SamplingParams
from specdecode.v1 import draft_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 64
_WARM_UP_DRAFTS = 4


@dataclass(frozen=True)
class Offer:
    """What a draft service has to offer, and how it introduces itself."""

    drafters: Mapping[DrafterKind, Drafter]
    info: ModelInfo


def build_offer(settings: DraftSettings) -> Offer:
    """Loads and warms up what the settings ask for; may take a while.

    Raises:
        SpecdecodeError: the model can't be found, loaded or served.
    """
    choice = MatchChoice(settings.ngram_match)
    options = NgramOptions(settings.ngram_min, settings.ngram_max, choice, settings.ngram_trust)
    drafters: dict[DrafterKind, Drafter] = {DrafterKind.NGRAM: NgramDrafter(options)}
    if settings.suffix_tokens:
        suffix = SuffixOptions(trust=settings.ngram_trust)
        drafters[DrafterKind.SUFFIX] = SuffixDrafter(suffix, settings.suffix_tokens)
    info = _lookup_info()
    if settings.model is not None:
        model, info = _load(models.resolve(settings.model), settings)
        warm_up(model)
        drafters[DrafterKind.MODEL] = model
    return Offer(drafters, replace(info, drafters=tuple(drafters)))


def _lookup_info() -> ModelInfo:
    """Without a model there is no vocabulary of its own: any target's ids will do."""
    return ModelInfo(
        name="ngram",
        fingerprint="",
        vocab_size=0,
        max_length=0,
        dtype="",
        device="",
        version=__version__,
        cores=cores_id(),
    )


def _load(path: Path, settings: DraftSettings) -> tuple[ModelDrafter, ModelInfo]:
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if choose_device(settings.device).type == "cpu" and hasattr(os, "nice"):
        # The target's threads wait for each other many times a step: one that loses its core delays all.
        os.nice(settings.niceness)
    tokens = tokenizer.load_tokenizer(path)
    model = load_model(path, settings.dtype, choose_device(settings.device), settings.kernels)
    model = model.limited(tokenizer.vocab_size(tokens), settings.max_length)
    lm = PagedLM(model, choose_num_blocks(model, settings, settings.max_sequences), settings.block_size)
    limits = DraftLimits(settings.max_draft_tokens, settings.top_k, settings.prefill_chunk)
    info = replace(
        model.info(tokenizer.fingerprint(tokens), tokenizer.eos_token_ids(path, tokens)),
        max_length=lm.max_length,
        block_size=lm.pool.block_size,
        num_blocks=lm.pool.num_blocks,
        version=__version__,
    )
    return ModelDrafter(lm, limits, _generator(settings.engine_seed)), info


def _generator(seed: int | None) -> torch.Generator:
    """Draws must be independent of the target's noise: seeded by the system, unless a test sets the seed."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def warm_up(drafter: ModelDrafter) -> None:
    """Drafts once by every method, as far as the model's context allows, and forgets it."""
    length = max(min(_WARM_UP_TOKENS, drafter.lm.max_length - _WARM_UP_DRAFTS), 1)
    for number, method in enumerate(Method):
        sampling = SamplingParams(temperature=0.0 if method is Method.GREEDY else 1.0)
        prompt = (0,) * length
        order = OpenDraft(number, prompt, length, sampling, method, DrafterKind.MODEL, cache_salt=b"warm-up")
        sequence = drafter.open(SequenceKey(-1, number), order)
        sequence.propose(Propose(number, length, (), _WARM_UP_DRAFTS))
        while drafter.busy:
            drafter.advance()
        sequence.close()


async def start(settings: DraftSettings) -> Running:
    """Loads, warms up and calibrates what is offered, then listens and serves."""
    server = Server([SERVICE_NAME], settings.max_message_bytes, settings.exposure)
    announcer = Announcer(settings, ReplicaRole.DRAFT, server)
    announcer.start()
    try:
        return await _start(settings, server, announcer)
    except BaseException:
        await announcer.stop()
        raise


async def _start(settings: DraftSettings, server: Server, announcer: Announcer) -> Running:
    offer = await on_main_thread(partial(build_offer, settings))
    announcer.calibrating(offer.info)
    limits = (settings.max_sequences, settings.calibration, settings.calibration_seconds)
    stopped = threading.Event()
    try:
        costs = await on_main_thread(partial(calibrate, offer.drafters, *limits, stopped.is_set))
    finally:
        stopped.set()  # a signal that cancels the start ends measuring, too
    tracing = start_tracing(settings)
    loop = DraftLoop(
        offer.drafters, settings.max_sequences, None if tracing is None else DraftTracer(tracing)
    )
    servicer = DraftServicer(loop, offer.info, server.draining, settings.max_message_bytes, costs)
    pb_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
    port = await server.start(settings.host, settings.port)
    try:
        meters = Meters(settings, loop.families)
    except SpecdecodeError:
        await server.drain(None)
        raise
    on_main_thread(loop.run)
    ended = asyncio.wrap_future(loop.ended)
    server.set_serving()
    announcer.ready(port)
    kinds = " and ".join(kind.value for kind in offer.drafters)
    logger.info("serving drafts by %s (model %s) on %s:%d", kinds, offer.info.name, settings.host, port)

    async def stop() -> None:
        await asyncio.to_thread(loop.stop)
        await announcer.stop()
        await asyncio.to_thread(close_telemetry, tracing, meters)

    return Running(server, on_stopped=stop, watched=ended)


def main() -> int:
    """Runs the service; the exit code."""
    settings = load_settings(DraftSettings, sys.argv[1:])
    configure_logging("draft", settings.log_level, settings.log_format)
    return run_until_signalled(partial(start, settings), settings.drain_seconds)


if __name__ == "__main__":
    sys.exit(main())
