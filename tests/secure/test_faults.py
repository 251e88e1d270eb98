"""Services that are stopped, cut off or slowed from outside, disks that are full: text goes on, unchanged."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdecode.wire import piece_from_proto
from target_service.engine import EngineFailedError
from tests.router.client import MODEL, NGRAM, request_for, speculating
from tests.services import DEADLINE, Answer, Services, eventually, start_drafts, start_router, start_target

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces and tmpfs are Linux's"),
    pytest.mark.timeout(4 * DEADLINE),
]

ADDRESSES = ("10.213.77.1", "10.213.77.2")


class Service:
    """A service in a process of its own, whose log is read line by line."""

    def __init__(self, module: str, *options: str, before: tuple[str, ...] = ()) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SPECDECODE_")
        }
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *options],
            stderr=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )

    def address(self) -> str:
        """Where it serves, once it does."""
        assert self.process.stderr is not None
        end, told = time.monotonic() + 3 * DEADLINE, b""
        while time.monotonic() < end:
            if select.select([self.process.stderr], [], [], 1.0)[0]:
                told += (line := self.process.stderr.readline())
                if (match := re.search(rb"serving .* on (\S+:\d+)", line)) is not None:
                    return match[1].decode()
                assert line, told.decode()
        raise AssertionError(told.decode())

    def end(self) -> None:
        """Ends it, whatever state it is in."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)


@contextmanager
def service(module: str, *options: str, before: tuple[str, ...] = ()) -> Iterator[Service]:
    started = Service(module, *options, before=before)
    try:
        yield started
    finally:
        started.end()


