"""How an error looks in each dialect. Each function asserts the shape of a body and reads its message and its param,
the latter None where the format has no place for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from kvasir.serve.dialects import DIALECTS
from kvasir.serve.http.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Said:
    message: str
    param: str | None = None

    def names(self, field: str) -> bool:
        """Whether the error is about this field, given as a dotted path."""
        return field in self.message if self.param is None else self.param.startswith(field)


Shape = Callable[[Any, int], Said]


def openai(body: Any, status: int) -> Said:
    error = body["error"]
    assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    return Said(error["message"], error["param"])


def anthropic(body: Any, status: int) -> Said:
    assert body["type"] == "error" and body["error"]["type"] and body["error"]["message"] and body["request_id"]
    return Said(body["error"]["message"])


def ollama(body: Any, status: int) -> Said:
    assert body["error"] and set(body) == {"error"}
    return Said(body["error"])


def llamacpp(body: Any, status: int) -> Said:
    error = body["error"]
    assert error["code"] == status and error["type"] and error["message"]
    return Said(error["message"], error.get("param"))


def tgi(body: Any, status: int) -> Said:
    assert body["error"] and body["error_type"] and set(body) == {"error", "error_type"}
    return Said(body["error"])


def sglang(body: Any, status: int) -> Said:
    error = body["error"]
    assert set(body) == {"error"} and error["message"] and error["code"]
    return Said(error["message"], error["param"])


SHAPES: dict[str, Shape] = {
    **{"openai": openai, "anthropic": anthropic, "ollama": ollama, "llama.cpp": llamacpp, "tgi": tgi},
    "sglang": sglang,
}
assert {dialect.name for dialect in DIALECTS} == SHAPES.keys(), "each dialect needs its function here"


def speaks(path: str) -> Dialect:
    """The dialect of POST requests to a path."""
    scope = {"type": "http", "path": path, "method": "POST", "headers": []}
    return next(dialect for dialect in DIALECTS if dialect.speaks(scope))


def error_of(path: str, response: httpx.Response, status: int) -> Said:
    """Asserts that the response is an error of this status, which the dialect of the path may replace by its own."""
    dialect = speaks(path)
    expected = dialect.statuses.get(status, status)
    assert response.status_code == expected, f"{path}: {response.status_code} instead of {expected}: {response.text}"
    assert "Traceback" not in response.text and ".py" not in response.text
    return SHAPES[dialect.name](response.json(), expected)
