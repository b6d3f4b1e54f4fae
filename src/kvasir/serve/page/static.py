"""GET /, /docs and /page/...: the files of the page and of the API's, public and open without a key.

The page loads nothing from other sites and cannot turn model output into markup: its content security policy forbids
both. files/vendor has the libraries of others (scripts/vendor_page.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from kvasir.serve.page.settings import module

POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:"),
        "font-src 'self'",
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # cached but revalidated: a new version of the server shows its new page at once
}
_TYPES = {
    **{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"},
    **{".svg": "image/svg+xml; charset=utf-8", ".woff2": "font/woff2"},
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str


def _file(suffix: str, content: bytes) -> File:
    return File(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:20]}"')


def _files() -> dict[str, File]:
    folder = Path(__file__).parent / "files"
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in _TYPES]
    files = {f"/page/{p.relative_to(folder).as_posix()}": _file(p.suffix, p.read_bytes()) for p in found}
    pages = {"/": files.pop("/page/index.html"), "/docs": files.pop("/page/docs.html")}
    return {**pages, **files, "/page/fields.js": _file(".js", module())}


FILES = _files()  # by the path of the URL


async def _send(request: HTTPRequest) -> Response:
    file = FILES[request.url.path]
    headers = {**HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


async def _say(request: HTTPRequest) -> Response:
    return Response("Kvasir is running\n", media_type="text/plain; charset=utf-8")


routes = [Route(path, _send, include_in_schema=False) for path in FILES]
# Instead of the page. Ollama's clients look with HEAD / whether a server is there.
without_page = [Route("/", _say, include_in_schema=False)]
