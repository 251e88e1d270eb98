"""The router's answer to one body: pieces of all its prompts' choices, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from router.access import Caller
from router.http.asking import Asked
from router.http.errors import in_clients_words
from router.router import Router
from router.validation import ResolvedRequest
from specdecode.client import Completion
from specdecode.errors import SpecdecodeError
from specdecode.requests import GenerateRequest, Piece

Said = tuple[int, Piece]
"""A choice's index, counted through all prompts, and a piece of it."""


@dataclass(frozen=True)
class Ready:
    """A request that was found to be good."""

    asked: GenerateRequest
    resolved: ResolvedRequest


async def resolve(router: Router, asked: Asked, traceparent: str, caller: Caller) -> list[Ready]:
    """All prompts' requests; nothing is started before all of them are known to be good.

    Raises:
        SpecdecodeError: one of them is refused; fields are called what the body calls them.
    """
    try:
        return [Ready(entry, await router.resolve(entry, traceparent, caller)) for entry in asked.requests]
    except SpecdecodeError as error:
        raise in_clients_words(error, asked.names) from None


async def generate(
    router: Router, requests: Sequence[Ready], traceparent: str, caller: Caller
) -> AsyncGenerator[Said, None]:
    """Pieces of all choices. Closing it frees all that they hold.

    Raises:
        SpecdecodeError: a choice failed: there is no way to answer the others alone.
    """
    if len(requests) == 1:
        source: AsyncGenerator[Said, None] = _run(router, requests[0], 0, traceparent, caller)
    else:
        source = _run_all(router, requests, traceparent, caller)
    async with aclosing(source) as pieces:
        async for index, piece in pieces:
            if piece.error is None:
                yield index, piece
                continue
            if piece.tokens:
                yield index, replace(piece, error=None, usage=None)
            raise piece.error


async def _run(
    router: Router, request: Ready, first: int, traceparent: str, caller: Caller
) -> AsyncGenerator[Said, None]:
    run = router.run(request.asked, request.resolved, traceparent=traceparent, caller=caller)
    async with aclosing(run) as pieces:
        async for piece in pieces:
            yield first + piece.choice, piece


async def _run_all(
    router: Router, requests: Sequence[Ready], traceparent: str, caller: Caller
) -> AsyncGenerator[Said, None]:
    """Each prompt is a request of its own to the router; they run side by side."""
    # No room: whoever lags holds all of them up, as it does with one.
    said: asyncio.Queue[Said | Exception | None] = asyncio.Queue(maxsize=1)

    async def listen(index: int, request: Ready) -> None:
        end: Exception | None = None
        try:
            source = _run(router, request, index * request.resolved.n, traceparent, caller)
            async with aclosing(source) as pieces:
                async for entry in pieces:
                    await said.put(entry)
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            end = error
        await said.put(end)

    tasks = [asyncio.create_task(listen(index, request)) for index, request in enumerate(requests)]
    try:
        num_running = len(tasks)
        while num_running:
            entry = await said.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather(pieces: AsyncIterator[Said], num_choices: int) -> list[Completion]:
    """All choices, to their ends."""
    completions = [Completion(index) for index in range(num_choices)]
    async for index, piece in pieces:
        completions[index].add(piece)
    return completions
