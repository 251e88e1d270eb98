"""Which path is answered by what, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.http import bodies
from router.http.errors import RefusedError, refusal_of, refused
from router.http.front import HttpFront
from router.http.responses import JsonResponse
from specdecode import __version__
from specdecode.errors import InternalError, SpecdecodeError

Handler = Callable[..., Awaitable[Response]]

_REFERENCE = "#/components/schemas/{model}"
_OPEN = ("/health", "/version", "/page/{name}")
"""What needs no key: probes, and files that everybody has."""
_CODES = {404: "path_not_found", 405: "method_not_allowed"}
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": bodies.ChatBody,
    "/v1/completions": bodies.CompletionBody,
    "/tokenize": bodies.TokenizeBody,
    "/detokenize": bodies.DetokenizeBody,
}


def build_app(front: HttpFront) -> FastAPI:
    """The application; its own description is at /openapi.json."""
    app = FastAPI(
        title="specdecode",
        version=__version__,
        description="OpenAI's API, with lossless speculative decoding.",
        docs_url=None,  # its page would come from elsewhere
        redoc_url=None,
    )
    posts: dict[str, Handler] = {
        "/v1/chat/completions": front.chat,
        "/v1/completions": front.completions,
        "/v1/embeddings": front.embeddings,
        "/tokenize": front.tokenize,
        "/detokenize": front.detokenize,
    }
    gets: dict[str, Handler] = {
        "/v1/models": front.models,
        "/v1/models/{name:path}": front.model,
        "/health": front.health,
        "/metrics": front.metrics,
        "/version": front.version,
        "/specdecode/state": front.state,
        "/specdecode/plan": front.plan,
        "/page/{name}": front.page,
    }
    known = [Depends(front.identify)]
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=_described(path), dependencies=known)
    for path, handler in gets.items():
        app.add_api_route(path, handler, methods=["GET"], dependencies=[] if path in _OPEN else known)
    app.add_api_route("/", front.index, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(SpecdecodeError, _on_error)
    app.add_exception_handler(RefusedError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    _describe_bodies(app)
    return app


def _described(path: str) -> dict[str, Any] | None:
    """Bodies are read by `router.http.reading`, so FastAPI does not know them by itself."""
    if path not in _BODIES:
        return None
    schema = {"$ref": _REFERENCE.format(model=_BODIES[path].__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        _, definitions = models_json_schema(
            [(kind, "validation") for kind in _BODIES.values()], ref_template=_REFERENCE
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecdecodeError)
    return JsonResponse.refusing(refusal_of(error))


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JsonResponse.refusing(error.refusal)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    message = f"{path}: {error.detail}" if error.status_code in _CODES else str(error.detail)
    code = _CODES.get(error.status_code, "http_error")
    return JsonResponse.refusing(refused(error.status_code, message, code, headers=error.headers))


async def _on_failure(request: Request, error: Exception) -> Response:
    """The server logs it with its traceback."""
    return JsonResponse.refusing(
        refusal_of(InternalError("internal error; the router's log has the details"))
    )