def command(*words: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace at the other end of a wire, 10.213.77.2; this end is 10.213.77.1."""
    name = f"sd{os.getpid()}"
    try:
        command("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces can't be made here: {error}")
    try:
        command("ip", "link", "add", name, "type", "veth", "peer", "name", "peer", "netns", name)
        command("ip", "addr", "add", f"{ADDRESSES[0]}/30", "dev", name)
        command("ip", "link", "set", name, "up")
        command("ip", "netns", "exec", name, "ip", "addr", "add", f"{ADDRESSES[1]}/30", "dev", "peer")
        command("ip", "netns", "exec", name, "ip", "link", "set", "peer", "up")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        command("ip", "netns", "del", name)


def loses_packets(device: str) -> bool:
    """Makes a wire late and lossy; False where the kernel has no netem."""
    netem = ("netem", "delay", "30ms", "20ms", "loss", "20%")
    adding = ["tc", "qdisc", "add", "dev", device, "root", *netem]
    return subprocess.run(adding, capture_output=True, check=False, timeout=DEADLINE).returncode == 0


class Wire:
    """A TCP connection through here: what goes over it may be late, or not arrive at all.

    Attributes:
        delay: seconds that each piece of data takes.
        whole: whether anything arrives; what does not is kept until it does.
    """

    def __init__(self, to: str) -> None:
        host, port = to.rsplit(":", 1)
        self._to = host, int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay = 0.0
        self.whole = asyncio.Event()
        self.whole.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The address of this end."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._to)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await asyncio.sleep(self.delay)
                await self.whole.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # the other end is told by the abort below
        finally:
            sink.transport.abort()


def asking(drafter: int = NGRAM) -> Any:
    """A request that n-gram look-ups draft for: its text repeats itself."""
    request = speculating(request_for([30, 31, 32] * 6, max_tokens=40, ignore_eos=True, seed=3), 4, drafter)
    request.sampling.allowed_token_ids.ids.extend((30, 31, 32))
    return request


@asynccontextmanager
async def with_drafts_at(model: Path, address: str, **settings: Any) -> AsyncIterator[Services]:
    """A router and a target here, the draft service there."""
    target = await start_target(model)
    router = await start_router(model, [target.address], address, **settings)
    services = Services(model, router, [target], None, None, {})
    try:
        await services.draft_is(True)
        yield services
        await target.all_is_free()
    finally:
        await router.stop()
        await target.stop()


async def text_of(services: Services, request: Any) -> tuple[list[int], int]:
    """Ids, and how many were drafted."""
    answer = await services.generate_one(request)
    return answer.ids, sum(record.num_drafted for record in answer.rounds)


async def rest_of(call: Any, answer: Answer) -> list[int]:
    """All ids of a text that has begun, to its end."""
    while (message := await call.read()) is not grpc.aio.EOF:
        answer.hear(piece_from_proto(message))
    return answer.ids


async def drafts_again(services: Services, expected: list[int]) -> None:
    """Waits until the text is drafted for again."""

    async def drafted() -> bool:
        ids, num_drafted = await text_of(services, asking())
        assert ids == expected
        return num_drafted > 0

    await eventually(drafted, "drafting resumes")


@pytest.mark.skipif(not os.environ.get("FAULTS"), reason="takes minutes and privileges: make test-faults")
async def test_a_wire_that_delays_loses_or_parts_costs_drafts_never_text(model: Path, namespace: str) -> None:
    inside = ("ip", "netns", "exec", namespace)
    options = (f"--host={ADDRESSES[1]}", "--port=0", "--calibration=off", "--ngram-min=1")
    with service("draft_service", *options, before=inside) as drafts:
        async with with_drafts_at(model, drafts.address(), draft_deadline_seconds=0.3) as services:
            expected, num_drafted = await text_of(services, asking())
            assert num_drafted > 0
            if loses_packets(namespace):
                assert (await text_of(services, asking()))[0] == expected
                command("tc", "qdisc", "del", "dev", namespace, "root")
                await drafts_again(services, expected)
            command("ip", "link", "set", namespace, "down")
            assert (await text_of(services, asking()))[0] == expected
            command("ip", "link", "set", namespace, "up")
            await drafts_again(services, expected)


async def test_a_late_or_parted_connection_to_the_draft_service_costs_drafts_never_text(model: Path) -> None:
    drafts = await start_drafts(None)
    wire = Wire(drafts.address)
    async with (
        wire.listening() as address,
        with_drafts_at(model, address, draft_deadline_seconds=0.3) as services,
    ):
        expected, num_drafted = await text_of(services, asking())
        assert num_drafted > 0
        wire.delay = 0.1
        assert (await text_of(services, asking()))[0] == expected
        wire.delay = 0.0
        await drafts_again(services, expected)
        wire.whole.clear()
        assert (await text_of(services, asking()))[0] == expected
        wire.whole.set()
        await drafts_again(services, expected)
    await drafts.stop()


@pytest.mark.parametrize("delay", [0.02, 0.1])
async def test_a_late_connection_to_a_target_loses_no_token(model: Path, delay: float) -> None:
    target = await start_target(model)
    wire = Wire(target.address)
    request = request_for(temperature=0, max_tokens=40, ignore_eos=True)
    async with wire.listening() as address:
        router = await start_router(model, [address], None)
        services = Services(model, router, [target], None, None, {})
        try:
            expected = (await services.generate_one(request)).ids
            wire.delay = delay
            assert (await services.generate_one(request)).ids == expected
            await target.all_is_free()
        finally:
            await router.stop()
    await target.stop()


async def test_a_draft_service_that_stands_still_costs_drafts_never_text(model: Path) -> None:
    with service("draft_service", "--port=0", "--calibration=off", "--ngram-min=1") as drafts:
        async with with_drafts_at(model, drafts.address(), draft_deadline_seconds=0.2) as services:
            expected, num_drafted = await text_of(services, asking())
            assert num_drafted > 0
            drafts.process.send_signal(signal.SIGSTOP)
            assert (await text_of(services, asking()))[0] == expected
            drafts.process.send_signal(signal.SIGCONT)
            await drafts_again(services, expected)


async def test_a_target_that_stands_still_for_a_moment_loses_no_token(model: Path) -> None:
    options = ("--port=0", "--calibration=off", "--num-blocks=64", "--dtype=float32", f"--model={model}")
    with service("target_service", *options) as target:
        router = await start_router(model, [target.address()], None)
        services = Services(model, router, [], None, None, {})
        try:
            request = request_for(temperature=0, max_tokens=200, ignore_eos=True)
            expected = (await services.generate_one(request)).ids
            call = router.call(request)
            first = Answer()
            first.hear(piece_from_proto(await call.read()))
            target.process.send_signal(signal.SIGSTOP)
            assert (await router.status()).num_requests == 1
            target.process.send_signal(signal.SIGCONT)
            assert await rest_of(call, first) == expected
        finally:
            await router.stop()


async def test_requests_of_a_killed_target_end_on_another_one(model: Path) -> None:
    options = ("--port=0", "--calibration=off", "--num-blocks=64", "--dtype=float32", f"--model={model}")
    with service("target_service", *options) as doomed:
        other = await start_target(model)
        router = await start_router(model, [doomed.address(), other.address], None)
        services = Services(model, router, [other], None, None, {})
        try:
            request = request_for(temperature=0, max_tokens=200, ignore_eos=True)
            expected = (await services.generate_one(request)).ids
            calls = [router.call(request) for _ in range(4)]
            answers = [Answer() for _ in calls]
            for call, answer in zip(calls, answers, strict=True):
                answer.hear(piece_from_proto(await call.read()))
            doomed.process.kill()
            for call, answer in zip(calls, answers, strict=True):
                assert await rest_of(call, answer) == expected
            await other.all_is_free()
        finally:
            await router.stop()
            await other.stop()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that has no room left."""
    directory = tmp_path / "full"
    directory.mkdir()
    try:
        command("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(directory))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"file systems can't be mounted here: {error}")
    try:
        with open(directory / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        yield directory
    finally:
        command("umount", str(directory))


async def test_a_full_disk_costs_what_was_learnt_never_a_request(
    model: Path, full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = full_disk / "estimates.json"
    async with Services.started(model, model, estimates_path=str(path)) as services:
        assert len((await services.generate_one(speculating(request_for(max_tokens=9), 3, MODEL))).ids) >= 1
    assert "can't be written" in caplog.text
    assert not path.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_that_can_run_nothing_ends_and_its_requests_go_on_elsewhere(model: Path) -> None:
    """As on a device that is lost: each forward fails, also by itself."""
    request = request_for(temperature=0, max_tokens=120, ignore_eos=True)
    async with Services.started(model, num_targets=2) as services:
        expected = (await services.generate_one(request)).ids
        calls = [services.router.call(request) for _ in range(6)]
        answers = [Answer() for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            answer.hear(piece_from_proto(await call.read()))
        lost = services.targets[0]
        lm: Any = lost.replica.engine.lm

        def fail(chunks: object) -> None:
            raise RuntimeError("the device is lost")

        lm.forward = fail
        with pytest.raises(EngineFailedError):
            await asyncio.wait_for(asyncio.wrap_future(lost.loop.ended), DEADLINE)
        for call, answer in zip(calls, answers, strict=True):
            assert await rest_of(call, answer) == expected
        await services.targets[1].all_is_free()
