"""The standard health service (grpc.health.v1) of a server whose services share one status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

HEALTH_SERVICE_NAME: str = health.SERVICE_NAME
LIVENESS = "liveness"
"""The name whose status is SERVING while the process answers: what a supervisor may restart it by."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health of a server, NOT_SERVING at first. Build and change it inside the running event loop.

    grpcio-health-checking's own servicer is not used: it holds a lock while it writes to a watcher, so one
    that does not read would hold up every change, and the drain.

    Args:
        names: the services that are asked for by name; "" is the server as a whole.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._status = _NOT_SERVING
        self._changed = asyncio.Event()
        self._draining = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answer health calls on `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set_serving(self, serving: bool) -> None:
        """Tell whoever asks or watches; without effect once the drain has begun."""
        if not self._draining:
            self._status = _SERVING if serving else _NOT_SERVING
            self._wake()

    def drain(self) -> None:
        """NOT_SERVING for good. Watchers are told and then left: the server would wait for them."""
        self._status = _NOT_SERVING
        self._draining = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a name that is not served here."""
        if request.service not in (*self._names, LIVENESS):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status_of(request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        """The status of every service, by name."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=self._status_of(name))
            for name in (*self._names, LIVENESS)
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and after each change, until the drain; a slow reader may miss some in between."""
        told = None
        while True:
            changed = self._changed
            status = self._status_of(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._draining:
                return
            else:
                await changed.wait()

    def _status_of(self, name: str) -> int:
        if name == LIVENESS:
            return int(_SERVING)
        return int(self._status if name in self._names else _SERVICE_UNKNOWN)
