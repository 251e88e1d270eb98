"""Answers on their way: to clients that may leave at any time, from a service that may end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.http.errors import Refusal, refusal_of
from router.parsing import slow_client
from specdecode.errors import CancelledError, Reason, SpecdecodeError, UnavailableError
from specdecode.serving import first_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def to_json(content: object) -> bytes:
    """As it is sent."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def event(content: object) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(content) + b"\n\n"


class JsonResponse(Response):
    """An answer as a whole."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)

    @classmethod
    def refusing(cls, refusal: Refusal) -> JsonResponse:
        """An error."""
        return cls(refusal.body, refusal.status, dict(refusal.headers))


class Presence:
    """Whether there is still somebody to answer, and a service to do it.

    Args:
        receive: of the request, whose body has been taken in.
        ending: set when what runs has to end.
    """

    def __init__(self, receive: Receive, ending: asyncio.Event) -> None:
        self._receive = receive
        self._ending = ending

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to; it is cancelled when there is nobody for it.

        Raises:
            CancelledError: the client has left.
            UnavailableError: the service ends.
        """
        results: list[T] = []

        async def run() -> None:
            results.append(await work)

        match await first_of(run(), self._client_leaves(), self._ending.wait()):
            case 0:
                return results[0]
            case 1:
                raise CancelledError("the client has left")
            case _:
                raise UnavailableError("the router stops", reason=Reason.DRAINING)

    async def _client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStream(Response):
    """Server-sent events: what `events` yields, then [DONE]; an error is the last event, without it.

    Args:
        events: closed whatever happens.
        stuck_seconds: how long a client may read nothing before it is cut off.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        presence: Presence,
        headers: Mapping[str, str],
        stuck_seconds: float,
    ) -> None:
        self._events = events
        self._stuck_seconds = stuck_seconds
        self._presence = presence
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                **headers,
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                # Proxies that gather answers would turn a stream into a pause.
                "x-accel-buffering": "no",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events):
                await self._presence.during(self._send_all(send))
        except CancelledError:
            return
        except SpecdecodeError as error:
            await send(_body(event(refusal_of(error).body), more=False))

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            try:
                async with asyncio.timeout(self._stuck_seconds):
                    await send(_body(data))
            except TimeoutError:
                raise slow_client(self._stuck_seconds) from None
        await send(_body(DONE, more=False))


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
