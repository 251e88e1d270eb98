"""What the three services' gRPC servers and channels share: limits, health, reflection, errors, the end.

A service's main builds a `Server` inside the event loop, registers its servicer on `.grpc`, starts it, and
calls `set_serving()` once it can answer; `run_until_signalled` does the rest. On SIGTERM health turns
NOT_SERVING, `Server.draining` is set, new calls are refused with UNAVAILABLE and running ones may finish
within the grace.

The streams between a router and its replicas live as long as the router does, so a handler of such a stream
must watch `draining`: refuse what is opened from then on, and return once nothing is left on the stream.
Otherwise the drain lasts the whole grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Never, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from specdecode.errors import InternalError, InvalidArgumentError, Reason, SpecdecodeError
from specdecode.health import HEALTH_SERVICE_NAME, Health
from specdecode.tls import (
    ClientTls,
    Exposure,
    NamedCallers,
    ServerCertificates,
    channel_credentials,
    channel_options,
)
from specdecode.wire import error_from_proto, error_to_proto

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_MAX_METADATA_BYTES = 32 * 1024
_HEALTH_MESSAGE_BYTES = 64 * 1024
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


def _common_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        # Both sides ping: a router must notice a lost replica, a replica must free what a lost router held.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # gRPC waits this long for the answer to a ping; without it a minute, whatever keepalive says.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int, max_streams: int = Exposure.max_streams) -> list[tuple[str, int]]:
    """Options of every server; `max_message_bytes` bounds a message in either direction."""
    return [
        *_common_options(max_message_bytes),
        ("grpc.max_concurrent_streams", max_streams),
        # Who pings more often is disconnected.
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        # With it two servers could share a port, and each would get half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def connect(address: str, max_message_bytes: int, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel of its own connection to `address` (host:port), with the servers' limits and keepalive.

    Raises:
        InvalidArgumentError: certificates can't be read.
    """
    options = _channel_options(max_message_bytes, tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def connect_sync(address: str, max_message_bytes: int, tls: ClientTls | None = None) -> grpc.Channel:
    """As `connect`, for programs without an event loop."""
    options = _channel_options(max_message_bytes, tls)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), options=options)


