"""The known formats. Each family of models is a row of `rows_json`, `rows_marked`, or THINKING here."""

from __future__ import annotations

from kvasir.errors import ConfigError
from kvasir.parse.format import CallFormat, Format, Style, ThinkingFormat
from kvasir.parse.rows_json import JSON_CALLS
from kvasir.parse.rows_marked import MARKED_CALLS

NO_CALLS = CallFormat("none", Style.NONE)

# In the order of detection: a row comes after others whose templates may contain its signs too.
CALLS = (*MARKED_CALLS, *JSON_CALLS, NO_CALLS)

THINKING = (
    ThinkingFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
        signs=(("<|channel|>analysis<|message|>",),),
    ),
    ThinkingFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        signs=(("<|open|>", "<|sep|>", "think"),),
    ),
    ThinkingFormat(
        "muse",
        "to=self<|message|>",
        "<|eom|>",
        ("<|start|>assistant to=user<|message|>", ""),
        signs=(("<|start|>assistant to=self<|message|>",),),
    ),
    # MiniMax M2 puts results of tools into <response>, with which Granite marks the answer.
    ThinkingFormat("minimax_m2", "<think>", "</think>", signs=(("<minimax:tool_call>",),)),
    ThinkingFormat("minimax_m3", "<mm:think>", "</mm:think>", signs=(("<mm:think>",),)),
    ThinkingFormat("longcat", "<longcat_think>", "</longcat_think>", signs=(("<longcat_think>",),)),
    ThinkingFormat("hunyuan3", "<think:opensource>", "</think:opensource>", signs=(("<think:opensource>",),)),
    ThinkingFormat("solar_open2", "<|think:start|>", "<|think:end|>", signs=(("<|think:start|>",),)),
    ThinkingFormat("minicpm3", "<|thought_start|>", "<|thought_end|>", signs=(("<|thought_start|>",),)),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]", signs=(("[THINK]",),)),
    ThinkingFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        signs=(("<|START_THINKING|>",), ("<|START_RESPONSE|>",)),
    ),
    # A message of its own, which the prompt may leave to the model to begin.
    ThinkingFormat("hyperclovax", "/think", "<|im_end|>\n<|im_start|>assistant", signs=(("assistant/think",),)),
    ThinkingFormat("seed_oss", "<seed:think>", "</seed:think>", signs=(("<seed:think>",),)),
    ThinkingFormat("gemma", "<|channel>thought", "<channel|>", signs=(("<|channel>thought",),)),
    ThinkingFormat("granite", "<think>", "</think>", ("<response>", "</response>"), signs=(("<think>", "<response>"),)),
    ThinkingFormat("granite32", "Here is my thought process:", "Here is my response:", signs=(("thought process:",),)),
    ThinkingFormat("think", "<think>", "</think>", signs=(("<think>",), ("</think>",))),
)

TOOL_FORMATS = tuple(calls.name for calls in CALLS)
REASONING_FORMATS = (*(thinking.name for thinking in THINKING), "none")


def choose(tools: str = "auto", reasoning: str = "auto", found: Format = Format(NO_CALLS)) -> Format:
    """The format with these names; "auto" keeps that part of `found`. Raises ConfigError for an unknown name."""
    calls, thinking = found.calls, found.thinking
    if tools != "auto":
        calls = next((row for row in CALLS if row.name == tools), None) or _unknown("tool", tools, TOOL_FORMATS)
    if reasoning == "none":
        thinking = None
    elif reasoning != "auto":
        row = next((row for row in THINKING if row.name == reasoning), None)
        thinking = row or _unknown("reasoning", reasoning, REASONING_FORMATS)
    return Format(calls, thinking)


def _unknown(kind: str, name: str, names: tuple[str, ...]):
    raise ConfigError(f"unknown {kind} format {name!r}", f"expected auto, {', '.join(names)}")
