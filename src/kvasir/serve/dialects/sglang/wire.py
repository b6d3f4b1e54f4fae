"""The request body of SGLang's /generate. Extensions: `model`, and the fields of Drafting."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvasir.fields import MAX_LOGPROBS, MAX_N
from kvasir.serve.conversation.drafting import Drafting
from kvasir.serve.conversation.sampling import wire_of
from kvasir.serve.http.wire import LEAVE_OUT, Name, Refused, TextOrList

TEXT_ONLY = "this server reads text"


def check_ids(value: Any) -> Any:
    """Token ids, or a list of lists of them."""
    if isinstance(value, list) and value:
        lists = value if all(isinstance(each, list) for each in value) else [value]
        if all(each and all(type(i) is int for i in each) for each in lists):
            return value
    raise PydanticCustomError("ids", "expected a list of token ids, or a list of such lists")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Ids = Annotated[
    Any,
    BeforeValidator(check_ids),
    WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]}),
]
Start = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class SamplingSettings(wire_of("sglang")):
    """max_new_tokens: 128 by default. no_stop_trim: the text keeps the stop string. json_schema, regex, ebnf: the
    structure of the text, at most one of them."""

    REFUSED: ClassVar[Refused] = {
        "structural_tag": ((), "use response_format of /v1/chat/completions"),
        "custom_params": ((), LEAVE_OUT),
        "spaces_between_special_tokens": ((True,), LEAVE_OUT),
    }
    IGNORED: ClassVar = ("stream_interval",)

    max_new_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    structural_tag: Any = None
    custom_params: Any = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None


class SglangRequest(Drafting):
    """POST /sglang/generate, and /generate with `text` or `input_ids`

    Lists of texts or of lists of ids are a batch; sampling_params, rid, lora_path and the fields of log-probabilities
    may then be lists, with one value for each prompt.
    """

    REFUSED: ClassVar[Refused] = {
        "input_embeds": ((), "send text or input_ids"),
        **{name: (([],), TEXT_ONLY) for name in ("image_data", "video_data", "audio_data")},
        "modalities": (([],), TEXT_ONLY),
        "token_ids_logprob": (([],), "use top_logprobs_num"),
        "return_hidden_states": ((False,), LEAVE_OUT),
        "return_routed_experts": ((False,), LEAVE_OUT),
        "return_entropy": ((False,), LEAVE_OUT),
        "session_params": (({},), "send the whole prompt: its beginning is cached"),
        "custom_logit_processor": ((), LEAVE_OUT),
        "background": ((False,), "use /v1/responses"),
        **{name: ((), LEAVE_OUT) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")},
        **{name: ((), "the fleet chooses the replica") for name in ("routed_dp_rank", "data_parallel_rank")},
        "extra_key": ((), "use cache_salt"),
    }
    IGNORED: ClassVar = ("log_metrics", "no_logs", "custom_labels", "conversation_id", "routing_key", "session_id")

    model: Name | None = None
    text: TextOrList | None = None
    input_ids: Ids | None = None
    sampling_params: SamplingSettings | Annotated[list[SamplingSettings], Field(max_length=1024)] | None = None
    rid: Name | Annotated[list[Name], Field(max_length=1024)] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Count | list[Count] | None = None
    return_text_in_logprobs: bool = False
    lora_path: Name | Annotated[list[Name | None], Field(max_length=1024)] | None = None

    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_entropy: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    background: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    extra_key: Any = None
    log_metrics: Any = None
    no_logs: Any = None
    custom_labels: Any = None
    conversation_id: Any = None
    routing_key: Any = None
    session_id: Any = None
