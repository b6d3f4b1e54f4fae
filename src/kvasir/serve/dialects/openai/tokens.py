"""POST /tokenize and /detokenize: the tokens of a text or a conversation. Formats of vLLM, and of llama.cpp for
requests with `content`. GET /tokenizer_info: the tokenizer itself, as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.front import Front
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.chat_format import ChatMessage, ChatTool, to_messages, to_tools
from kvasir.serve.conversation.messages import Conversation
from kvasir.serve.conversation.request import prompt_ids
from kvasir.serve.conversation.trust import Trust, trust_of
from kvasir.serve.hosting.catalogue import loaded_of, serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import MAX_MESSAGES, MAX_TOOLS, Name, TemplateKwargs, Wire

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(Trust):
    """Exactly one of `prompt`, `messages` and `content`; the last is llama.cpp's, with add_special, parse_special and
    with_pieces."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Wire):
    model: Name | None = None
    tokens: Annotated[list[int], Field(max_length=1 << 22)]


@router.post("/tokenize", tags=["tokens"])
async def tokenize(wire: TokenizeRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    given = [name for name in ("prompt", "messages", "content") if getattr(wire, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("expected one of prompt, messages and content", param="prompt")
    if wire.content is not None:
        pieces = await _pieces(wire, wire.content, serving)
        return await asyncio.to_thread(json_response, {"tokens": pieces})
    if wire.messages is not None:
        ids = await prompt_ids(_conversation(wire, serving), serving, trust_of(wire, serving, request), "count")
    else:
        special = wire.add_special_tokens is not False
        ids = await serving.front.encode(wire.prompt or "", add_special_tokens=special, bound="count")
    response = {"count": len(ids), "max_model_len": serving.front.info.max_model_len, "tokens": ids}
    tokenizer = serving.front.tokenizer
    if wire.return_token_strs:
        response["token_strs"] = await asyncio.to_thread(_all, tokenizer.token_text, ids) if tokenizer else []
    return await asyncio.to_thread(json_response, response)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(wire: DetokenizeRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    text = await serving.front.decode(wire.tokens) if wire.tokens else ""
    return await asyncio.to_thread(json_response, {"prompt": text, "content": text})


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(request: HTTPRequest, model: str | None = None) -> Response:
    """What a tokenizer_config.json says of the tokenizer of the model in ?model=, by default of the first loaded model,
    with its chat templates."""
    serving = await loaded_of(request, model)
    return await asyncio.to_thread(lambda: json_response(_info(serving.front)))


def _info(front: Front) -> dict[str, Any]:
    """Raises InvalidRequest for a model without a tokenizer."""
    if (tokenizer := front.tokenizer) is None:
        raise InvalidRequest("this model has no tokenizer", "send token ids")
    added = {id: tokenizer.id_to_token(id) for id in sorted(tokenizer.special_ids)}
    sources = front.template.sources if front.template else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # of transformers: whatever a tokenizer.json describes
        **tokenizer.special_tokens,
        "model_max_length": front.info.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "added_tokens_decoder": {id: {"content": text, "special": True} for id, text in added.items()},
        "chat_template": sources["default"] if [*sources] == ["default"] else sources or None,
    }


def _conversation(wire: TokenizeRequest, serving: Serving) -> Conversation:
    tools = to_tools(wire.tools)
    return Conversation(
        serving.conversation(to_messages(wire.messages or (), serving.front, tools)),
        tools,
        wire.chat_template_kwargs or {},
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final_message=bool(wire.continue_final_message),
        add_special_tokens=bool(wire.add_special_tokens),
    )


async def _pieces(wire: TokenizeRequest, content: str, serving: Serving) -> Sequence[Any]:
    """Ids, or ids with their texts; a token that is not valid UTF-8 on its own gets its bytes."""
    front, special = serving.front, bool(wire.add_special)
    if not content and not special:
        return ()
    ids = await front.encode(
        content,
        add_special_tokens=special,
        parse_special=wire.parse_special is not False,
        param="content",
        bound="count",
    )
    if not wire.with_pieces or front.tokenizer is None:
        return ids
    token_bytes = front.tokenizer.token_bytes
    return await asyncio.to_thread(_all, lambda i: {"id": i, "piece": _piece(token_bytes(i))}, ids)


def _all(convert: Callable[[int], Any], ids: Sequence[int]) -> list[Any]:
    return [convert(i) for i in ids]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
