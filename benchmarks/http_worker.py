"""Worker: a client of the router's HTTP front, all prompts of a job at once, a connection each.

Bare sockets: what a client's library costs is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from typing import Any

from benchmarks.jobs import Answer, Job, JobPrompt, serve

_CHUNK_BYTES = 1 << 16


class Client:
    """Posts to the router; every prompt has its connection."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def run(self, job: Job) -> Answer:
        """Runs one job to its end."""
        began = time.perf_counter()
        usages = await asyncio.gather(
            *(self._generate(body_of(job, index, prompt)) for index, prompt in enumerate(job.prompts))
        )
        seconds = time.perf_counter() - began
        total = Counter[str]()
        for usage, prompt in zip(usages, job.prompts, strict=True):
            if usage["prompt_tokens"] != len(prompt.token_ids):
                raise RuntimeError(f"the router's prompt has {usage['prompt_tokens']} tokens")
            total["num_emitted"] += usage["completion_tokens"]
        return Answer(seconds, [], dict(total))

    async def _generate(self, body: dict[str, Any]) -> dict[str, int]:
        """The usage that a stream ends with."""
        reader, writer = await self.begin(body)
        try:
            return await _usage(reader)
        finally:
            writer.close()

    async def begin(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream that has been asked for."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer


def body_of(job: Job, index: int, prompt: JobPrompt) -> dict[str, Any]:
    """What a client of OpenAI's API sends."""
    return {
        "messages": [{"role": "user", "content": prompt.text}],
        "temperature": job.temperature,
        "max_tokens": job.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": job.salt_of(index).decode(),
        "speculative_decoding": {"mode": "off"},
    }


async def _usage(reader: asyncio.StreamReader) -> dict[str, int]:
    """Of a stream that is read to its end; every event is parsed, as a client does."""
    held = b""
    usage: dict[str, int] | None = None
    while True:
        chunk = await reader.read(_CHUNK_BYTES)
        if not chunk:
            raise RuntimeError(f"the stream broke: {held[-500:]!r}")
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                if usage is None:
                    raise RuntimeError("the stream ended without usage")
                return usage
            usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage


def main() -> None:
    """Serves jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_worker", description=__doc__)
    parser.add_argument("address", help="host:port of the HTTP front")
    client = Client(parser.parse_args().address)
    with asyncio.Runner() as runner:
        serve(lambda job: runner.run(client.run(job)))


if __name__ == "__main__":
    main()
