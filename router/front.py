"""RouterService on gRPC: handlers translate and delegate."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from router.access import Access, Caller
from router.parsing import LARGE_BYTES, parse_request, slow_client, trace_context
from router.router import Router
from router.run_time_policy import changed, differences, options_of
from specdecode.requests import GenerateRequest, Piece
from specdecode.serving import aborting
from specdecode.v1 import router_service_pb2 as pb
from specdecode.wire import (
    figures_to_proto,
    generate_request_from_proto,
    piece_to_proto,
    policy_from_proto,
    policy_to_proto,
    router_status_to_proto,
)

logger = logging.getLogger(__name__)

SERVICE_NAME = "specdecode.v1.RouterService"

Context = grpc.aio.ServicerContext[Any, Any]


class RouterFront:
    """The service's methods."""

    def __init__(self, router: Router, access: Access, stuck_seconds: float) -> None:
        """`stuck_seconds`: how long a client may read nothing."""
        self._router = router
        self._stuck_seconds = stuck_seconds
        self._access = access

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server.

        Requests come in as bytes: what can't be parsed is the client's error, which gRPC itself would report
        as ours and log with a traceback.
        """
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "GetStatus": self._unary(self.get_status, pb.GetStatusRequest, pb.GetStatusResponse),
            "GetFigures": self._unary(self.get_figures, pb.GetFiguresRequest, pb.GetFiguresResponse),
            "GetPolicy": self._unary(self.get_policy, pb.GetPolicyRequest, pb.GetPolicyResponse),
            "SetPolicy": self._unary(self.set_policy, pb.SetPolicyRequest, pb.SetPolicyResponse),
        }
        server.add_registered_method_handlers(SERVICE_NAME, handlers)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, data: bytes, context: Context) -> None:
        """Writes the pieces of a GenerateRequest; the only choice's error ends the call."""
        async with aborting(context):
            caller = self._caller(context)
            request = await _read(data)
            remaining = context.time_remaining()
            deadline = None if remaining is None else time.time() + remaining
            alone = request.n in (None, 1)
            pieces = self._router.generate(request, deadline, _traceparent(context), caller)
            async with aclosing(pieces):
                async for piece in pieces:
                    if piece.error is None or not alone:
                        await self._write(context, piece)
                        continue
                    if piece.tokens or piece.rounds:
                        await self._write(context, replace(piece, error=None))
                    raise piece.error

    async def _write(self, context: Context, piece: Piece) -> None:
        """Waits while the client reads nothing, but not for ever.

        Raises:
            CancelledError: it has waited too long.
        """
        try:
            async with asyncio.timeout(self._stuck_seconds):
                await context.write(piece_to_proto(piece))
        except TimeoutError:
            raise slow_client(self._stuck_seconds) from None

    async def get_status(self, request: Any, context: Context) -> Any:
        """Targets, draft service and load."""
        return router_status_to_proto(self._router.status())

    async def get_figures(self, request: Any, context: Context) -> Any:
        """What was measured about speculation."""
        return pb.GetFiguresResponse(figures=map(figures_to_proto, self._router.figures()))

    async def get_policy(self, request: Any, context: Context) -> Any:
        """The operator's limits that are in force."""
        return pb.GetPolicyResponse(policy=policy_to_proto(options_of(self._router.policy)))

    async def set_policy(self, request: Any, context: Context) -> Any:
        """Changes limits from the next decision on; who asked for it is logged."""
        caller = self._caller(context)
        caller.check_admin()
        before = self._router.policy
        after = changed(before, policy_from_proto(request.policy))
        self._router.policy = after
        who = f"{context.peer()} {caller.tenant} {caller.key}".rstrip()
        logger.info("policy set by %s: %s", who, differences(before, after) or "no change")
        return pb.SetPolicyResponse(policy=policy_to_proto(options_of(after)))

    def _caller(self, context: Context) -> Caller:
        value = dict(context.invocation_metadata() or ()).get("authorization")
        return self._access.caller(value if isinstance(value, str) else None)

    def _unary(self, method: Any, request: Any, response: Any) -> grpc.RpcMethodHandler[Any, Any]:
        async def handle(data: bytes, context: Context) -> Any:
            async with aborting(context):
                self._caller(context)
                return await method(parse_request(request, data), context)

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=response.SerializeToString)


async def _read(data: bytes) -> GenerateRequest:
    """The request, read beside the event loop if it is large."""
    if len(data) < LARGE_BYTES:
        return _read_now(data)
    return await asyncio.to_thread(_read_now, data)


def _read_now(data: bytes) -> GenerateRequest:
    return generate_request_from_proto(parse_request(pb.GenerateRequest, data))


def _traceparent(context: Context) -> str:
    return trace_context(dict(context.invocation_metadata() or ()).get("traceparent"))
