"""Clients of the router: what it is asked and what it answers as dataclasses of `specdecode.requests`.

    async with await RouterClient.open("127.0.0.1:50051") as client:
        request = GenerateRequest(TextPrompt("Once upon a time"), SamplingOptions(max_tokens=64))
        async for piece in client.generate(request, timeout_seconds=60.0):
            print(piece.text, end="", flush=True)

Whatever goes wrong is an error of `specdecode.errors`. Leaving the loop early cancels the request. A client
that is opened with `retries` makes requests again that were refused for want of room, within a budget.
`specdecode.sync_client` is the same without asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from specdecode import wire
from specdecode.config import ServiceSettings
from specdecode.errors import InvalidArgumentError, SpecdecodeError, UnavailableError
from specdecode.figures import Figures
from specdecode.requests import EmittedToken, GenerateRequest, Piece, PolicyOptions, RouterStatus
from specdecode.retries import Attempts, Retries
from specdecode.serving import connect, error_from_rpc
from specdecode.tls import ClientTls, why_refused
from specdecode.types import FinishReason, RoundRecord, Usage
from specdecode.v1 import router_service_pb2 as pb
from specdecode.v1 import router_service_pb2_grpc as pb_grpc

CONNECT_SECONDS = 5.0
STATUS_SECONDS = 5.0
MAX_MESSAGE_BYTES: int = ServiceSettings.model_fields["max_message_bytes"].default


class RouterClient:
    """One connection to a router, for any number of requests at once; made by `open`."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        retries: Retries | None = None,
        api_key: str | None = None,
    ) -> None:
        """`retries`: None makes each request once."""
        self.address = address
        self._retries = retries
        self._channel = channel
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._stub = pb_grpc.RouterServiceStub(channel)

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retries: Retries | None = None,
        tls: ClientTls | None = None,
        api_key: str | None = None,
    ) -> Self:
        """Connects to `address` (host:port); without `retries` each request is made once.

        Args:
            tls: None: in plaintext.
            api_key: sent with each call; keep it from connections without TLS that leave the machine.
        Raises:
            UnavailableError: nothing answers there, at once where the connection is refused.
            InvalidArgumentError: certificates can't be read.
        """
        channel = connect(address, max_message_bytes, tls)
        try:
            async with asyncio.timeout(connect_seconds):
                await _connected(channel)
        except (TimeoutError, ConnectionError):
            await channel.close()
            reason = await why_refused(address, tls)
            message = f"no router answers at {address}" if reason is None else f"router {address}: {reason}"
            raise UnavailableError(message) from None
        return cls(address, channel, retries, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what runs and closes the connection."""
        await self._channel.close()

    async def generate(
        self, request: GenerateRequest, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, as they come.

        Args:
            request: what is wanted.
            timeout_seconds: until the request is given up; the router knows of it. None: never.
        Raises:
            SpecdecodeError: the request was refused or failed; a choice's own failure is in its piece.
        """
        attempts = Attempts(self._retries, timeout_seconds)
        message = message_of(request)
        while True:
            pause: float | None = None
            call = self._stub.Generate(message, timeout=attempts.begin(), metadata=self._metadata)
            try:
                async for answer in call:
                    attempts.heard()
                    yield wire.piece_from_proto(answer)
            except grpc.aio.AioRpcError as error:
                pause = attempts.pause_after(error_from_rpc(error))
            finally:
                call.cancel()
            if pause is None:
                return
            await asyncio.sleep(pause)

    async def get_status(self, *, timeout_seconds: float = STATUS_SECONDS) -> RouterStatus:
        """The router's replicas and load.

        Raises:
            SpecdecodeError: no answer within `timeout_seconds`, or a refusal.
        """
        message = await self._answer(self._stub.GetStatus, pb.GetStatusRequest(), timeout_seconds)
        return wire.router_status_from_proto(message)

    async def get_figures(self, *, timeout_seconds: float = STATUS_SECONDS) -> tuple[Figures, ...]:
        """What was measured about speculation since the router started, running requests included.

        Raises:
            SpecdecodeError: no answer within `timeout_seconds`, or a refusal.
        """
        message = await self._answer(self._stub.GetFigures, pb.GetFiguresRequest(), timeout_seconds)
        return tuple(map(wire.figures_from_proto, message.figures))

    async def get_policy(self, *, timeout_seconds: float = STATUS_SECONDS) -> PolicyOptions:
        """The operator's limits on speculation that are in force.

        Raises:
            SpecdecodeError: no answer within `timeout_seconds`, or a refusal.
        """
        message = await self._answer(self._stub.GetPolicy, pb.GetPolicyRequest(), timeout_seconds)
        return wire.policy_from_proto(message.policy)

    async def set_policy(
        self, options: PolicyOptions, *, timeout_seconds: float = STATUS_SECONDS
    ) -> PolicyOptions:
        """Changes the limits that are given, from the next round on, and returns all that are now in force.

        Raises:
            SpecdecodeError: no answer within `timeout_seconds`, or a value outside its range, and nothing is
                changed.
        """
        try:
            message = pb.SetPolicyRequest(policy=wire.policy_to_proto(options))
        except ValueError as error:  # integers outside 32 bits
            raise InvalidArgumentError.of("policy", str(error)) from None
        answer = await self._answer(self._stub.SetPolicy, message, timeout_seconds)
        return wire.policy_from_proto(answer.policy)

    async def _answer(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return await method(request, timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


def message_of(request: GenerateRequest) -> pb.GenerateRequest:
    """The message that asks for it.

    Raises:
        InvalidArgumentError: it can't be said in one.
    """
    try:
        return wire.generate_request_to_proto(request)
    except ValueError as error:  # integers outside 32 or 64 bits, text that is not Unicode
        raise InvalidArgumentError.of("request", str(error)) from None


async def _connected(channel: grpc.aio.Channel) -> None:
    """Until the connection stands; ConnectionError when the first attempt fails."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise ConnectionError
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


@dataclass
class Completion:
    """One choice, gathered from its pieces so far."""

    choice: int
    request_id: str = ""
    text: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage = field(default_factory=Usage)
    error: SpecdecodeError | None = None
    report: tuple[Figures, ...] = ()

    def add(self, piece: Piece) -> None:
        """Takes the next piece of this choice."""
        self.request_id = piece.request_id
        self.text += piece.text
        self.tokens += piece.tokens
        self.rounds += piece.rounds
        self.finish_reason = piece.finish_reason
        self.stop = piece.stop
        self.usage = piece.usage or self.usage
        self.error = piece.error
        self.report = piece.report

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens so far."""
        return tuple(token.token_id for token in self.tokens)


def total_usage(completions: Iterable[Completion]) -> Usage:
    """The sum over choices; the prompt is counted once."""
    usages = [vars(completion.usage) for completion in completions]
    return Usage(**{name: sum(usage[name] for usage in usages) for name in vars(Usage())})
