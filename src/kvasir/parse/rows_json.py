"""Rows of the table of formats: calls whose arguments are in JSON or Python.

Sources: the models' own chat templates and model cards, and for harmony OpenAI's description of the format
(github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

from kvasir.parse.format import CallFormat, FormatTexts, Style

_OBJECT = '{"name": "{name}", "arguments": '

JSON_CALLS = (
    CallFormat(
        "harmony",  # gpt-oss
        Style.CHANNELS,
        FormatTexts(
            " to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
            separator="<|start|>assistant<|channel|>commentary",
        ),
        begins=(" to=functions.",),
        also=("<|start|>", "<|end|>", "<|return|>", "<|channel|>"),
        turns=("<|start|>", "<|end|>", "<|return|>", "<|call|>"),
        signs=(("<|channel|>", "<|message|>", "<|start|>"),),
    ),
    CallFormat(
        "kimi_k2",
        Style.NAMED,
        FormatTexts(
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
    CallFormat(
        "deepseek_v3",  # V3, R1: the kind of the tool, its name, a fenced block
        Style.NAMED,
        FormatTexts(
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
    CallFormat(
        "deepseek_v31",  # V3.1: the name, the arguments
        Style.NAMED,
        FormatTexts(
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
    CallFormat(
        "functionary",
        Style.NAMED,
        FormatTexts("<function={name}>", "</function>"),
        begins=("<function=",),
        ends=("</function>",),
        head=r"<function=(?P<name>[^>]+)>",
        signs=(("<function=",), ("<{start_tag}=", "<function")),
    ),
    CallFormat(
        "mistral_args",  # tokenizers from v11 on
        Style.NAMED,
        FormatTexts("[TOOL_CALLS]{name}[ARGS]"),
        begins=("[TOOL_CALLS]",),
        head=r"\[TOOL_CALLS\]\s*(?P<name>.+?)(?:\[CALL_ID\](?P<id>.+?))?\[ARGS\]",
        id_size=9,
        also=("[CALL_ID]",),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    CallFormat(
        "mistral",
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="[TOOL_CALLS][", separator=", ", close="]"),
        begins=("[TOOL_CALLS]",),
        id_size=9,
        signs=(("[TOOL_CALLS]",),),
    ),
    CallFormat(
        "command_a",  # Command R7B, Command A
        Style.OBJECTS,
        FormatTexts(
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
    CallFormat(
        "command_r",
        Style.OBJECTS,
        FormatTexts(
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
    CallFormat(
        "phi4",  # Phi-4-mini: with its marks, or the word that its model card documents
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<|tool_call|>[", separator=", ", close="]<|/tool_call|>"),
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        signs=(("<|/tool|>",), ("functools",)),
    ),
    CallFormat(
        "granite",  # Granite 3
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<|tool_call|>[", separator=", ", close="]"),
        begins=("<|tool_call|>", "<tool_call>"),
        ends=("</tool_call>", "<|tool_call_end|>"),
        signs=(("<|tool_call|>", "available_tools"), ("<|tool_call|>", "<|start_of_role|>")),
    ),
    CallFormat(
        "nemotron",  # Nemotron Nano 2
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<TOOLCALL>[", separator=", ", close="]</TOOLCALL>"),
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        signs=(("<TOOLCALL>",),),
    ),
    CallFormat(
        "nemotron_mini",  # Nemotron Mini; its template shows no calls
        Style.OBJECTS,
        FormatTexts("<toolcall> " + _OBJECT, "} </toolcall>", separator="\n"),
        begins=("<toolcall>",),
        ends=("</toolcall>",),
        signs=(("<extra_id_1>", "<tool>"),),
    ),
    CallFormat(
        "lfm2",
        Style.PYTHON,
        FormatTexts("{name}(", ")", open="<|tool_call_start|>[", separator=", ", close="]<|tool_call_end|>"),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        signs=(("<|tool_list_start|>",),),
    ),
    CallFormat(
        "olmo3",
        Style.PYTHON,
        FormatTexts("{name}(", ")", open="<function_calls>", separator="\n", close="</function_calls>"),
        begins=("<function_calls>",),
        ends=("</function_calls>",),
        signs=(("<function_calls>",),),
    ),
    CallFormat(
        "apertus",
        Style.KEYED,
        FormatTexts('{"{name}": ', "}", open="<|tools_prefix|>[", separator=", ", close="]<|tools_suffix|>"),
        begins=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        signs=(("<|tools_prefix|>",),),
    ),
    CallFormat(
        "tool_calls",  # Apriel, Jamba
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<tool_calls>[", separator=", ", close="]</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        signs=(("<tool_calls>[",),),
    ),
    CallFormat(
        "step3_vl",
        Style.OBJECTS,
        FormatTexts("<tool_call>\n" + _OBJECT, "}\n</tool_call>", "<tool_calls>\n", "\n", "\n</tool_calls>"),
        begins=("<tool_calls>", "<tool_call>"),
        ends=("</tool_call>", "</tool_calls>"),
        signs=(("<tool_calls>\\n<tool_call>\\n{",),),
    ),
    CallFormat(
        "minimax_m1",
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<tool_calls>\n", separator="\n", close="\n</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        signs=(("<tool_calls>\n{",), ("<tool_calls>\\n{",)),
    ),
    CallFormat(
        "gigachat3",
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<|message_sep|>\n\nfunction call<|role_sep|>\n"),
        begins=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        signs=(("function call", "<|role_sep|>"),),
    ),
    CallFormat(
        "gigachat31",
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="<|function_call|>"),
        begins=("<|function_call|>",),
        signs=(("<|function_call|>",),),
    ),
    CallFormat(
        "hunyuan",  # Hunyuan before Hy3
        Style.NAMED,
        FormatTexts(
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
    CallFormat(
        "solar_open",
        Style.NAMED,
        FormatTexts(
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
    CallFormat(
        "step_audio",
        Style.NAMED,
        FormatTexts("<|CALL_START|>function\n{name}\n", "<|CALL_END|>"),
        begins=("<|CALL_START|>",),
        ends=("<|CALL_END|>",),
        head=r"<\|CALL_START\|>\s*function\s+(?P<name>\S+)",
        signs=(("<|CALL_START|>",),),
    ),
    CallFormat(
        "intern_s1",
        Style.OBJECTS,
        FormatTexts(
            '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ', "}\n<|action_end|>", separator="\n"
        ),
        begins=("<|action_start|>",),
        ends=("<|action_end|>",),
        fence=("<|plugin|>",),
        signs=(("<|action_start|>", "<|plugin|>"),),
    ),
    CallFormat(
        "longcat_flash",
        Style.OBJECTS,
        FormatTexts("<longcat_tool_call>\n" + _OBJECT, "}\n</longcat_tool_call>", separator="\n"),
        begins=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        signs=(("<longcat_tool_call>",),),
    ),
    CallFormat(
        "hyperclovax",
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="-> tool/function_call\n[", separator=", ", close="]"),
        begins=("-> tool/function_call",),
        asides=("<|im_end|>",),  # at the end of a message
        signs=((" -> tool/function_call",),),
    ),
    CallFormat(
        "minicpm3",
        Style.PYTHON,
        FormatTexts("{name}(", ")", "<|tool_call_start|>\n```python\n", "\n", "\n```\n<|tool_call_end|>"),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        fence=("```python", "```"),
        signs=(("<|tool_call_start|>", "```python"),),
    ),
    CallFormat(
        "glm4",  # GLM-4 before 4.5: a call is a message whose first line is the function's name
        Style.ADDRESSED,
        FormatTexts("{name}\n", separator="<|assistant|>"),
        begins=("<|assistant|>",),
        bare=True,
        turns=("<|assistant|>",),
        enforced=False,  # as with the other one
        signs=(("请使用 Json 格式表示调用的参数",),),
    ),
    CallFormat(
        "granite_20b",  # Granite 20B function calling
        Style.OBJECTS,
        FormatTexts("<function_call> " + _OBJECT, "}", separator="\n"),
        begins=("<function_call>",),
        signs=(("<function_call>",),),
    ),
    CallFormat(
        "pythonic",  # Llama 4; Llama 3.2 if prompted for it
        Style.PYTHON,
        FormatTexts("{name}(", ")", open="[", separator=", ", close="]"),
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        bare=True,
        signs=(("func_name1(",), ("<|python_start|>",)),
    ),
    CallFormat(
        "llama3",
        Style.OBJECTS,
        FormatTexts('{"name": "{name}", "parameters": ', "}", separator="; "),
        begins=("<|python_tag|>",),
        bare=True,
        signs=(('{"name": function name, "parameters":',), ("<|python_tag|>",)),
    ),
    CallFormat(
        "llama4",
        Style.OBJECTS,
        FormatTexts('{"name": "{name}", "parameters": ', "}"),
        begins=("<|python_start|>",),
        ends=("<|eom|>",),
        fence=("<|python_end|>",),
        bare=True,
        signs=(("<|python_start|>", '{"name": function name, "parameters":'),),
    ),
    CallFormat(
        "hermes",  # Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, many others
        Style.OBJECTS,
        FormatTexts("<tool_call>\n" + _OBJECT, "}\n</tool_call>", separator="\n"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        signs=(("<tool_call>",),),
    ),
    CallFormat(
        "xlam",  # xLAM 2, DeepHat: a list of calls is the whole answer
        Style.OBJECTS,
        FormatTexts(_OBJECT, "}", open="[", separator=", ", close="]"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=True,
    ),
)
