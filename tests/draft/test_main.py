"""`python -m draft_service` as a process of its own, with a tiny checkpoint."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.__main__ import build_offer
from specdecode import tokenizer, wire
from specdecode.config import DraftSettings
from specdecode.errors import NotFoundError
from specdecode.serving import connect
from specdecode.types import DrafterKind, DraftFrame, Method, ModelInfo, OpenDraft, Propose, SamplingParams
from specdecode.v1 import draft_service_pb2 as pb
from specdecode.v1 import draft_service_pb2_grpc as pb_grpc
from tests.router.tiny import save_byte_level_tokenizer, save_llama

DEADLINE = 120.0
MAX_MESSAGE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits have more columns than the tokenizer has ids."""
    path = tmp_path_factory.mktemp("tiny")
    save_byte_level_tokenizer(path)
    save_llama(path, tokenizer.vocab_size(tokenizer.load_tokenizer(path)) + 7)
    return path


@asynccontextmanager
async def process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The running service and its port; on leaving it has ended by SIGTERM with exit code 0."""
    service = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "draft_service",
        "--port=0",
        "--calibration=off",
        *options,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert service.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(DEADLINE):
            while (port := re.search(r"serving drafts .* on 127\.0\.0\.1:(\d+)", "".join(lines))) is None:
                line = await service.stderr.readline()
                assert line, "".join(lines)
                lines.append(line.decode())
            yield service, int(port[1])
            service.send_signal(signal.SIGTERM)
            assert await service.wait() == 0
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()


async def introduction(port: int) -> ModelInfo:
    """What it says of itself, once it is SERVING."""
    async with connect(f"127.0.0.1:{port}", MAX_MESSAGE_BYTES) as channel:
        request = health_pb2.HealthCheckRequest(service="specdecode.v1.DraftService")
        health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = pb_grpc.DraftServiceStub(channel)
        response = await stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=DEADLINE)
        return wire.model_info_from_proto(response.model)


async def drafted(port: int, order: OpenDraft, num_tokens: int) -> tuple[int, ...]:
    propose = Propose(order.sequence, len(order.token_ids), (), num_tokens)
    async with connect(f"127.0.0.1:{port}", MAX_MESSAGE_BYTES) as channel:
        call = pb_grpc.DraftServiceStub(channel).Draft(timeout=DEADLINE)
        await call.write(wire.draft_frame_to_proto(DraftFrame((order,), (propose,))))
        (draft,) = wire.drafts_frame_from_proto(await call.read()).drafts
        assert draft.error is None
        return draft.token_ids


async def test_with_a_model_it_offers_both_drafters(checkpoint: Path) -> None:
    options = [f"--model={checkpoint}", "--dtype=float32", "--max-length=100", "--num-blocks=40"]
    async with process(*options) as (_, port):
        info = await introduction(port)
        tokens = tokenizer.load_tokenizer(checkpoint)
        assert info.fingerprint == tokenizer.fingerprint(tokens)
        assert info.vocab_size == tokenizer.vocab_size(tokens)
        assert (info.max_length, info.num_blocks, info.dtype) == (100, 40, "float32")
        assert info.drafters == (DrafterKind.NGRAM, DrafterKind.MODEL)
        greedy = SamplingParams(temperature=0.0)
        order = OpenDraft(1, (5, 6, 7, 8), 4, greedy, Method.GREEDY, DrafterKind.MODEL)
        token_ids = await drafted(port, order, 5)
        assert len(token_ids) == 5
        assert max(token_ids) < info.vocab_size


async def test_without_a_model_it_offers_ngrams_for_any_vocabulary() -> None:
    async with process() as (_, port):
        info = await introduction(port)
        assert (info.drafters, info.fingerprint, info.vocab_size) == ((DrafterKind.NGRAM,), "", 0)
        text = (200_000, 200_001, 3, 200_000, 200_001)
        order = OpenDraft(1, text, 4, SamplingParams(), Method.REJECTION, DrafterKind.NGRAM)
        assert await drafted(port, order, 2) == (3, 200_000)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotFoundError):
        build_offer(DraftSettings(model="/nowhere/at/all"))
