"""The examples do what their folder says, against running services."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.services import DEADLINE, Services

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE_PACKAGES = EXAMPLES / "node" / "node_modules"


async def run(*command: str | Path) -> str:
    """What a program prints; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    output, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
    assert process.returncode == 0
    return output.decode()


def grpc_address(services: Services) -> str:
    return f"127.0.0.1:{services.router.running.server.port}"


async def test_both_python_examples_say_the_same_text(services: Services) -> None:
    by_grpc = await run(sys.executable, EXAMPLES / "python_grpc.py", grpc_address(services))
    by_http = await run(sys.executable, EXAMPLES / "python_openai.py", services.router.url)
    assert by_grpc.rpartition("\n64 tokens")[0] == by_http.rpartition("\n64 tokens")[0] != ""
    assert "were drafted" in by_grpc


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_curl_example_streams_to_the_end(services: Services) -> None:
    events = (await run("bash", EXAMPLES / "curl.sh", services.router.url)).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert (
        json.loads(events[-2].removeprefix("data: "))["metrics"]["speculative_decoding"]["num_emitted"] == 64
    )


@pytest.mark.skipif(not NODE_PACKAGES.exists(), reason="needs npm install in examples/node")
async def test_the_node_example_reads_the_protos_as_they_are(services: Services) -> None:
    output = await run("node", EXAMPLES / "node" / "main.mjs", grpc_address(services))
    assert "64 tokens in" in output
