"""Servers and channels, through real gRPC on free ports, with a small servicer of the test's own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdecode.errors import (
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NumericalError,
    Reason,
    ResourceExhaustedError,
    SpecdecodeError,
    UnavailableError,
)
from specdecode.health import LIVENESS
from specdecode.serving import Server, abort, aborting, configure_logging, connect, error_from_rpc, pause
from specdecode.v1 import target_service_pb2 as pb
from specdecode.v1 import target_service_pb2_grpc as pb_grpc

NAME = "specdecode.v1.TargetService"
MAX_MESSAGE_BYTES = 1 << 20
DEADLINE = 60.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(pb_grpc.TargetServiceServicer):
    """Answers a unary call once `gate` is set, each frame with one; its streams end with the drain."""

    def __init__(self, server: Server) -> None:
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self._draining = server.draining

    async def GetTargetModel(self, request: Any, context: Any) -> Any:
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        async with aborting(context):
            if self.error is not None:
                raise self.error
        return pb.GetTargetModelResponse()

    async def Decode(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async with aborting(context):
            ended = asyncio.ensure_future(self._draining.wait())
            while True:
                frame = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait({frame, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not frame.done():
                    frame.cancel()
                    return
                if frame.result() is None:
                    return
                if self.error is not None:
                    raise self.error
                yield pb.DecodeResponse(step=len(frame.result().closes))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server((NAME,), MAX_MESSAGE_BYTES)
    yield server
    await server.drain(None)


@pytest.fixture
async def servicer(server: Server) -> Servicer:
    servicer = Servicer(server)
    pb_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start("127.0.0.1", 0)
    return servicer


@pytest.fixture
async def channel(server: Server, servicer: Servicer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.TargetServiceStub:
    return pb_grpc.TargetServiceStub(channel)


async def get_model(stub: pb_grpc.TargetServiceStub) -> Any:
    return await stub.GetTargetModel(pb.GetTargetModelRequest(), timeout=DEADLINE)


async def error_of(stub: pb_grpc.TargetServiceStub) -> SpecdecodeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get_model(stub)
    return error_from_rpc(caught.value)


class TestHealth:
    async def check(self, channel: grpc.aio.Channel, name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE)).status

    @pytest.mark.parametrize("name", ["", NAME])
    async def test_serving_only_when_told(self, server: Server, channel: grpc.aio.Channel, name: str) -> None:
        assert await self.check(channel, name) == NOT_SERVING
        server.set_serving()
        assert await self.check(channel, name) == SERVING
        server.set_not_serving()
        assert await self.check(channel, name) == NOT_SERVING

    async def test_unknown_service_is_not_found(self, channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.check(channel, "specdecode.v1.Nonexistent")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_watcher_sees_each_change_and_the_drain_does_not_wait_for_it(
        self, server: Server, channel: grpc.aio.Channel
    ) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=NAME), timeout=DEADLINE
        )
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving()
        assert (await watch.read()).status == SERVING
        await asyncio.wait_for(server.drain(DEADLINE * 10), DEADLINE)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF

    async def test_watcher_of_an_unknown_service_stays_until_the_drain(
        self, server: Server, channel: grpc.aio.Channel
    ) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="specdecode.v1.Nonexistent"), timeout=DEADLINE
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        server.set_serving()
        await asyncio.wait_for(server.drain(DEADLINE * 10), DEADLINE)
        assert await watch.read() is grpc.aio.EOF

    async def test_list_names_every_service(self, server: Server, channel: grpc.aio.Channel) -> None:
        server.set_serving()
        request = health_pb2.HealthListRequest()
        listed = await health_pb2_grpc.HealthStub(channel).List(request, timeout=DEADLINE)
        assert {name: status.status for name, status in listed.statuses.items()} == {
            "": SERVING,
            NAME: SERVING,
            LIVENESS: SERVING,
        }

    async def test_liveness_holds_while_there_is_nothing_to_serve_with_and_through_the_drain(
        self, server: Server, channel: grpc.aio.Channel
    ) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=LIVENESS), timeout=DEADLINE
        )
        assert (await watch.read()).status == SERVING
        assert (await self.check(channel, LIVENESS), await self.check(channel, "")) == (SERVING, NOT_SERVING)
        await asyncio.wait_for(server.drain(DEADLINE * 10), DEADLINE)
        assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), timeout=DEADLINE
    )
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_describes_a_service(channel: grpc.aio.Channel) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), timeout=DEADLINE
    )
    assert (await call.read()).file_descriptor_response.file_descriptor_proto


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            InvalidArgumentError(
                "two fields",
                violations=(
                    FieldViolation("sampling.top_p", "1.5; above 0, at most 1"),
                    FieldViolation("n", "0"),
                ),
            ),
            ResourceExhaustedError("queue full", retry_after=1.25),
            UnavailableError("draining", reason=Reason.DRAINING),
            NumericalError("NaN at position 3 – über"),
        ],
        ids=lambda error: type(error).__name__,
    )
    async def test_details_arrive(
        self, servicer: Servicer, stub: pb_grpc.TargetServiceStub, error: SpecdecodeError
    ) -> None:
        servicer.error = error
        arrived = await error_of(stub)
        assert type(arrived) is type(error)
        assert vars(arrived) == vars(error)

    async def test_details_arrive_from_a_stream(
        self, servicer: Servicer, stub: pb_grpc.TargetServiceStub
    ) -> None:
        servicer.error = InvalidArgumentError.of("opens[0].sampling", "missing")
        call = stub.Decode(timeout=DEADLINE)
        await call.write(pb.DecodeRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert vars(error_from_rpc(caught.value)) == vars(servicer.error)

    async def test_the_largest_error_fits_the_trailers(
        self, servicer: Servicer, stub: pb_grpc.TargetServiceStub
    ) -> None:
        violations = tuple(FieldViolation("☃" * 1000, "☃" * 1000) for _ in range(100))
        servicer.error = InvalidArgumentError("☃" * 100_000, violations=violations)
        arrived = await error_of(stub)
        assert isinstance(arrived, InvalidArgumentError)
        assert arrived.message.startswith("☃☃☃")
        assert arrived.message.endswith("...")
        assert arrived.violations

    async def test_unexpected_exceptions_are_internal_and_tell_nothing(
        self, servicer: Servicer, stub: pb_grpc.TargetServiceStub, caplog: pytest.LogCaptureFixture
    ) -> None:
        servicer.error = ValueError("a secret")
        arrived = await error_of(stub)
        assert type(arrived) is InternalError
        assert "secret" not in arrived.message
        assert "a secret" in caplog.text

    async def test_nobody_there_is_unavailable(self, unused_port: int) -> None:
        async with connect(f"127.0.0.1:{unused_port}", MAX_MESSAGE_BYTES) as channel:
            assert type(await error_of(pb_grpc.TargetServiceStub(channel))) is UnavailableError

    async def test_abort_ends_a_call_whatever_surrounds_it(self, server: Server) -> None:
        class Aborting(pb_grpc.TargetServiceServicer):
            async def GetTargetModel(self, request: Any, context: Any) -> Any:
                async with aborting(context):
                    await abort(context, UnavailableError("later", retry_after=2.0))

        pb_grpc.add_TargetServiceServicer_to_server(Aborting(), server.grpc)
        await server.start("127.0.0.1", 0)
        async with connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES) as channel:
            arrived = await error_of(pb_grpc.TargetServiceStub(channel))
        assert type(arrived) is UnavailableError
        assert arrived.retry_after == 2.0

    def test_details_of_another_code_are_not_believed(self) -> None:
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE,
            trailing_metadata=grpc.aio.Metadata(("grpc-status-details-bin", b"\x08\x03")),
            details="proxy",
        )
        assert type(error_from_rpc(error)) is UnavailableError

    def test_broken_details_are_skipped(self) -> None:
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND,
            trailing_metadata=grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff")),
            details="no such model",
        )
        assert error_from_rpc(error).message == "no such model"


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestLimits:
    async def test_messages_up_to_the_limit_pass(self, stub: pb_grpc.TargetServiceStub) -> None:
        call = stub.Decode(timeout=DEADLINE)
        closes = [2**63] * ((MAX_MESSAGE_BYTES - 100) // 10)
        await call.write(pb.DecodeRequest(closes=closes))
        assert (await call.read()).step == len(closes)
        call.cancel()

    async def test_a_message_above_the_receivers_limit_is_refused(
        self, server: Server, servicer: Servicer
    ) -> None:
        async with connect(f"127.0.0.1:{server.port}", 2 * MAX_MESSAGE_BYTES) as channel:
            call = pb_grpc.TargetServiceStub(channel).Decode(timeout=DEADLINE)
            await call.write(pb.DecodeRequest(closes=[2**63] * (MAX_MESSAGE_BYTES // 10 + 1)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_from_rpc(caught.value).reason is Reason.INVALID_ARGUMENT

    @pytest.mark.parametrize(
        ("host", "reason"),
        [
            ("127.0.0.1", "Address already in use"),
            ("192.0.2.1", "Cannot assign requested address"),
            ("nowhere.invalid", "[^:]+"),
        ],
    )
    async def test_an_address_that_can_not_be_listened_on_is_refused_with_the_reason(
        self, server: Server, servicer: Servicer, host: str, reason: str
    ) -> None:
        other = Server((NAME,), MAX_MESSAGE_BYTES)
        with pytest.raises(InvalidArgumentError) as caught:
            await other.start(host, server.port)
        assert re.fullmatch(
            rf"port: can't listen on {re.escape(host)}:{server.port}: {reason}", caught.value.message
        )


class TestDrain:
    async def test_a_running_call_finishes_while_new_ones_are_unavailable(
        self, server: Server, servicer: Servicer, stub: pb_grpc.TargetServiceStub
    ) -> None:
        servicer.gate.clear()
        running = asyncio.ensure_future(get_model(stub))
        await asyncio.wait_for(servicer.entered.wait(), DEADLINE)
        drain = asyncio.ensure_future(server.drain(DEADLINE))
        await asyncio.wait_for(server.draining.wait(), DEADLINE)
        async with connect(f"127.0.0.1:{server.port}", MAX_MESSAGE_BYTES) as channel:
            assert type(await error_of(pb_grpc.TargetServiceStub(channel))) is UnavailableError
        assert not drain.done()
        servicer.gate.set()
        assert await asyncio.wait_for(running, DEADLINE) == pb.GetTargetModelResponse()
        await asyncio.wait_for(drain, DEADLINE)

    async def test_a_stream_whose_handler_watches_does_not_hold_it_up(
        self, server: Server, servicer: Servicer, stub: pb_grpc.TargetServiceStub
    ) -> None:
        call = stub.Decode(timeout=DEADLINE)
        await call.write(pb.DecodeRequest(closes=[1]))
        assert (await call.read()).step == 1
        await asyncio.wait_for(server.drain(DEADLINE * 10), DEADLINE)
        assert await call.code() is grpc.StatusCode.OK

    async def test_what_runs_longer_than_the_grace_is_cancelled(
        self, server: Server, servicer: Servicer, stub: pb_grpc.TargetServiceStub
    ) -> None:
        servicer.gate.clear()
        running = asyncio.ensure_future(get_model(stub))
        await asyncio.wait_for(servicer.entered.wait(), DEADLINE)
        await asyncio.wait_for(server.drain(0.05), DEADLINE)
        await asyncio.wait_for(servicer.cancelled.wait(), DEADLINE)
        with pytest.raises(grpc.aio.AioRpcError):
            await running


PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from specdecode.errors import FailedPreconditionError
    from specdecode.serving import Running, Server, configure_logging, run_until_signalled
    from specdecode.v1 import target_service_pb2 as pb, target_service_pb2_grpc as pb_grpc

    class Servicer(pb_grpc.TargetServiceServicer):
        async def GetTargetModel(self, request, context):
            print("entered", flush=True)
            try:
                await context.read()
                if sys.argv[1] == "hangs":
                    await asyncio.Event().wait()
                await server.draining.wait()
                return pb.GetTargetModelResponse()
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                raise

    async def on_stopped():
        print("stopped", flush=True)

    async def engine():
        raise ValueError("engine broke")

    async def start():
        global server
        if sys.argv[1] == "refuses":
            raise FailedPreconditionError("this model can't be served")
        if sys.argv[1] == "starts":
            print("starting", flush=True)
            await asyncio.Event().wait()
        server = Server(("specdecode.v1.TargetService",), 1 << 20)
        pb_grpc.add_TargetServiceServicer_to_server(Servicer(), server.grpc)
        port = await server.start("127.0.0.1", 0)
        server.set_serving()
        watched = asyncio.ensure_future(engine()) if sys.argv[1] == "breaks" else None
        print(port, flush=True)
        return Running(server, on_stopped, watched)

    configure_logging("target", "info")
    sys.exit(run_until_signalled(start, drain_seconds=float(sys.argv[2])))
    """
)


