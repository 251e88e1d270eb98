"""The page's files, which lie in the package: nothing of it comes from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type of each file, by its name."""
    folder = files("router.http") / "page"
    return {
        entry.name: (entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]]) for entry in folder.iterdir()
    }


def page_response(content: bytes, media_type: str) -> Response:
    """A file, as it is sent."""
    return Response(content, headers={**_HEADERS, "content-type": media_type})
