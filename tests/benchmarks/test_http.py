"""The HTTP benchmark: its client counts what came, and its bars break where they should."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.http import Run, bars_of, jobs_for, speeds_of
from benchmarks.http_worker import Client
from benchmarks.jobs import Job, JobPrompt
from benchmarks.results import paired_ratio
from router.text import Tokenizer
from specdecode.requests import ChatMessage, ChatPrompt
from tests.router.conftest import model
from tests.services import Services

__all__ = ["model"]


@pytest.mark.parametrize(
    ("http", "idle", "paint", "broken"),
    [
        ((97.0, 194.0), 0.009, 0.2, []),
        ((95.0, 190.0), 0.009, 0.2, ["HTTP over gRPC"]),
        ((97.0, 194.0), 0.011, 0.2, ["CPU of a router"]),
        ((97.0, 194.0), 0.009, 0.31, ["first paint"]),
    ],
)
def test_a_bar_breaks_with_its_own_figure(
    http: tuple[float, float], idle: float, paint: float, broken: list[str]
) -> None:
    speeds = {"gRPC": (100.0, 200.0), "HTTP": http}
    runs = [
        Run(front, turn, 1000, 1000 / speed)
        for front, values in speeds.items()
        for turn, speed in enumerate(values)
    ]
    ratio = paired_ratio(speeds_of(runs, "HTTP"), speeds_of(runs, "gRPC"))
    bars = bars_of(16, ratio, idle, 200, [paint] * 3)
    assert [bar.name for bar in bars if not bar.holds] == [
        bar.name for bar in bars if any(bar.name.startswith(name) for name in broken)
    ]
    assert len([bar for bar in bars if not bar.holds]) == len(broken)


def test_without_a_browser_the_page_has_no_bar() -> None:
    ratio = paired_ratio([1.0], [1.0])
    assert len(bars_of(16, ratio, 0.0, 200, [])) == 2


@pytest_asyncio.fixture
async def services(model: Path) -> AsyncIterator[Services]:
    async with Services.started(model, http_port=0) as started:
        yield started


async def test_every_token_of_every_stream_is_counted(services: Services, model: Path) -> None:
    tokenizer = Tokenizer(model)
    texts = ["the fox", "the dog", "stop"]
    prompts = [tokenizer.encode_chat(ChatPrompt((ChatMessage("user", text),))) for text in texts]
    job = Job(tuple(map(JobPrompt, texts, prompts)), max_tokens=20, salt="x")
    answer = await Client(services.router.url.removeprefix("http://")).run(job)
    assert answer.usage == {"num_emitted": 60}
    await services.all_is_free()


def test_jobs_share_no_prefix_with_another_turn(model: Path) -> None:
    salts = {jobs_for(str(model), 2, 4, turn).salt_of(0) for turn in range(3)}
    assert len(salts) == 3
