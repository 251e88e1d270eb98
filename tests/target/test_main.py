"""`python -m target_service` as a process of its own, while it measures itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from router.text import Tokenizer
from tests.router import tiny

DEADLINE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save_byte_level_tokenizer(tmp_path_factory.mktemp("model"))
    return tiny.save_llama(path, Tokenizer(path).vocab_size)


async def run_until(model: Path, cache: Path, line: str, *options: str) -> tuple[int | None, str]:
    """Starts it, ends it by SIGTERM after the line; its exit code and its log."""
    target = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "target_service", "--port=0", f"--model={model}", "--num-blocks=64"),
        *("--num-threads=1", *options),
        env={**os.environ, "OMP_NUM_THREADS": "1", "SPECDECODE_CACHE": str(cache)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert target.stderr is not None
    log = ""
    try:
        async with asyncio.timeout(DEADLINE):
            while line not in log:
                new = (await target.stderr.readline()).decode()
                assert new, log
                log += new
            target.send_signal(signal.SIGTERM)
            log += (await target.stderr.read()).decode()
            return await target.wait(), log
    finally:
        if target.returncode is None:
            target.kill()
            await target.wait()


def kept(cache: Path) -> list[Path]:
    """Calibrations in a cache."""
    return list(cache.glob("calibration/*.json"))


async def test_a_signal_while_it_measures_ends_it_at_once_and_well(model: Path, tmp_path: Path) -> None:
    options = ("--calibration=refresh", "--calibration-seconds=3600")
    code, log = await run_until(model, tmp_path, "measuring how long steps", *options)
    assert code == 0, log
    assert "stopped before it had started" in log
    assert "Traceback" not in log
    assert "serving" not in log
    assert not kept(tmp_path)


async def test_the_second_start_uses_what_the_first_measured(model: Path, tmp_path: Path) -> None:
    options = ("--calibration-seconds=0.3",)
    code, first = await run_until(model, tmp_path, "serving", *options)
    assert (code, "measuring how long steps" in first) == (0, True), first
    code, second = await run_until(model, tmp_path, "serving", *options)
    assert (code, "measuring" in second, "costs are known from" in second) == (0, False, True), second
