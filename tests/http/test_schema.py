"""Whatever our own description of the API allows is answered or refused, never failed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.services import DEADLINE, Services

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = 25
FORM = {"message", "type", "param", "code"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(model: Path) -> AsyncIterator[Services]:
    """Services without a draft model; texts are as long as the small context."""
    async with Services.started(model, http_port=0) as started:
        yield started


async def test_everything_the_schema_allows_is_answered_or_refused(small: Services) -> None:
    def check_all() -> int:
        schema = schemathesis.openapi.from_url(f"{small.router.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        for operation in operations:
            check(operation)
        return len(operations)

    assert await asyncio.to_thread(check_all) >= 10
    await small.all_is_free()


def check(operation: schemathesis.APIOperation) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def answered_or_refused(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 2
        answer = case.call(timeout=DEADLINE)
        assert answer.status_code in (200, 400, 404, 413, 415), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == FORM

    answered_or_refused()


async def test_the_description_names_every_body(small: Services) -> None:
    async with httpx2.AsyncClient(base_url=small.router.url, timeout=DEADLINE) as web:
        described = (await web.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"].rpartition("/")[2] in schemas
    assert {"mode", "num_draft_tokens", "drafter", "tier"} <= set(
        schemas["SpeculativeDecoding"]["properties"]
    )
