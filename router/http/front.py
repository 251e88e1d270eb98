"""Handlers of the HTTP front: they translate and delegate."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException, Request
from starlette.responses import Response

from router.access import Access, Caller
from router.http import bodies
from router.http.asking import Asked, asked_by_chat, asked_by_completion, chat_prompt
from router.http.errors import in_clients_words
from router.http.generation import Said, gather, generate, resolve
from router.http.reading import read
from router.http.responses import EventStream, JsonResponse, Presence, event
from router.http.shapes import ChatShape, CompletionShape, Shape
from router.http.state import plan_of, state_of
from router.http.static import page_files, page_response
from router.parsing import trace_context
from router.router import Router
from router.text import Tokenizer
from specdecode import __version__
from specdecode.client import Completion
from specdecode.config import RouterSettings
from specdecode.errors import InvalidArgumentError, NotFoundError, SpecdecodeError
from specdecode.telemetry.exposition import render

IGNORED_HEADER = "x-specdecode-ignored"
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED = 16


class HttpFront:
    """What is answered to each path; `router.http.app` says which.

    Attributes:
        ending: set when requests that still run have to end.
    """

    def __init__(
        self, router: Router, access: Access, tokenizer: Tokenizer, settings: RouterSettings
    ) -> None:
        self.ending = asyncio.Event()
        self._access = access
        self._router = router
        self._tokenizer = tokenizer
        self._settings = settings
        self._files = page_files()
        self._began = int(time.time())
        self._fingerprint = f"specdecode-{__version__}-{tokenizer.fingerprint[:12]}"

    async def identify(self, request: Request) -> None:
        """Notes who asks, before anything of the request is read.

        Raises:
            UnauthenticatedError: a key is needed, and none that is known was sent.
        """
        request.state.caller = self._access.caller(request.headers.get("authorization"))

    # Texts

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        asked = asked_by_chat(await self._read(request, bodies.ChatBody))
        return await self._generate(request, asked, ChatShape)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        asked = asked_by_completion(await self._read(request, bodies.CompletionBody))
        return await self._generate(request, asked, CompletionShape)

    async def _generate(self, request: Request, asked: Asked, kind: type[Shape]) -> Response:
        caller: Caller = request.state.caller
        presence = Presence(request.receive, self.ending)
        traceparent = trace_context(request.headers.get("traceparent"))
        ready = await presence.during(resolve(self._router, asked, traceparent, caller))
        shape = kind(asked, self._tokenizer, self._router.model_name, self._fingerprint)
        pieces = generate(self._router, ready, traceparent, caller)
        num_choices = sum(entry.resolved.n for entry in ready)
        headers = _ignored(asked.ignored)
        if not asked.stream:
            async with aclosing(pieces):
                completions = await presence.during(gather(pieces, num_choices))
            return JsonResponse(shape.answer(completions[0].request_id, completions), headers=headers)
        # What is refused by a replica, or fails before anything is said, has a status of its own.
        first = await presence.during(anext(pieces))
        return EventStream(_events(shape, first, pieces), presence, headers, self._settings.stuck_seconds)

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._read(request, bodies.TokenizeBody)
        self._router.check_model(body.model)
        try:
            token_ids = await asyncio.to_thread(self._encode, body)
        except SpecdecodeError as error:
            raise in_clients_words(error, {}) from None
        told: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._router.max_length,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            told["token_strs"] = [
                self._tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids
            ]
        return JsonResponse(told)

    def _encode(self, body: bodies.TokenizeBody) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgumentError.of("prompt", "or messages: one of them is needed")
        if body.prompt is not None:
            return self._tokenizer.encode_text(body.prompt, body.add_special_tokens)
        return self._tokenizer.encode_chat(chat_prompt(body.messages or (), body.tools or ()))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = await self._read(request, bodies.DetokenizeBody)
        self._router.check_model(body.model)
        size = self._tokenizer.vocab_size
        for index, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                description = f"{token_id} is outside the vocabulary, 0 to {size - 1}"
                raise InvalidArgumentError.of(f"tokens[{index}]", description)
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JsonResponse({"prompt": text})

    # The service

    async def models(self) -> Response:
        """`GET /v1/models`."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """`GET /v1/models/NAME`."""
        self._router.check_model(name)
        return JsonResponse(self._model())

    async def embeddings(self) -> Response:
        """`POST /v1/embeddings`."""
        raise NotFoundError("embeddings are not served: this model continues texts")

    async def health(self) -> Response:
        """`GET /health`: 200 while a target can be used."""
        usable = any(target.connected for target in self._router.status().targets)
        return JsonResponse({"status": "ok" if usable else "no target can be used"}, 200 if usable else 503)

    async def state(self) -> Response:
        """`GET /specdecode/state`."""
        return JsonResponse(state_of(self._router))

    async def plan(self) -> Response:
        """`GET /specdecode/plan`."""
        router = self._router
        told = await asyncio.to_thread(plan_of, router.step_costs, dict(router.draft_costs), router.figures())
        return JsonResponse(told)

    async def index(self) -> Response:
        """`GET /`."""
        return await self.page("index.html")

    async def page(self, name: str) -> Response:
        """`GET /page/NAME`."""
        if name not in self._files:
            raise HTTPException(404, "Not Found")
        return page_response(*self._files[name])

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: what a router with `metrics_port` tells there, too."""
        families = self._router.families()
        text, content_type = await asyncio.to_thread(render, families, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def version(self) -> Response:
        """`GET /version`."""
        return JsonResponse({"version": __version__})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._router.model_name,
            "object": "model",
            "created": self._began,
            "owned_by": "specdecode",
            "max_model_len": self._router.max_length,
        }

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        return await read(request, kind, self._settings.max_message_bytes)


def _ignored(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields; what no header can hold is not repeated in one."""
    safe = [name if _FIELD.fullmatch(name) else "(another name)" for name in names[:_MAX_IGNORED]]
    return {IGNORED_HEADER: ", ".join(safe)} if safe else {}


async def _events(
    shape: Shape, first: Said, pieces: AsyncGenerator[Said, None]
) -> AsyncGenerator[bytes, None]:
    """Events of a stream whose first piece has come."""
    ended: list[Completion] = []
    said: Said | None = first
    async with aclosing(pieces):
        while said is not None:
            index, piece = said
            yield b"".join(map(event, shape.chunks(index, piece)))
            if piece.usage is not None:
                ended.append(Completion(index, usage=piece.usage, report=piece.report))
            said = await anext(pieces, None)
    if last := b"".join(map(event, shape.last_chunks(first[1].request_id, ended))):
        yield last
