"""Rows of the table of formats: calls whose arguments are in JSON or Python.

Sources: the models' own chat templates and model cards, and for harmony OpenAI's description of the format
(github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

from kvasir.parse.format import Calls, Style, Texts

_OBJECT = '{"name": "{name}", "arguments": '

JSON_CALLS = (
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
        "phi4",  # Phi-4-mini: with its marks, or the word that its model card documents
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
        ends=("</tool_call>", "<|tool_call_end|>"),
        signs=(("<|tool_call|>", "available_tools"),),
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
        "apertus",
        Style.KEYED,
        Texts('{"{name}": ', "}", open="<|tools_prefix|>[", separator=", ", close="]<|tools_suffix|>"),
        begins=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        signs=(("<|tools_prefix|>",),),
    ),
    Calls(
        "tool_calls",  # Apriel, Jamba
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<tool_calls>[", separator=", ", close="]</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        signs=(("<tool_calls>[",),),
    ),
    Calls(
        "step3_vl",
        Style.OBJECTS,
        Texts("<tool_call>\n" + _OBJECT, "}\n</tool_call>", "<tool_calls>\n", "\n", "\n</tool_calls>"),
        begins=("<tool_calls>", "<tool_call>"),
        ends=("</tool_call>", "</tool_calls>"),
        signs=(("<tool_calls>\\n<tool_call>\\n{",),),
    ),
    Calls(
        "minimax_m1",
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<tool_calls>\n", separator="\n", close="\n</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        signs=(("<tool_calls>\n{",), ("<tool_calls>\\n{",)),
    ),
    Calls(
        "gigachat3",
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<|message_sep|>\n\nfunction call<|role_sep|>\n"),
        begins=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        signs=(("function call", "<|role_sep|>"),),
    ),
    Calls(
        "gigachat31",
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="<|function_call|>"),
        begins=("<|function_call|>",),
        signs=(("<|function_call|>",),),
    ),
    Calls(
        "hunyuan",  # Hunyuan before Hy3
        Style.NAMED,
        Texts(
            "<tool_call>{name}\n```json\n",
            "\n```</tool_call>",
            open="<tool_calls>",
            close="</tool_calls>",
        ),
        begins=("<tool_calls>", "<tool_call>"),
        ends=("</tool_call>", "</tool_calls>"),
        head=r"(?:<tool_calls>\s*)?<tool_call>\s*(?:function<tool_sep>)?(?P<name>[^\s<>{}]+)\s*```(?:json)?",
        fence=("```",),
        signs=(("<tool_calls>", "```json"),),
    ),
    Calls(
        "solar_open",
        Style.NAMED,
        Texts(
            "<|tool_call:begin|>call{index}<|tool_call:name|>{name}<|tool_call:args|>",
            "<|tool_call:end|>",
            open="<|tool_calls|>",
            close="<|calls|>",
        ),
        begins=("<|tool_calls|>", "<|tool_call:begin|>"),
        ends=("<|tool_call:end|>", "<|calls|>"),
        head=r"(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]+)"
        r"<\|tool_call:args\|>",
        turns=("<|calls|>",),
        signs=(("<|tool_call:begin|>",),),
    ),
    Calls(
        "step_audio",
        Style.NAMED,
        Texts("<|CALL_START|>function\n{name}\n", "<|CALL_END|>"),
        begins=("<|CALL_START|>",),
        ends=("<|CALL_END|>",),
        head=r"<\|CALL_START\|>\s*function\s+(?P<name>\S+)",
        signs=(("<|CALL_START|>",),),
    ),
    Calls(
        "intern_s1",
        Style.OBJECTS,
        Texts('<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ', "}\n<|action_end|>", separator="\n"),
        begins=("<|action_start|>",),
        ends=("<|action_end|>",),
        fence=("<|plugin|>",),
        signs=(("<|action_start|>", "<|plugin|>"),),
    ),
    Calls(
        "longcat_flash",
        Style.OBJECTS,
        Texts("<longcat_tool_call>\n" + _OBJECT, "}\n</longcat_tool_call>", separator="\n"),
        begins=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        signs=(("<longcat_tool_call>",),),
    ),
    Calls(
        "hyperclovax",
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="-> tool/function_call\n[", separator=", ", close="]"),
        begins=("-> tool/function_call",),
        signs=((" -> tool/function_call",),),
    ),
    Calls(
        "minicpm3",
        Style.PYTHON,
        Texts("{name}(", ")", "<|tool_call_start|>\n```python\n", "\n", "\n```\n<|tool_call_end|>"),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        fence=("```python", "```"),
        signs=(("<|tool_call_start|>", "```python"),),
    ),
    Calls(
        "pythonic",  # Llama 4; Llama 3.2 if prompted for it
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
        "llama4",
        Style.OBJECTS,
        Texts('{"name": "{name}", "parameters": ', "}"),
        begins=("<|python_start|>",),
        ends=("<|eom|>",),
        fence=("<|python_end|>",),
        bare=True,
        signs=(("<|python_start|>", '{"name": function name, "parameters":'),),
    ),
    Calls(
        "hermes",  # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, many others
        Style.OBJECTS,
        Texts("<tool_call>\n" + _OBJECT, "}\n</tool_call>", separator="\n"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        signs=(("<tool_call>",),),
    ),
    Calls(
        "xlam",  # xLAM 2, DeepHat: a list of calls is the whole answer
        Style.OBJECTS,
        Texts(_OBJECT, "}", open="[", separator=", ", close="]"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=True,
    ),
)
