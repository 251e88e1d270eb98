"""A router drafts with whichever draft replica a registry tells of, and goes on when that one is gone."""

from __future__ import annotations

from pathlib import Path

from specdecode.replicas import ReplicaRole
from tests.fleet.test_registry import registry
from tests.router.client import NGRAM, request_for, speculating
from tests.services import Drafts, RouterUnderTest, Services, eventually, start_drafts, start_router


async def drafts_at(router: RouterUnderTest, drafts: Drafts) -> None:
    """Waits until a router is connected to this draft service."""

    async def holds() -> bool:
        told = (await router.status()).drafts
        return len(told) == 1 and told[0].connected and told[0].address == drafts.address

    await eventually(holds, "the router has found the draft replica")


async def test_a_draft_replica_that_is_gone_is_replaced_by_another(model: Path) -> None:
    request = speculating(request_for(temperature=0, max_tokens=60), 3, NGRAM)
    async with registry() as known, Services.started(model) as services:
        first, second = await start_drafts(None), await start_drafts(None)
        announcer, _ = known.announcer("draft-1", ReplicaRole.DRAFT)
        announcer.ready(first.server.port)
        source = f"watch://{known.address}"
        router = await start_router(model, [services.target.address], source)
        try:
            await drafts_at(router, first)
            other, _ = known.announcer("draft-2", ReplicaRole.DRAFT)
            other.ready(second.server.port)
            services.router, own = router, services.router
            before = await services.generate_one(request)
            await drafts_at(router, first)  # it stays while it can
            await announcer.stop()
            await first.stop()
            await drafts_at(router, second)
            after = await services.generate_one(request)
            services.router = own
            assert after.ids == before.ids
            assert after.usage is not None
            assert after.usage.num_drafted > 0
        finally:
            await router.stop()
            await second.stop()
