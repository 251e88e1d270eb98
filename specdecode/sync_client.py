"""A client of the router for programs without asyncio: `specdecode.client`, blocking.

    with SyncRouterClient.open("127.0.0.1:50051") as client:
        request = GenerateRequest(TextPrompt("Once upon a time"), SamplingOptions(max_tokens=64))
        for piece in client.generate(request, timeout_seconds=60.0):
            print(piece.text, end="", flush=True)

Several threads may use one client. A generator that is closed, as leaving the loop does, cancels its request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

import grpc

from specdecode import wire
from specdecode.client import CONNECT_SECONDS, MAX_MESSAGE_BYTES, STATUS_SECONDS, message_of
from specdecode.errors import InvalidArgumentError, SpecdecodeError, UnavailableError
from specdecode.figures import Figures
from specdecode.requests import GenerateRequest, Piece, PolicyOptions, RouterStatus
from specdecode.retries import Attempts, Retries
from specdecode.serving import connect_sync, error_from_rpc
from specdecode.tls import ClientTls
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as pb_grpc


class SyncRouterClient:
    """One connection to a router, for any number of requests at once; made by `open`."""

    def __init__(
        self, address: str, channel: grpc.Channel, retries: Retries | None = None, api_key: str | None = None
    ) -> None:
        """`retries`: None makes each request once."""
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self.address = address
        self._retries = retries
        self._channel = channel
        self._stub = pb_grpc.RouterServiceStub(channel)

    @classmethod
    def open(
        cls,
        address: str,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retries: Retries | None = None,
        tls: ClientTls | None = None,
        api_key: str | None = None,
    ) -> Self:
        """Connects to `address` (host:port); arguments are those of `RouterClient.open`.

        Raises:
            UnavailableError: nothing answers there within `connect_seconds`.
            InvalidArgumentError: certificates can't be read.
        """
        channel = connect_sync(address, max_message_bytes, tls)
        try:
            grpc.channel_ready_future(channel).result(connect_seconds)
        except grpc.FutureTimeoutError:
            channel.close()
            raise UnavailableError(f"no router answers at {address}") from None
        return cls(address, channel, retries, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs and closes the connection."""
        self._channel.close()

    def generate(
        self, request: GenerateRequest, *, timeout_seconds: float | None = None
    ) -> Generator[Piece, None, None]:
        """As `RouterClient.generate`."""
        attempts = Attempts(self._retries, timeout_seconds)
        message = message_of(request)
        while True:
            pause: float | None = None
            call = self._stub.Generate(message, timeout=attempts.begin(), metadata=self._metadata)
            try:
                for answer in call:
                    attempts.heard()
                    yield wire.piece_from_proto(answer)
            except grpc.RpcError as error:
                pause = attempts.pause_after(_error_of(error))
            finally:
                call.cancel()
            if pause is None:
                return
            time.sleep(pause)

    def get_status(self, *, timeout_seconds: float = STATUS_SECONDS) -> RouterStatus:
        """As `RouterClient.get_status`."""
        message = self._answer(self._stub.GetStatus, pb.GetStatusRequest(), timeout_seconds)
        return wire.router_status_from_proto(message)

    def get_figures(self, *, timeout_seconds: float = STATUS_SECONDS) -> tuple[Figures, ...]:
        """As `RouterClient.get_figures`."""
        message = self._answer(self._stub.GetFigures, pb.GetFiguresRequest(), timeout_seconds)
        return tuple(map(wire.figures_from_proto, message.figures))

    def get_policy(self, *, timeout_seconds: float = STATUS_SECONDS) -> PolicyOptions:
        """As `RouterClient.get_policy`."""
        message = self._answer(self._stub.GetPolicy, pb.GetPolicyRequest(), timeout_seconds)
        return wire.policy_from_proto(message.policy)

    def set_policy(self, options: PolicyOptions, *, timeout_seconds: float = STATUS_SECONDS) -> PolicyOptions:
        """As `RouterClient.set_policy`."""
        try:
            message = pb.SetPolicyRequest(policy=wire.policy_to_proto(options))
        except ValueError as error:  # integers outside 32 bits
            raise InvalidArgumentError.of("policy", str(error)) from None
        return wire.policy_from_proto(self._answer(self._stub.SetPolicy, message, timeout_seconds).policy)

    def _answer(self, method: Callable[..., Any], message: Any, timeout_seconds: float) -> Any:
        try:
            return method(message, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(error) from None


def _error_of(error: grpc.RpcError) -> SpecdecodeError:
    assert isinstance(error, grpc.Call)  # as whatever a call raises is
    return error_from_rpc(error)
