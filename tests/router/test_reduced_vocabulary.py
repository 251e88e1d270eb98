"""A draft with a reduced vocabulary behind the services: texts are the target's own, whatever it lacks."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from router.text import Tokenizer
from specdecode.errors import FailedPreconditionError
from specdecode.lm.draft_vocabulary import write_draft_vocabulary
from specdecode.types import FinishReason, Origin
from tests.router.client import MODEL, PROMPT, greedy, request_for, speculating
from tests.services import Services, start_target

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def drafted_ids(byte_level: Tokenizer) -> list[int]:
    """Two of three ids."""
    return [token_id for token_id in range(byte_level.vocab_size) if token_id % 3]


@pytest.fixture(scope="module")
def draft_model(model: Path, drafted_ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself, but for its head."""
    path = shutil.copytree(model, tmp_path_factory.mktemp("draft") / "reduced")
    write_draft_vocabulary(path, drafted_ids)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(model: Path, draft_model: Path) -> AsyncIterator[Services]:
    async with Services.started(model, draft_model) as started:
        yield started


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
async def test_greedy_ids_are_those_of_transformers(
    services: Services, model: Path, byte_level: Tokenizer, drafted_ids: list[int], num_draft_tokens: int
) -> None:
    prompt = byte_level.encode_text(PROMPT)
    request = speculating(request_for(temperature=0, max_tokens=60), num_draft_tokens, MODEL)
    answer = await services.generate_one(request)
    assert answer.ids == greedy(model, prompt, 60)
    accepted = {token.token_id for token in answer.tokens if token.origin is Origin.ACCEPTED}
    assert accepted
    assert accepted <= set(drafted_ids)
    await services.all_is_free()


@pytest.mark.parametrize("seed", [3, 2**64 - 1])
async def test_seeded_text_does_not_depend_on_speculation(services: Services, seed: int) -> None:
    request = request_for(max_tokens=40, seed=seed, temperature=1.1, top_p=0.95)
    off = await services.generate_one(speculating(request, 0, MODEL))
    for num_draft_tokens in (1, 3, 8):
        on = await services.generate_one(speculating(request, num_draft_tokens, MODEL))
        assert (on.ids, on.text) == (off.ids, off.text)
        assert on.usage is not None
        assert 0 < on.usage.num_accepted < on.usage.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_text_of_ids_that_can_not_be_drafted_goes_on_without_drafts(
    services: Services, drafted_ids: list[int], temperature: float
) -> None:
    allowed = [token_id for token_id in range(40, 160) if token_id not in drafted_ids]
    request = request_for(max_tokens=30, temperature=temperature, allowed_token_ids={"ids": allowed})
    answer = await services.generate_one(speculating(request, 4, MODEL))
    assert answer.error is None
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.ids) == 30
    assert set(answer.ids) <= set(allowed)
    assert answer.usage is not None
    assert answer.usage.num_drafted == 0
    await services.all_is_free()


async def test_a_target_of_this_kind_is_refused(draft_model: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="reduced can't be a target"):
        await start_target(draft_model)
