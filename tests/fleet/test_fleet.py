"""Replicas placed by Ray: found by a router, started again when killed, and nobody left at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from specdecode.errors import UnavailableError
from specdecode.replicas import ReplicaRole, Scale
from specdecode.wire import piece_from_proto
from target_service.cluster import Cluster
from tests.fleet.running import DEADLINE, Fleet, are_gone, fleet, kill
from tests.router.client import request_for
from tests.services import Answer, RouterUnderTest, eventually, start_router

MAX_TOKENS = 240


@asynccontextmanager
async def following(model: Path, running: Fleet) -> AsyncIterator[RouterUnderTest]:
    """A router that follows a fleet's registry."""
    router = await start_router(model, [f"watch://{running.address}"], None)
    try:
        yield router
    finally:
        await router.stop()


async def answer_to(router: RouterUnderTest, request: Any, answer: Answer | None = None) -> Answer:
    """A whole answer, heard piece by piece."""
    heard = answer or Answer()
    async for message in router.call(request):
        heard.hear(piece_from_proto(message))
    return heard


async def knows(router: RouterUnderTest, number: int) -> None:
    """Waits until a router is connected to so many targets, and knows of no others."""

    async def holds() -> bool:
        targets = (await router.status()).targets
        return len(targets) == number and all(target.connected for target in targets)

    await eventually(holds, f"the router has {number} targets")


async def test_text_goes_on_when_the_process_of_a_replica_is_killed_and_ray_starts_it_again(
    cluster: str, model: Path
) -> None:
    request = request_for(seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    async with fleet(model, "--replicas=2", f"--ray-address={cluster}") as running:
        await running.serves()
        await running.until(lambda: len(running.ready()) == 2, "both are ready")
        async with following(model, running) as router:
            await knows(router, 2)
            undisturbed = await answer_to(router, request)
            answer = Answer()
            answering = asyncio.create_task(answer_to(router, request, answer))
            await eventually(lambda: len(answer.ids) >= 20, "some text has come")
            (home,) = [t.address for t in (await router.status()).targets if t.num_sequences]
            (victim,) = [r for r in running.ready() if r.address == home]
            kill(running.pid_of(victim))
            assert (await answering).ids == undisturbed.ids
            assert answer.usage is not None
            assert answer.usage.num_failovers == 1

            def is_back() -> bool:
                again = [r for r in running.ready() if r.id == victim.id]
                return bool(again) and again[0].address != victim.address

            await running.until(is_back, "Ray has started it again")
            await knows(router, 2)
            await check_scaling(running, router, request, undisturbed)
            pids = [running.pid_of(replica) for replica in running.ready()]
        assert await running.end() == 0, running.log
        await are_gone({psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)})


async def check_scaling(running: Fleet, router: RouterUnderTest, request: Any, undisturbed: Answer) -> None:
    """One replica less, while a text runs on each of them: nobody moves, and the router forgets it."""
    answers = [Answer(), Answer()]
    tasks = [asyncio.create_task(answer_to(router, request, answer)) for answer in answers]
    await eventually(lambda: all(answer.ids for answer in answers), "both texts run")
    await running.scale(Scale(num_targets=1))
    for task in tasks:
        heard = await task
        assert heard.ids == undisturbed.ids
    await running.until(lambda: len(running.replicas) == 1, "one is left")
    await knows(router, 1)
    assert (await answer_to(router, request)).ids == undisturbed.ids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
async def test_nobody_is_left_of_a_fleet_that_ends(model: Path, number: signal.Signals) -> None:
    async with fleet(
        model, "--replicas=1", "--draft-replicas=1", SPECDECODE_DRAFT_CALIBRATION="off"
    ) as running:
        await running.serves()
        await running.until(lambda: len(running.ready(ReplicaRole.DRAFT)) == 1, "the draft is ready, too")
        processes = running.processes()
        assert len(processes) > 4
        os.kill(running.process.pid, number)
        await running.process.wait()
        await are_gone(processes)


async def test_a_replica_that_can_not_start_ends_the_fleet_with_the_reason(
    cluster: str, tmp_path: Path
) -> None:
    log = await refusal_of(fleet(tmp_path, "--replicas=1", f"--ray-address={cluster}"))
    assert "holds no model" in log


async def test_a_kind_of_gpu_that_is_not_there_is_waited_for_then_named(cluster: str, model: Path) -> None:
    options = ("--gpus-per-rank=1", "--accelerator-type=H200", "--placement-seconds=2")
    log = await refusal_of(fleet(model, "--replicas=1", f"--ray-address={cluster}", *options))
    assert "no place for a replica within 2 s: no node of the cluster has enough accelerator_type:H200" in log


async def refusal_of(starting: AbstractAsyncContextManager[Fleet]) -> str:
    """The log of a fleet that does not come to serve."""
    async with starting as running, asyncio.timeout(DEADLINE):
        assert await running.process.wait() == 1
        await running.is_read()
        assert "Traceback" not in running.log
        return running.log


async def test_replicas_have_different_devices(cluster: str, model: Path) -> None:
    options = ("--gpus-per-rank=1", "--accelerator-type=H100", "--device=cpu")
    async with fleet(model, "--replicas=2", f"--ray-address={cluster}", *options) as running:
        await running.serves()
        await running.until(lambda: len(running.ready()) == 2, "both are ready")
        assert {replica.devices for replica in running.ready()} == {"0", "1"}
        await running.scale(Scale(num_targets=3))
        waits = "waits for 1 GPU, 0.001 accelerator_type:H100"
        await running.until(lambda: any(r.detail == waits for r in running.replicas), "the third waits")
        assert await running.end() == 0, running.log


async def test_nobody_answers_at_an_address_of_ray() -> None:
    with pytest.raises(UnavailableError, match=r"ray_address 127\.0\.0\.1:1: no Ray cluster there"):
        await Cluster.connect("127.0.0.1:1")
