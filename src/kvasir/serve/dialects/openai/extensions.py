"""Fields that other servers take on OpenAI's routes, under their names and with their meaning, and what they are here.

thinking          enable_thinking (Qwen), thinking (DeepSeek, GLM, Kimi), reasoning (OpenRouter)
reasoning text    include_reasoning (vLLM, OpenRouter), separate_reasoning (SGLang)
structure         guided_... (vLLM), regex, ebnf, json_schema (SGLang), grammar, json_schema (llama.cpp)
sampling          repeat_penalty (llama.cpp)
prompt            truncate_prompt_tokens, chat_template (vLLM), verbosity (OpenAI)
cache             cache_prompt (llama.cpp)
stream            return_progress, timings_per_token (llama.cpp)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvasir.engine.front import Front
from kvasir.engine.reading import SWITCHES
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.thinking import effort_variables
from kvasir.serve.http.wire import Wire, refuse_fields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ThinkingSwitch(Wire):
    """DeepSeek's, GLM's and Kimi's."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Tokens | None = None


class ReasoningSettings(Wire):
    """OpenRouter's. exclude: leave the reasoning out of the response."""

    REFUSED: ClassVar = {"summary": (("auto",), "there are no summaries")}

    effort: Effort | None = None
    max_tokens: Tokens | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: Any = None


class PromptExtensions(Wire):
    """Of completions and chats."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    cache_prompt: bool | None = None
    repeat_penalty: float | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


class ChatExtensions(Wire):
    """Of chats."""

    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: ReasoningSettings | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None


def truncated(ids: tuple[int, ...], wire: PromptExtensions, context: int) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` ids of a prompt; -1: as many as the context has. vLLM's meaning."""
    most = wire.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        raise InvalidRequest("truncate_prompt_tokens is 0", "give at least 1, or -1", param="truncate_prompt_tokens")
    return ids[-(context - 1 if most < 0 else most) :]


def penalty(wire: PromptExtensions, asked: dict[str, Any]) -> None:
    """Adds llama.cpp's name of the repetition penalty to the asked sampling parameters. Raises InvalidRequest."""
    if wire.repeat_penalty is None:
        return
    if "repetition_penalty" in asked:
        raise InvalidRequest("repeat_penalty and repetition_penalty are the same", "send one", param="repeat_penalty")
    asked["repetition_penalty"] = wire.repeat_penalty


# -- thinking ----------------------------------------------------------------------------------------------


def thinking_fields(wire: ChatExtensions, effort: str | None) -> tuple[str | None, bool | None, int | None]:
    """(level, switch, budget in tokens) of a chat, None where it sets none. effort: its `reasoning_effort`. Raises
    InvalidRequest for two fields that say different things."""
    levels = {"reasoning_effort": effort}
    switches: dict[str, bool | None] = {"enable_thinking": wire.enable_thinking}
    budgets: dict[str, int | None] = {}
    if isinstance(wire.thinking, ThinkingSwitch):
        kind = wire.thinking.type
        switches["thinking"] = None if kind in ("auto", "adaptive") else kind == "enabled"
        budgets["thinking"] = wire.thinking.budget_tokens
    else:
        switches["thinking"] = wire.thinking
    if wire.reasoning is not None:
        refuse_fields(wire.reasoning, "reasoning")
        levels["reasoning"] = wire.reasoning.effort
        switches["reasoning"] = wire.reasoning.enabled
        budgets["reasoning"] = wire.reasoning.max_tokens
    return _only(levels), _only(switches), _only(budgets)


def _only(given: Mapping[str, Any]) -> Any:
    """The value of the fields that have one. Raises InvalidRequest if they differ."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(set(found.values())) > 1:
        names = " and ".join(found)
        raise InvalidRequest(f"{names} say different things", "send one of them", param=next(iter(found)))
    return next(iter(found.values()), None)


def template_variables(
    wire: ChatExtensions, level: str | None, switch: bool | None, front: Front, tools: object
) -> dict[str, Any]:
    """The variables of the chat template that the fields of a chat set. Raises InvalidRequest."""
    variables = effort_variables(level, front, tools)
    if switch is not None and level is None:
        variables[front.reader.switch(tools) or SWITCHES[0]] = switch
    if wire.verbosity is not None:
        variables["verbosity"] = wire.verbosity
    return variables


def thinking_budget(switch: bool | None, budget: int | None, front: Front, tools: object) -> int | None:
    """The budget of a chat whose fields set one; where thinking is off and the template has no switch, it ends at
    once."""
    ends = switch is False and front.reader.switch(tools) is None and front.reader.format(tools).thinking is not None
    return 0 if ends else budget
