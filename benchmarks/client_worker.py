"""Worker: a client of the three services, all prompts of a job at once over one channel."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from benchmarks.jobs import Answer, Job, JobPrompt, blocks_wasted, serve
from specdecode import wire
from specdecode.serving import connect
from specdecode.types import LoadSnapshot
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as pb_grpc
from specdecode.v1 import types_pb2

MAX_MESSAGE_BYTES = 16 * 2**20
WATCH_SECONDS = 0.02
USAGE_FIELDS = tuple(descriptor.name for descriptor in pb.Usage.DESCRIPTOR.fields)


@dataclass
class Text:
    """What came back for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    usage: pb.Usage = field(default_factory=pb.Usage)


class Client:
    """Calls the router. Build it inside the event loop."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._router = pb_grpc.RouterServiceStub(channel)

    async def run(self, job: Job) -> Answer:
        """Runs one job to its end."""
        watch = asyncio.create_task(self._watch()) if job.watch_kv else None
        began = time.perf_counter()
        texts = await asyncio.gather(
            *(self._generate(_request(job, index, prompt)) for index, prompt in enumerate(job.prompts))
        )
        seconds = time.perf_counter() - began
        usage = Counter[str]()
        for text, prompt in zip(texts, job.prompts, strict=True):
            if text.usage.num_prompt_tokens != len(prompt.token_ids):
                raise RuntimeError(f"the router's prompt has {text.usage.num_prompt_tokens} tokens")
            usage.update({name: getattr(text.usage, name) for name in USAGE_FIELDS})
        load, _ = await self._load()
        return Answer(
            seconds,
            [text.token_ids for text in texts],
            dict(usage),
            kv_waste=await _stopped(watch) if watch else None,
            num_held_blocks=load.num_blocks - load.num_free_blocks,
        )

    async def _generate(self, request: pb.GenerateRequest) -> Text:
        text = Text()
        pieces: AsyncIterator[pb.GenerateResponse] = self._router.Generate(request)
        async for piece in pieces:
            if piece.HasField("error"):
                raise wire.error_from_proto(piece.error)
            text.token_ids += (token.token_id for token in piece.tokens)
            if piece.HasField("usage"):
                text.usage = piece.usage
        return text

    async def _load(self) -> tuple[LoadSnapshot, int]:
        """The target's load, and its block size."""
        status: pb.GetStatusResponse = await self._router.GetStatus(pb.GetStatusRequest())
        target = status.targets[0]
        return wire.load_snapshot_from_proto(target.load), target.model.block_size

    async def _watch(self) -> list[float]:
        """Blocks wasted at each look, until cancelled.

        Counted are steps in which every sequence ran one token: only then does the snapshot tell the KV of
        all that hold blocks.
        """
        seen: list[float] = []
        try:
            while True:
                load, block_size = await self._load()
                if load.num_running and load.num_running == load.num_rows == load.tokens_in_flight:
                    seen.append(blocks_wasted(load, load.num_cached_tokens, load.num_running, block_size))
                await asyncio.sleep(WATCH_SECONDS)
        except asyncio.CancelledError:
            return seen


async def _stopped(watch: asyncio.Task[list[float]]) -> float | None:
    watch.cancel()
    return max(await watch, default=None)


def _request(job: Job, index: int, prompt: JobPrompt) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt.text)]),
        sampling=pb.SamplingOptions(
            temperature=job.temperature, top_p=0.95, max_tokens=job.max_tokens, ignore_eos=True
        ),
        speculation=_speculation(job),
        cache_salt=job.salt_of(index),
    )


def _speculation(job: Job) -> pb.SpeculationOptions:
    if job.auto:
        return pb.SpeculationOptions(mode=pb.SPECULATION_MODE_AUTO)
    if not job.num_draft_tokens:
        return pb.SpeculationOptions(mode=pb.SPECULATION_MODE_OFF)
    return pb.SpeculationOptions(
        mode=pb.SPECULATION_MODE_ON,
        num_draft_tokens=job.num_draft_tokens,
        drafter=types_pb2.DRAFTER_KIND_NGRAM,
    )


def main() -> None:
    """Connects and serves jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client_worker", description=__doc__)
    parser.add_argument("router", help="host:port")
    options = parser.parse_args()
    with asyncio.Runner() as runner:

        async def build() -> Client:
            return Client(connect(options.router, MAX_MESSAGE_BYTES))

        client = runner.run(build())
        serve(lambda job: runner.run(client.run(job)))


if __name__ == "__main__":
    main()