def _channel_options(max_message_bytes: int, tls: ClientTls | None) -> list[tuple[str, int | str]]:
    return [
        *_common_options(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *([] if tls is None else channel_options(tls)),
    ]


class Server:
    """A grpc.aio server with health and reflection. Build it inside the running event loop.

    Attributes:
        grpc: where servicers are registered, before `start`.
        draining: set when the service has begun to end.
        port: the port listened on, once started.
        health_port: the port of health alone, once started; 0: there is none.
    """

    def __init__(
        self, service_names: Sequence[str], max_message_bytes: int, exposure: Exposure | None = None
    ) -> None:
        """Args: full names (`specdecode.v1.TargetService`) for health and reflection; bytes of a message."""
        self._exposure = exposure or Exposure()
        tls, options = self._exposure.tls, server_options(max_message_bytes, self._exposure.max_streams)
        callers = [] if tls is None or not tls.client_names else [NamedCallers(tls.client_names, abort)]
        self.grpc = grpc.aio.server(options=options, interceptors=callers)
        self.draining = asyncio.Event()
        self.port = 0
        self.health_port = 0
        self._certificates: ServerCertificates | None = None
        self._health = Health(("", *service_names))
        self._health.add_to(self.grpc)
        self._health_beside: grpc.aio.Server | None = None
        if self._exposure.reflection:
            reflection.enable_server_reflection(
                (*service_names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
            )

    async def start(self, host: str, port: int) -> int:
        """Listen, NOT_SERVING yet; the port (a free one for 0).

        Raises:
            InvalidArgumentError: the address can't be listened on, or certificates can't be used.
        """
        try:
            if self._exposure.tls is not None:
                self._certificates = ServerCertificates(self._exposure.tls)
            self.port = _listen("port", self.grpc, host, port, self._certificates)
            if self._exposure.health_port is not None:
                await self._start_health(host, self._exposure.health_port)
        except InvalidArgumentError:
            # A server that is dropped without this complains when the interpreter ends.
            await self.grpc.stop(None)
            raise
        await self.grpc.start()
        return self.port

    async def _start_health(self, host: str, port: int) -> None:
        beside = grpc.aio.server(options=server_options(_HEALTH_MESSAGE_BYTES, self._exposure.max_streams))
        self._health.add_to(beside)
        try:
            self.health_port = _listen("health_port", beside, host, port, None)
        except InvalidArgumentError:
            await beside.stop(None)
            raise
        await beside.start()
        self._health_beside = beside

    def set_serving(self) -> None:
        """Tell health checks that requests can be answered from now on."""
        self._health.set_serving(True)

    def set_not_serving(self) -> None:
        """Tell health checks that requests can't be answered for now."""
        self._health.set_serving(False)

    async def drain(self, grace: float | None) -> None:
        """NOT_SERVING, refuse new calls, give running ones `grace` seconds (None: cancel them)."""
        self._health.drain()
        self.draining.set()
        await self.grpc.stop(grace)
        if self._health_beside is not None:
            await self._health_beside.stop(None)


def _listen(
    field: str, server: grpc.aio.Server, host: str, port: int, certificates: ServerCertificates | None
) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _check_bindable(host, port)
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificates.credentials)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError.of(field, f"can't listen on {address}: {reason}") from None


def _check_bindable(host: str, port: int) -> None:
    """Raise the OSError that listening would meet: gRPC keeps it for its own log."""
    failures = []
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                failures.append(error)
            else:
                return
    raise failures[0]


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> int:
    """Index of the coroutine that ends first; the others are cancelled. Its exception, if any, is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    index = ended.index(True)
    tasks[index].result()
    return index


async def pause(seconds: float) -> None:
    """Waits before something is tried again, unless this task was cancelled meanwhile.

    grpc.aio swallows a cancellation that meets a call which is just being made and fails: a loop that calls
    again and again would never end.

    Raises:
        CancelledError: a cancellation was swallowed.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


# Errors


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpecdecodeError) -> Never:
    """End the call with the error's code, message and details."""
    await context.abort_with_status(rpc_status.to_status(error_to_proto(error)))


