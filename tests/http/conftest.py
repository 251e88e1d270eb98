from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest
import pytest_asyncio

from router.text import Tokenizer
from tests.router.conftest import byte_level, model, other_model
from tests.services import DEADLINE, Services

__all__ = ["byte_level", "model", "other_model"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, other_model: Path) -> AsyncIterator[Services]:
    """All services, with a draft model that is often wrong, and the HTTP front."""
    async with Services.started(model, other_model, http_port=0) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(services: Services) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai_client(services.router.url) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(services: Services) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain HTTP client."""
    async with httpx2.AsyncClient(base_url=services.router.url, timeout=DEADLINE) as started:
        yield started


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def openai_client(url: str) -> openai.AsyncOpenAI:
    """A client that does not try again by itself."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)