class Program:
    """The program above in a process of its own."""

    def __init__(self, behaviour: str, drain_seconds: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, behaviour, str(drain_seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), DEADLINE)).strip()

    async def end(self) -> tuple[int, list[str], str]:
        """Exit code, further lines of output, the log."""
        output, log = await asyncio.wait_for(asyncio.to_thread(self.process.communicate), DEADLINE)
        return self.process.returncode, output.split(), log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
class TestSignals:
    async def test_the_first_lets_running_calls_finish(self, number: signal.Signals) -> None:
        program = Program("finishes", DEADLINE * 10)
        async with connect(f"127.0.0.1:{await program.line()}", MAX_MESSAGE_BYTES) as channel:
            running = asyncio.ensure_future(get_model(pb_grpc.TargetServiceStub(channel)))
            assert await program.line() == "entered"
            os.kill(program.process.pid, number)
            assert await running == pb.GetTargetModelResponse()
        code, output, log = await program.end()
        assert (code, output) == (0, ["stopped"])
        assert "Traceback" not in log

    async def test_the_second_cancels_them(self, number: signal.Signals) -> None:
        program = Program("hangs", DEADLINE * 10)
        async with connect(f"127.0.0.1:{await program.line()}", MAX_MESSAGE_BYTES) as channel:
            health_stub = health_pb2_grpc.HealthStub(channel)
            watch = health_stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=DEADLINE)
            assert (await watch.read()).status == SERVING
            running = asyncio.ensure_future(error_of(pb_grpc.TargetServiceStub(channel)))
            assert await program.line() == "entered"
            os.kill(program.process.pid, number)
            assert (await watch.read()).status == NOT_SERVING
            os.kill(program.process.pid, number)
            assert isinstance(await running, SpecdecodeError)
        code, output, _ = await program.end()
        assert (code, sorted(output)) == (0, ["cancelled", "stopped"])

    async def test_while_starting_it_stops_at_once(self, number: signal.Signals) -> None:
        program = Program("starts", DEADLINE * 10)
        assert await program.line() == "starting"
        os.kill(program.process.pid, number)
        code, output, log = await program.end()
        assert (code, output) == (0, [])
        assert "Traceback" not in log


