"""The request bodies of Ollama's API: generating and embedding.

Specification: https://docs.ollama.com/api, https://github.com/ollama/ollama/blob/main/api/types.go
Every field of it is declared: implemented, accepted without effect where it has no meaning for this server (IGNORED),
or refused by name (REFUSED). Extensions: `n`, `tool_choice`, `parallel_tool_calls`, the fields of Drafting, and in
`options` all samplers of this engine.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.serve.conversation.chat_format import NamedChoice
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.conversation.scheduling import Scheduling
from kvasir.serve.conversation.trust import Trust
from kvasir.serve.http.wire import MAX_MESSAGES, MAX_TOOLS, Name, Refused, TextOrList, Wire

MAX_CONTEXT = 1 << 22  # ids
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_LOAD = "it is decided when the server starts"
_TEXT = "this model reads and writes text"


def to_seconds(value: Any) -> Any:
    """A number of seconds, or a duration in Go's notation ("5m", "1h30m", "-1m")."""
    if isinstance(value, str):
        body = value.strip()
        sign, body = (-1.0, body[1:]) if body[:1] == "-" else (1.0, body.removeprefix("+"))
        if len(body) <= 64 and (body == "0" or (body and not _DURATION.sub("", body))):
            return sign * sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(body))
    elif type(value) in (int, float) and abs(value) < 1e15:
        return float(value)
    raise PydanticCustomError("duration", 'expected seconds, or a duration like "5m", "1h30m" or "-1s"')


def to_whole(value: Any) -> Any:
    """An integral float as an int: clients also send whole numbers as 4096.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def check_format(value: Any) -> Any:
    if value is None or value in ("", "json") or isinstance(value, dict):
        return value
    raise PydanticCustomError("format", 'expected "json" or a JSON schema')


Whole = Annotated[int, BeforeValidator(to_whole)]
KeepAlive = Annotated[float, BeforeValidator(to_seconds), WithJsonSchema({"type": ["number", "string"]})]
Format = Annotated[
    Any, BeforeValidator(check_format), WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]})
]
Images = Annotated[list[Any], Field(max_length=1024)]


class Options(wire_of("ollama", integer=Whole)):
    """Options of a model; the Modelfile's parameters have the same names."""

    REFUSED: ClassVar[Refused] = {
        "tfs_z": ((1.0,), "use min_p"),
        "penalize_newline": ((True,), "newlines are penalized like other tokens"),
        "vocab_only": ((False,), _LOAD),
    }
    IGNORED: ClassVar = (
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "use_mmap", "use_mlock"),
        *("embedding_only", "num_thread"),
    )

    num_ctx: Whole | None = None
    num_keep: Whole | None = None
    num_predict: Whole | None = None
    draft_num_predict: Whole | None = None

    tfs_z: float | None = None
    penalize_newline: bool | None = None
    vocab_only: bool | None = None

    numa: bool | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: Whole | None = None


class Asking(Drafting, Trust):
    """The fields shared by /api/generate and /api/chat.

    truncate: shortens a prompt that does not fit the context and reports by how much; without it such a prompt is an
    error.
    """

    REFUSED: ClassVar[Refused] = {"shift": ((False,), "generation stops where the context ends")}

    model: Annotated[Name, Field(min_length=1)]
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    debug_render_only: Annotated[bool | None, Field(alias="_debug_render_only")] = None
    n: int | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False


class GenerateRequest(Asking):
    """POST /api/generate"""

    REFUSED: ClassVar[Refused] = {
        **Asking.REFUSED,
        "images": (([],), _TEXT),
        **dict.fromkeys(("width", "height", "steps"), ((0,), _TEXT)),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT)] | None = None
    raw: bool | None = None
    images: Images | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class CalledFunction(Wire):
    IGNORED: ClassVar = ("index", "description")

    name: Name
    arguments: dict[str, Any] | None = None
    index: int | None = None
    description: str | None = None


class ToolCall(Wire):
    id: Name | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class OllamaMessage(Wire):
    REFUSED: ClassVar[Refused] = {"images": (([],), _TEXT)}

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(to_lower)]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


class ToolFunction(Wire):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    IGNORED: ClassVar = ("items",)

    type: Literal["function"] | None = None
    function: ToolFunction
    items: Any = None


class ChatRequest(Asking):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class EmbedRequest(Scheduling):
    """POST /api/embed. truncate: as in Asking."""

    model: Annotated[Name, Field(min_length=1)]
    input: TextOrList
    truncate: bool | None = None
    dimensions: Whole | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(Scheduling):
    """POST /api/embeddings, the older route."""

    model: Annotated[Name, Field(min_length=1)]
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
