from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text import Tokenizer
from specdecode.cli.stack import free_port
from tests.fleet.running import ENVIRONMENT
from tests.router import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama and its byte-level tokenizer."""
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this machine that believes it has two H100s."""
    port = free_port("127.0.0.1")
    ray = Path(sys.executable).with_name("ray")
    resources = json.dumps({"accelerator_type:H100": 2})
    head = subprocess.Popen(
        [
            *(str(ray), "start", "--head", "--block", "--num-cpus=2", "--num-gpus=2"),
            *(f"--port={port}", f"--resources={resources}", "--object-store-memory=80000000"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ],
        env=ENVIRONMENT | {"RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert head.stdout is not None
    for line in head.stdout:
        if "--block" in line:
            break
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.communicate(timeout=60)
