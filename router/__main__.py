"""`python -m router`: connects to targets and draft service, and serves until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial

from router.access import Access
from router.front import SERVICE_NAME, RouterFront
from router.http.server import HttpServer
from router.router import Router
from router.text import Tokenizer
from specdecode import models
from specdecode.config import RouterSettings, load_settings
from specdecode.cpu_threads import give_way
from specdecode.errors import SpecdecodeError
from specdecode.serving import Running, Server, configure_logging, run_until_signalled
from specdecode.telemetry import start_tracing

logger = logging.getLogger(__name__)


async def start(settings: RouterSettings) -> Running:
    """Loads the tokenizer, listens, and serves once a target can be used.

    SERVING says nothing of the draft service, which is waited for a while, then done without: text does not
    depend on it, and drafting starts whenever it is there.

    Raises:
        SpecdecodeError: the model has no usable tokenizer, or a replica has another vocabulary.
    """
    tokenizer = await asyncio.to_thread(lambda: Tokenizer(models.resolve(settings.model)))
    server = Server([SERVICE_NAME], settings.max_message_bytes, settings.exposure)
    health = _Health(server)
    tracing = start_tracing(settings)
    try:
        router = Router(settings, tokenizer, health.set, tracing)
        access = Access.of(settings)
    except SpecdecodeError:
        await server.drain(None)
        raise
    RouterFront(router, access, settings.stuck_seconds).register(server.grpc)
    port = await server.start(settings.host, settings.port)
    beside: tuple[HttpServer, ...] = ()
    try:
        beside = _start_http(router, access, tokenizer, settings)
        logger.info("waiting for a target: %s", ", ".join(settings.targets))
        watched = await router.start()
    except BaseException:
        await router.stop()
        await Running(server, beside=beside).drain(None)
        raise
    health.begin()
    logger.info("serving %s on %s:%d", settings.model, settings.host, port)
    return Running(server, on_stopped=router.stop, watched=watched, beside=beside)


def _start_http(
    router: Router, access: Access, tokenizer: Tokenizer, settings: RouterSettings
) -> tuple[HttpServer, ...]:
    if settings.http_port is None:
        return ()
    http = HttpServer.start(router, access, tokenizer, settings, settings.http_port)
    logger.info("answering HTTP on %s:%d", settings.host, http.port)
    return (http,)


class _Health:
    """SERVING while a target can be used, from `begin` on."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._available = False
        self._begun = False

    def begin(self) -> None:
        self._begun = True
        self._report()

    def set(self, available: bool) -> None:
        self._available = available
        self._report()

    def _report(self) -> None:
        if not self._begun:
            return
        if self._available:
            self._server.set_serving()
        else:
            self._server.set_not_serving()


def main() -> int:
    """Runs the service; the exit code."""
    settings = load_settings(RouterSettings, sys.argv[1:])
    configure_logging("router", settings.log_level, settings.log_format)
    give_way()
    return run_until_signalled(partial(start, settings), settings.drain_seconds)


if __name__ == "__main__":
    sys.exit(main())
