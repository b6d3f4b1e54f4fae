"""vLLM's handshake between a server that computes prompts and one that continues them, as proxies in front of both
speak it (vLLM's NixlConnector):

    proxy -> prefill    max_tokens 1, kv_transfer_params {do_remote_decode: true}
    prefill -> proxy    kv_transfer_params {do_remote_prefill: true, remote_host, remote_port, remote_request_id, ...}
    proxy -> decode     the request itself, with these kv_transfer_params

The proxy passes the object on unread. Blocks have no numbers here that mean anything to another server, so
remote_block_ids only counts them. If a proxy knows the decode server beforehand, it may give its remote_host and
remote_port to the prefill server, which then sends blocks there while it computes the prompt.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from kvasir.errors import InvalidRequest
from kvasir.serve.http.wire import Name, Wire
from kvasir.types import ModelInfo, Request, Transfer

PARAM = "kv_transfer_params"
WAIT_SECONDS = 30.0  # for blocks of another server
HELD_SECONDS = 120.0  # for which blocks wait for a server to fetch them
Port = Annotated[int, Field(ge=0, le=65535)]


class TransferParams(Wire):
    """vLLM's kv_transfer_params. Its connectors add fields of their own, so unknown fields are ignored here."""

    IGNORED: ClassVar = ("remote_block_ids",)
    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_block_ids: Any = None
    remote_host: Name | None = None
    remote_port: Port | None = None


def transfer_fields(params: TransferParams | None, info: ModelInfo, stream: bool, prompts: int = 1) -> dict[str, Any]:
    """The fields of an engine request that say where the prompt's blocks go to or come from. Raises InvalidRequest."""
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return {}
    if not info.role:
        hint = "start it with --role, and --transfer-listen or --transfer-peer"
        raise InvalidRequest("this server exchanges no blocks with others", hint, PARAM)
    if params.do_remote_decode and params.do_remote_prefill:
        raise InvalidRequest("do_remote_decode and do_remote_prefill exclude each other", "set one of them", PARAM)
    if prompts > 1:
        raise InvalidRequest(f"{PARAM} with {prompts} prompts", "send each prompt by itself", PARAM)
    if params.do_remote_decode:
        if stream:
            raise InvalidRequest("do_remote_decode cannot be streamed", "leave out stream", PARAM)
        address = _address(params)
        if not address and not info.transfers_at:
            hint = "start it with --transfer-listen, or give remote_host and remote_port"
            raise InvalidRequest("other servers cannot connect to this one", hint, PARAM)
        return {"sends": Transfer(secrets.token_hex(16), address, HELD_SECONDS)}
    if params.remote_engine_id == info.engine_id:
        return {}  # its own prefix cache has them
    if not params.remote_request_id:
        raise InvalidRequest("do_remote_prefill needs remote_request_id", "pass on what the prefill server gave", PARAM)
    return {"takes": Transfer(params.remote_request_id, _address(params), WAIT_SECONDS)}


def _address(params: TransferParams) -> str:
    host = params.remote_host
    if not host:
        return ""
    if "/" in host:
        return host
    if params.remote_port is None:
        raise InvalidRequest("remote_host without remote_port", "give both", PARAM)
    return f"[{host}]:{params.remote_port}" if ":" in host else f"{host}:{params.remote_port}"


def transfer_object(core: Request, info: ModelInfo) -> dict[str, Any]:
    """The field of a response that another server needs to continue the request; {} if its blocks go nowhere."""
    if core.sends is None:
        return {}
    host, port = info.transfers_at, 0
    if "/" not in host:
        name, _, number = host.rpartition(":")
        host, port = name.removeprefix("[").removesuffix("]"), int(number or 0)
    pushed = bool(core.sends.address)
    return {
        PARAM: {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(len(core.prompt_ids) // info.block_size)),
            "remote_engine_id": info.engine_id,
            "remote_request_id": core.sends.id,
            "remote_host": None if pushed else host,
            "remote_port": None if pushed else port,
            "remote_num_tokens": len(core.prompt_ids),
            "tp_size": 1,
        }
    }
