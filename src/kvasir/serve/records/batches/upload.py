"""The body of an upload: multipart/form-data (RFC 7578), read within bounds and parsed."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.http.asgi import ClientGone

MAX_PARTS = 16
MAX_HEAD = 8192  # bytes of a part's headers
MAX_FIELD = 1024  # bytes of a field that is not a file
FORM = 64 << 10  # bytes of a form besides its file
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")


@dataclass(frozen=True, slots=True)
class Upload:
    """fields: the form's other fields, by name."""

    filename: str
    data: bytes
    fields: dict[str, str]


async def read_upload(request: HTTPRequest, max_bytes: int, patience: float) -> Upload:
    """max_bytes: of the file. patience: maximum seconds for the body. Raises InvalidRequest, ClientGone,
    HTTPException."""
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(patience):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes + FORM:
                    raise HTTPException(413, f"the file is larger than {max_bytes} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {patience:g} seconds") from None
    upload = await asyncio.to_thread(parse_form, request.headers.get("content-type", ""), bytes(body))
    if len(upload.data) > max_bytes:
        raise HTTPException(413, f"the file is larger than {max_bytes} bytes")
    return upload


def parse_form(content_type: str, body: bytes) -> Upload:
    """Parses a form. Raises InvalidRequest."""
    head = Message()
    head["content-type"] = content_type.encode("ascii", "replace").decode()
    try:
        boundary = head.get_boundary()
    except (LookupError, TypeError, ValueError):
        boundary = None
    if head.get_content_type() != "multipart/form-data" or not boundary or not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("the body is not a form", "send multipart/form-data with a file", param="file")
    mark = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidRequest(f"the form is incomplete, or has more than {MAX_PARTS} parts", param="file")
    file: tuple[str, bytes] | None = None
    fields: dict[str, str] = {}
    for piece in pieces[1:-1]:
        name, filename, data = _part(piece)
        if name in fields or (name == "file" and file is not None):
            raise InvalidRequest("the form has it twice", "send it once", param=name)
        if name == "file":
            file = (filename or "file", data)
        else:
            fields[name] = _text(name, data)
    if file is None:
        raise InvalidRequest("the form has no file", "give one", param="file")
    return Upload(*file, fields)


def _part(piece: bytes) -> tuple[str, str | None, bytes]:
    """(name, file name, content)"""
    end = piece.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        raise InvalidRequest("a part of the form has no headers", param="file")
    try:
        head = HeaderParser().parsestr(piece[:end].strip().decode())
        name, filename = head.get_param("name", header="content-disposition"), head.get_filename()
        (filename or "").encode()  # raises for lone surrogates
    except (LookupError, TypeError, ValueError):  # all that the parser raises for malformed parameters
        raise InvalidRequest("the headers of a part of the form are malformed", param="file") from None
    if not isinstance(name, str) or head.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit"):
        raise InvalidRequest("a part of the form has no name, or has a transfer encoding", param="file")
    return name, filename, piece[end + 4 :]


def _text(name: str, data: bytes) -> str:
    try:
        if len(data) > MAX_FIELD:
            raise ValueError
        return data.decode()
    except ValueError:
        raise InvalidRequest("expected a short text", param=name[:80]) from None
