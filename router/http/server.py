"""The HTTP server, in the event loop that the gRPC server runs in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from router.access import Access
from router.http.app import build_app
from router.http.front import HttpFront
from router.router import Router
from router.text import Tokenizer
from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError
from specdecode.tls import ServerContexts, ServerTls

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 75
"""How long a connection without a request is kept: longer than what load balancers keep theirs for."""
_LAST_WORDS_SECONDS = 1.0
"""How long clients may take to read that what they wait for has been ended."""
_BACKLOG = 1024
_SEND_BUFFER_BYTES = 128 * 1024
"""Of a connection, in the system: left to itself it grows to megabytes for whoever does not read."""


class HttpServer:
    """A listening server. Build it inside the running event loop, by `start`.

    Attributes:
        port: the port listened on.
        serving: done when it has ended.
    """

    def __init__(self, front: HttpFront, listener: socket.socket, tls: ServerTls | None = None) -> None:
        self.port: int = listener.getsockname()[1]
        self._front = front
        config = uvicorn.Config(
            build_app(front),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
        )
        if tls is not None:
            config.load()
            config.ssl = ServerContexts(tls).context
        self._server = _Uvicorn(config)
        self.serving = asyncio.create_task(self._server.serve([listener]))

    @classmethod
    def start(
        cls, router: Router, access: Access, tokenizer: Tokenizer, settings: RouterSettings, port: int
    ) -> HttpServer:
        """Listens on `port`, a free one for 0.

        Raises:
            InvalidArgumentError: the address can't be listened on, or certificates can't be used.
        """
        front = HttpFront(router, access, tokenizer, settings)
        listener = _listen(settings.host, port)
        try:
            return cls(front, listener, settings.exposure.tls)
        except InvalidArgumentError:
            listener.close()
            raise

    async def drain(self, grace: float | None) -> None:
        """Refuses new requests and gives running ones `grace` seconds (None: ends them); then tells them."""
        self._server.should_exit = True
        if grace is not None:
            await asyncio.wait([self.serving], timeout=grace)
        self._front.ending.set()
        await asyncio.wait([self.serving], timeout=_LAST_WORDS_SECONDS)
        self._server.force_exit = True
        self._server.drop()
        await self.serving


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's: see `specdecode.serving`."""
        yield

    def drop(self) -> None:
        """Ends what would not end by itself: a client that does not read."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise InvalidArgumentError.of("http_port", f"can't listen on {where}: {error.strerror}") from None
    return listener