async def test_a_service_that_hangs_is_noticed_by_whoever_waits_for_it() -> None:
    """Its connection stays open, and the kernel goes on acknowledging what is sent."""
    program = Program("hangs", DEADLINE)
    try:
        async with connect(f"127.0.0.1:{await program.line()}", MAX_MESSAGE_BYTES) as channel:
            running = asyncio.ensure_future(error_of(pb_grpc.TargetServiceStub(channel)))
            assert await program.line() == "entered"
            program.process.send_signal(signal.SIGSTOP)
            assert isinstance(await asyncio.wait_for(running, 30.0), UnavailableError)
    finally:
        program.process.kill()
    await program.end()


async def test_a_service_that_can_not_start_says_why_in_one_line() -> None:
    code, _, log = await Program("refuses", 1).end()
    assert code == 1
    assert re.fullmatch(r"\S+ ERROR target this model can't be served\n", log)


async def test_a_service_whose_engine_ends_exits_with_1() -> None:
    program = Program("breaks", 1)
    assert (await program.line()).isdigit()
    code, output, log = await program.end()
    assert (code, output) == (1, ["stopped"])
    assert "ValueError: engine broke" in log


class TestLogging:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Any:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        yield
        root.handlers[:], root.level = handlers, level

    def test_one_line_a_record(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure_logging("router", "info")
        logging.getLogger("router.rounds").info("first\nsecond %d", 3)
        logging.getLogger("router.rounds").debug("unseen")
        line = capsys.readouterr().err
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO router first\\nsecond 3\n", line)

    def test_libraries_are_quiet(self, capsys: pytest.CaptureFixture[str]) -> None:
        configure_logging("router", "debug")
        logging.getLogger("httpx").info("GET ...")
        logging.getLogger("transformers.modeling_utils").info("loading")
        assert capsys.readouterr().err == ""


async def test_a_loop_that_tries_again_ends_though_its_cancellation_was_swallowed() -> None:
    begun = asyncio.Event()

    async def try_again() -> None:
        while True:
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await pause(3600)

    task = asyncio.create_task(try_again())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task], timeout=DEADLINE)
    assert task.cancelled()


async def test_a_pause_that_nobody_cancels_ends() -> None:
    await pause(0)
