"""The formats there are, and which of them a model's chat template is written for.

A family of models is a row. Sources: the models' own chat templates and model cards, and for harmony OpenAI's
description of the format (github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

from collections.abc import Collection

from kvasir.errors import ConfigError
from kvasir.parse.format import Calls, Format, Parameters, Style, Texts, Thinking
from kvasir.parse.marked_text import QUOTE


def _dsml(name: str, section: str) -> Calls:
    """DeepSeek from V3.2 on: parameters that say whether they are strings (encoding/encoding_dsv32.py of the model)."""
    open, close = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    return Calls(
        name,
        Style.PARAMETERS,
        Texts('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>", open + "\n", "\n", "\n" + close),
        begins=(open, "<｜DSML｜invoke "),
        ends=("</｜DSML｜invoke>", close),
        head=rf'(?:{open}\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
        parameters=Parameters(
            '<｜DSML｜parameter name="', '" string=', "", "</｜DSML｜parameter>", kinds=('"true">', '"false">')
        ),
        signs=(("｜DSML｜", f"{section}>"),),
    )


_OBJECT = '{"name": "{name}", "arguments": '

# In the order of detection: a row whose signs others may have as well comes behind them.
CALLS = (
    Calls(
        "harmony",  # gpt-oss
        Style.CHANNELS,
        Texts(
            " to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
            separator="<|start|>assistant<|channel|>commentary",
        ),
        begins=(" to=functions.",),
        also=("<|start|>", "<|end|>", "<|return|>", "<|channel|>"),
        turns=("<|start|>", "<|end|>", "<|return|>", "<|call|>"),
        signs=(("<|channel|>", "<|message|>", "<|start|>"),),
    ),
    Calls(
        "kimi_k2",
        Style.NAMED,
        Texts(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
        ),
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        head=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>.+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        signs=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
    ),
    Calls(
        "deepseek_v3",  # V3, R1: the kind of the tool, its name, a fenced block
        Style.NAMED,
        Texts(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            open="<｜tool▁calls▁begin｜>",
            separator="\n",
            close="<｜tool▁calls▁end｜>",
        ),
        begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        head=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*\w*\s*<｜tool▁sep｜>\s*(?P<name>.+?)\s*```(?:json)?",
        fence=("```",),
        signs=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    Calls(
        "deepseek_v31",  # V3.1: the name, the arguments
        Style.NAMED,
        Texts(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            open="<｜tool▁calls▁begin｜>",
            close="<｜tool▁calls▁end｜>",
        ),
        begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        head=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?P<name>.+?)\s*<｜tool▁sep｜>",
        signs=(("<｜tool▁call▁begin｜>",),),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    Calls(
        "minimax_m2",
        Style.PARAMETERS,
        Texts(
            '<invoke name="{name}">\n',
            "</invoke>",
            open="<minimax:tool_call>\n",
            separator="\n",
            close="\n</minimax:tool_call>",
        ),
        begins=("<minimax:tool_call>", "<invoke name="),
        ends=("</invoke>", "</minimax:tool_call>"),
        head=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
        parameters=Parameters('<parameter name="', '">', "", "</parameter>"),
        signs=(("<minimax:tool_call>",),),
    ),
    Calls(
        "seed_oss",
        Style.PARAMETERS,
        Texts("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>", separator="\n"),
        begins=("<seed:tool_call>", "<function="),
        ends=("</function>", "</seed:tool_call>"),
        head=r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>]+)>",
        parameters=Parameters("<parameter=", ">", "", "</parameter>"),
        signs=(("<seed:tool_call>",),),
    ),
    Calls(
        "qwen3_coder",  # Qwen3-Coder, Qwen3.5, Step 3.7, Nemotron 3
        Style.PARAMETERS,
        Texts("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", separator="\n"),
        begins=("<tool_call>", "<function="),
        ends=("</function>", "</tool_call>"),
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>]+)>",
        parameters=Parameters("<parameter=", ">", "", "</parameter>", lines=True),
        signs=(("<function=", "<parameter="),),
    ),
    Calls(
        "functionary",
        Style.NAMED,
        Texts("<function={name}>", "</function>"),
        begins=("<function=",),
        ends=("</function>",),
        head=r"<function=(?P<name>[^>]+)>",
        signs=(("<function=",), ("<{start_tag}=", "<function")),
    ),
    Calls(
        "glm45",  # GLM 4.5 to 4.7
        Style.PARAMETERS,
        Texts("<tool_call>{name}\n", "</tool_call>", separator="\n"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        head=r"<tool_call>\s*(?P<name>[^\s<>{}]+)",
        parameters=Parameters("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=(("<arg_key>",),),
    ),
    Calls(
        "mistral_args",  # tokenizers from v11 on
        Style.NAMED,
        Texts("[TOOL_CALLS]{name}[ARGS]"),
        begins=("[TOOL_CALLS]",),
        head=r"\[TOOL_CALLS\]\s*(?P<name>.+?)(?:\[CALL_ID\](?P<id>.+?))?\[ARGS\]",
        id_size=9,
        also=("[CALL_ID]",),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    Calls(
        "mistral",
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="[TOOL_CALLS][", separator=", ", close="]"),
        begins=("[TOOL_CALLS]",),
        id_size=9,
        signs=(("[TOOL_CALLS]",),),
    ),
    Calls(
        "command_a",  # Command R7B, Command A
        Style.OBJECTS,
        Texts(
            '    {"tool_call_id": "{index}", "tool_name": "{name}", "parameters": ',
            "}",
            open="<|START_ACTION|>[\n",
            separator=",\n",
            close="\n]<|END_ACTION|>",
        ),
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        signs=(("<|START_ACTION|>",),),
    ),
    Calls(
        "command_r",
        Style.OBJECTS,
        Texts(
            '    {\n        "tool_name": "{name}",\n        "parameters": ',
            "\n    }",
            open="Action:\n```json\n[\n",
            separator=",\n",
            close="\n]```",
        ),
        begins=("Action:",),
        fence=("```json", "```"),
        signs=(("Action:", "tool_name"),),
    ),
    Calls(
        "phi4",  # Phi-4-mini: with its marks, or the word that its model card teaches
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<|tool_call|>[", separator=", ", close="]<|/tool_call|>"),
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        signs=(("<|/tool|>",), ("functools",)),
    ),
    Calls(
        "granite",  # Granite 3
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<|tool_call|>[", separator=", ", close="]"),
        begins=("<|tool_call|>", "<tool_call>"),
        ends=("</tool_call>",),
        signs=(("<|tool_call|>", "available_tools"),),
    ),
    Calls(
        "gemma4",
        Style.MARKED,
        Texts("<|tool_call>call:{name}", "<tool_call|>"),
        begins=("<|tool_call>",),
        ends=("<tool_call|>",),
        head=r"<\|tool_call>\s*call:(?P<name>[^{]+)",
        also=(QUOTE,),
        signs=(("<|tool_call>call:",),),
    ),
    Calls(
        "nemotron",  # Nemotron Nano 2
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<TOOLCALL>[", separator=", ", close="]</TOOLCALL>"),
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        signs=(("<TOOLCALL>",),),
    ),
    Calls(
        "lfm2",
        Style.PYTHON,
        Texts("{name}(", ")", open="<|tool_call_start|>[", separator=", ", close="]<|tool_call_end|>"),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        signs=(("<|tool_list_start|>",),),
    ),
    Calls(
        "olmo3",
        Style.PYTHON,
        Texts("{name}(", ")", open="<function_calls>", separator="\n", close="</function_calls>"),
        begins=("<function_calls>",),
        ends=("</function_calls>",),
        signs=(("<function_calls>",),),
    ),
    Calls(
        "pythonic",  # Llama 4; Llama 3.2 with a prompt for it
        Style.PYTHON,
        Texts("{name}(", ")", open="[", separator=", ", close="]"),
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        bare=True,
        signs=(("func_name1(",), ("<|python_start|>",)),
    ),
    Calls(
        "llama3",
        Style.OBJECTS,
        Texts('{"name": "{name}", "parameters": ', "}", separator="; "),
        begins=("<|python_tag|>",),
        bare=True,
        signs=(('{"name": function name, "parameters":',), ("<|python_tag|>",)),
    ),
    Calls(
        "hermes",  # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, many others
        Style.OBJECTS,
        Texts("<tool_call>\n" + _OBJECT, "}\n</tool_call>", separator="\n"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        signs=(("<tool_call>",),),
    ),
    Calls("none", Style.NONE),
)

THINKING = (
    Thinking(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
        signs=(("<|channel|>analysis<|message|>",),),
    ),
    Thinking("mistral", "[THINK]", "[/THINK]", signs=(("[THINK]",),)),
    Thinking(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        signs=(("<|START_THINKING|>",), ("<|START_RESPONSE|>",)),
    ),
    Thinking("seed_oss", "<seed:think>", "</seed:think>", signs=(("<seed:think>",),)),
    Thinking("gemma", "<|channel>thought", "<channel|>", signs=(("<|channel>thought",),)),
    Thinking("granite", "<think>", "</think>", ("<response>", "</response>"), signs=(("<think>", "<response>"),)),
    Thinking("granite32", "Here is my thought process:", "Here is my response:", signs=(("thought process:",),)),
    Thinking("think", "<think>", "</think>", signs=(("<think>",), ("</think>",))),
)

TOOL_FORMATS = tuple(calls.name for calls in CALLS)
REASONING_FORMATS = (*(thinking.name for thinking in THINKING), "none")

_NO_CALLS = CALLS[-1]


def choose(
    template: str = "", special_tokens: Collection[str] = (), tools: str = "auto", reasoning: str = "auto"
) -> Format:
    """The format of a model: what `detect` finds, unless named. Raises ConfigError for an unknown name."""
    found = detect(template, special_tokens)
    calls, thinking = found.calls, found.thinking
    if tools != "auto":
        calls = next((row for row in CALLS if row.name == tools), None) or _unknown("tool", tools, TOOL_FORMATS)
    if reasoning == "none":
        thinking = None
    elif reasoning != "auto":
        named = next((row for row in THINKING if row.name == reasoning), None)
        thinking = named or _unknown("reasoning", reasoning, REASONING_FORMATS)
    return Format(calls, thinking)


def detect(template: str, special_tokens: Collection[str] = ()) -> Format:
    """The format that a chat template's source shows, and for reasoning the vocabulary's special tokens too."""
    seen = "\n".join((template, *special_tokens))
    calls = next((row for row in CALLS if _shows(row.signs, template)), _NO_CALLS)
    return Format(calls, next((row for row in THINKING if _shows(row.signs, seen)), None))


def _shows(signs: tuple[tuple[str, ...], ...], text: str) -> bool:
    return any(all(sign in text for sign in group) for group in signs)


def _unknown(kind: str, name: str, names: tuple[str, ...]):
    raise ConfigError(f"there is no {kind} format {name!r}", f"expected auto, {', '.join(names)}")