@contextlib.asynccontextmanager
async def aborting(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Around a handler's body: SpecdecodeErrors end the call as themselves, others as INTERNAL, logged."""
    try:
        yield
    except SpecdecodeError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        logger.exception("a call failed")
        await abort(context, InternalError("internal error; the service's log has the details"))


def error_from_rpc(error: grpc.aio.AioRpcError | grpc.Call) -> SpecdecodeError:
    """What the other side meant, with its details; errors of gRPC itself have none and go by their code."""
    code: int = error.code().value[0]
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                status = status_pb2.Status.FromString(value)
                if status.code == code:
                    return error_from_proto(status)
    bare = error_from_proto(status_pb2.Status(code=code, message=error.details() or error.code().name))
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC's own refusal of a message above the limit; our queues always send details.
        bare.reason = Reason.INVALID_ARGUMENT
    return bare


# Running a service


async def _nothing() -> None:
    return None


class Drains(Protocol):
    """A server beside the gRPC one."""

    async def drain(self, grace: float | None) -> None:
        """As `Server.drain`."""


@dataclass(frozen=True)
class Running:
    """A started service.

    Attributes:
        server: drained on the first signal.
        beside: drained with it.
        on_stopped: awaited after the last call has ended; stops the engine and closes channels.
        watched: a task the service can't live without, such as its engine loop: when it ends before a signal,
            the service drains and exits with 1.
    """

    server: Server
    on_stopped: Callable[[], Awaitable[None]] = _nothing
    watched: asyncio.Future[Any] | None = None
    beside: tuple[Drains, ...] = ()

    async def drain(self, grace: float | None) -> None:
        """Refuses new calls everywhere, and gives running ones `grace` seconds (None: ends them)."""
        await asyncio.gather(*(server.drain(grace) for server in (self.server, *self.beside)))


def run_until_signalled(start: Callable[[], Coroutine[Any, Any, Running]], drain_seconds: float) -> int:
    """Run a service until SIGTERM or SIGINT; the exit code.

    Args:
        start: builds and starts the service; a SpecdecodeError it raises is logged in one line, exit code 1.
        drain_seconds: grace for running calls after the first signal; the second signal cancels them.
    """
    signals = _Signals()
    code: Future[int] = Future()

    def run_event_loop() -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                code.set_result(runner.run(_serve(start, drain_seconds, signals)))
        except SpecdecodeError as error:
            logger.error("%s", error.message)
            code.set_result(1)
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            code.set_exception(error)
        finally:
            _main_thread_work.put(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signals.on_signal)
    thread = threading.Thread(target=run_event_loop, name="event loop")
    thread.start()
    while (work := _main_thread_work.get()) is not None:
        work()
    thread.join()
    return code.result()


_main_thread_work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


def on_main_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` on the process's first thread, after what was given to it before.

    OpenMP regions entered from any other thread run on one core (docs/performance.md), so that is where
    models run; the event loop has a thread of its own.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result is told
            done.set_exception(error)

    _main_thread_work.put(run)
    return asyncio.wrap_future(done)


class _Signals:
    """The first and the second signal, as events of the event loop; signals come in on the main thread."""

    def __init__(self) -> None:
        self._count = 0
        self._listener: Callable[[int], None] | None = None

    def on_signal(self, number: int, frame: object) -> None:
        self._count += 1
        if self._listener is not None:
            self._listener(self._count)

    def listen(self, first: asyncio.Event, second: asyncio.Event) -> None:
        """Sets the events from now on, for signals that came before as well."""
        loop = asyncio.get_running_loop()

        def tell(count: int) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe((first if count == 1 else second).set)

        self._listener = tell
        for count in range(1, self._count + 1):
            tell(count)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


async def _serve(
    start: Callable[[], Coroutine[Any, Any, Running]], drain_seconds: float, signals: _Signals
) -> int:
    first, second = asyncio.Event(), asyncio.Event()
    signals.listen(first, second)
    starting = asyncio.ensure_future(start())
    await first_of(_settled(starting), first.wait())
    if not starting.done():
        logger.info("stopped before it had started")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    running = starting.result()
    await first_of(_settled(running.watched), first.wait())
    await _stop(running, second, drain_seconds)
    return 0 if first.is_set() else 1


async def _settled(future: asyncio.Future[Any] | None) -> None:
    """Wait for a future without cancelling it or raising what it raises; for ever without one."""
    if future is None:
        await asyncio.Event().wait()
    else:
        await asyncio.wait([future])


async def _stop(running: Running, second: asyncio.Event, drain_seconds: float) -> None:
    watched = running.watched
    if watched is not None and watched.done():
        error = None if watched.cancelled() else watched.exception()
        logger.error("the service failed and stops", exc_info=error)
    logger.info("draining: running calls have %g s to finish; a second signal ends them now", drain_seconds)
    if await first_of(running.drain(drain_seconds), second.wait()) == 1:
        await running.drain(None)
    await running.on_stopped()
    logger.info("stopped")


# Logging

_QUIET = (
    "asyncio",
    "filelock",
    "fsspec",
    "grpc",
    "httpx",
    "httpcore",
    "huggingface_hub",
    "transformers",
    "urllib3",
    "uvicorn",
)


class _LineFormatter(logging.Formatter):
    """`time level service message` in one line (a traceback follows on its own lines); UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self, service: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {service} %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


class _JsonFormatter(logging.Formatter):
    """One JSON object a record; what a record has in `fields` are fields of their own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, object] = {
            "time": when,
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def configure_logging(service: str, level: str, style: str = "text") -> None:
    """Log to stderr, one line a record, from `level` (debug, info, warning, error) up.

    `style`: text, or json.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if style == "json" else _LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
