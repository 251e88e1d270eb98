"""Requests find the replica that holds their prefix, and conversations stay."""

from __future__ import annotations

from pathlib import Path

from router.text import Tokenizer
from specdecode.errors import InvalidArgumentError
from specdecode.serving import error_from_rpc
from tests.router.client import request_for
from tests.services import Services, refusal

SYSTEM = "the stop string stops the text and the lazy dog jumps over the quick brown fox. " * 2


async def test_requests_of_one_system_prompt_hit_the_prefix_cache_of_one_replica_after_another(
    model: Path, byte_level: Tokenizer
) -> None:
    num_shared = len(byte_level.encode_text(SYSTEM)) // 16 * 16
    async with Services.started(model, num_targets=3) as services:
        cached = []
        for index in range(12):
            answer = await services.generate_one(
                request_for(f"{SYSTEM}{index} add", temperature=0, max_tokens=4)
            )
            assert answer.usage is not None
            cached.append(answer.usage.num_cached_tokens)
    assert sum(found >= num_shared - 16 for found in cached) >= 9, cached


async def test_a_conversation_stays_on_one_replica_though_its_turns_share_no_text(model: Path) -> None:
    async with Services.started(model, num_targets=3) as services:
        for turn in range(6):
            request = request_for([turn + 5] * 8, temperature=0, max_tokens=3)
            request.conversation = "c"
            await services.generate_one(request)
        steps = sorted(target.num_steps for target in services.targets)
    warm_up = steps[0]
    assert steps[:2] == [warm_up, warm_up]
    assert steps[2] >= warm_up + 6 * 3


async def test_a_conversations_name_has_a_limit(model: Path) -> None:
    async with Services.started(model) as services:
        request = request_for(max_tokens=1)
        request.conversation = "c" * 129
        error = error_from_rpc(await refusal(services.router.call(request)))
        assert isinstance(error, InvalidArgumentError)
        assert [violation.field for violation in error.violations] == ["conversation"]
