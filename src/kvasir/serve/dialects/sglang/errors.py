"""Errors in the format of SGLang."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from kvasir.serve.http.faults import Fault
from kvasir.serve.http.shared_path import SGLANG


def speaks_sglang(scope: Scope) -> bool:
    return scope["path"] == SGLANG


def sglang_error(fault: Fault, request_id: str | None = None) -> bytes:
    error = {"message": fault.message, "code": fault.code, "param": fault.param}
    return msgspec.json.encode({"error": error})
