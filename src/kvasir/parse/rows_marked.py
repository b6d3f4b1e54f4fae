"""Rows of the table of formats: calls whose arguments are enclosed in marks.

Sources: the models' own chat templates and model cards.
"""

from __future__ import annotations

import re

from kvasir.parse.format import CallFormat, FormatTexts, ParameterFormat, Style
from kvasir.parse.marked_text import QUOTE


def _dsml(name: str, section: str) -> CallFormat:
    """DeepSeek V3.2 and later: parameters state whether they are strings (encoding/encoding_dsv32.py of the model)."""
    open, close = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    return CallFormat(
        name,
        Style.PARAMETERS,
        FormatTexts('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>", open + "\n", "\n", "\n" + close),
        begins=(open, "<｜DSML｜invoke "),
        ends=("</｜DSML｜invoke>", close),
        head=rf'(?:{open}\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
        parameters=ParameterFormat(
            '<｜DSML｜parameter name="', '" string=', "", "</｜DSML｜parameter>", kinds=('"true">', '"false">')
        ),
        signs=(("｜DSML｜", f"{section}>"),),
    )


def _hunyuan(name: str, suffix: str) -> CallFormat:
    """Hy3: some of its tokens have a suffix."""
    open, begin, end, close = (f"<{tag}{suffix}>" for tag in ("tool_calls", "tool_call", "/tool_call", "/tool_calls"))
    sep = f"<tool_sep{suffix}>"
    return CallFormat(
        name,
        Style.PARAMETERS,
        FormatTexts(f"{begin}{{name}}{sep}\n", end, f"{open}\n", "\n", f"\n{close}"),
        begins=(open, begin),
        ends=(end, close),
        head=rf"(?:{open}\s*)?{begin}\s*(?P<name>[^\s<>{{}}]+?)\s*{sep}",
        parameters=ParameterFormat(
            f"<arg_key{suffix}>", f"</arg_key{suffix}>", f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        ),
        signs=((sep, f"<arg_key{suffix}>"),),
    )


_M3 = "]<]minimax[>["

MARKED_CALLS = (
    CallFormat(
        "minimax_m3",  # non-scalar values are nested tags
        Style.PARAMETERS,
        FormatTexts(
            _M3 + '<invoke name="{name}">',
            _M3 + "</invoke>",
            open=_M3 + "<tool_call>\n",
            separator="\n",
            close="\n" + _M3 + "</tool_call>",
        ),
        begins=(_M3 + "<tool_call>", _M3 + "<invoke name="),
        ends=(_M3 + "</invoke>", _M3 + "</tool_call>"),
        head=rf'(?:{re.escape(_M3)}<tool_call>\s*)?{re.escape(_M3)}<invoke name="(?P<name>[^"]+)">',
        parameters=ParameterFormat(_M3 + "<", ">", "", _M3 + "</{key}>", tags=_M3),
        signs=(("]<]minimax[>[", "<invoke name="),),
    ),
    CallFormat(
        "kimi_k3",
        Style.PARAMETERS,
        FormatTexts(
            '<|open|>call tool="{name}" index="{index}"<|sep|>',
            "<|close|>call<|sep|>",
            open="<|open|>tools<|sep|>",
            close="<|close|>tools<|sep|>",
        ),
        begins=("<|open|>tools<|sep|>", "<|open|>call tool="),
        ends=("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
        head=r'(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call tool="(?P<name>[^"]+)"(?: index="\d+")?<\|sep\|>',
        parameters=ParameterFormat(
            '<|open|>argument key="',
            '" type="',
            "",
            "<|close|>argument<|sep|>",
            kinds=tuple(f'{kind}"<|sep|>' for kind in ("string", "number", "boolean", "object", "array", "null")),
        ),
        signs=(("<|open|>", "call tool="),),
    ),
    CallFormat(
        "muse",  # Muse Glimmer: a message to the function
        Style.PARAMETERS,
        FormatTexts(
            ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
            "</atem:invoke>\n</atem:function_calls>",
            separator="<|eom|><|start|>assistant",
        ),
        begins=("<atem:function_calls>", "<atem:invoke name="),
        ends=("</atem:invoke>", "</atem:function_calls>"),
        head=r'(?:<atem:function_calls>\s*)?<atem:invoke name="(?P<name>[^"]+)">',
        parameters=ParameterFormat('<atem:parameter name="', '">', "", "</atem:parameter>"),
        asides=("to=user<|message|>", "to={name}<|message|>", "<|eom|>", "<|start|>assistant"),
        turns=("<|start|>", "<|eom|>"),
        enforced=False,
        signs=(("<atem:function_calls>",),),
    ),
    CallFormat(
        "functionary_v3.2",
        Style.ADDRESSED,
        FormatTexts("{name}\n", separator=">>>"),
        begins=(">>>",),
        bare=True,
        everyone="all",
        enforced=False,  # otherwise ">>>" in any text would have to be followed by a call
        signs=((">>>all",), (">>>${recipient}",)),
    ),
    CallFormat(
        "minicpm5",
        Style.PARAMETERS,
        FormatTexts('<function name="{name}">', "</function>", separator="\n"),
        begins=("<function name=",),
        ends=("</function>",),
        head=r'<function name="(?P<name>[^"]+)">',
        parameters=ParameterFormat('<param name="', '">', "", "</param>", wrap=("<![CDATA[", "]]>")),
        signs=(('<function name="', '<param name="'),),
    ),
    _hunyuan("hunyuan3", ""),
    _hunyuan("hunyuan3_opensource", ":opensource"),
    CallFormat(
        "longcat",  # LongCat 2.0, Flash-Lite
        Style.PARAMETERS,
        FormatTexts("<longcat_tool_call>{name}\n", "</longcat_tool_call>", separator="\n"),
        begins=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        head=r"<longcat_tool_call>\s*(?P<name>[^\s<>{}]+)",
        parameters=ParameterFormat(
            "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"
        ),
        signs=(("<longcat_arg_key>",),),
    ),
    CallFormat(
        "solar_open2",
        Style.PARAMETERS,
        FormatTexts("<|tool_call:start|>{name}\n", "<|tool_call:end|>", separator="\n"),
        begins=("<|tool_call:start|>",),
        ends=("<|tool_call:end|>",),
        head=r"<\|tool_call:start\|>\s*(?P<name>[^\s<>{}]+)",
        parameters=ParameterFormat("<|tool_arg:start|>", "<|tool_arg:value|>", "", "<|tool_arg:end|>"),
        signs=(("<|tool_arg:start|>",),),
    ),
    CallFormat(
        "step3",
        Style.PARAMETERS,
        FormatTexts(
            '<｜tool_call_begin｜>\nfunction<｜tool_sep｜><steptml:invoke name="{name}">',
            "</steptml:invoke><｜tool_call_end｜>",
            open="<｜tool_calls_begin｜>\n",
            separator="\n",
            close="\n<｜tool_calls_end｜>",
        ),
        begins=("<｜tool_calls_begin｜>", "<｜tool_call_begin", "<steptml:invoke name="),
        ends=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        head=r"(?:<｜tool_calls_begin｜>\s*)?(?:<｜tool_call_begin[｜>]*\s*\w*\s*<｜tool_sep｜>\s*)?"
        r'<steptml:invoke name="(?P<name>[^"]+)">',
        parameters=ParameterFormat('<steptml:parameter name="', '">', "", "</steptml:parameter>"),
        signs=(("<steptml:invoke name=",),),
    ),
    CallFormat(
        "functiongemma",
        Style.MARKED,
        FormatTexts("<start_function_call>call:{name}", "<end_function_call>"),
        begins=("<start_function_call>",),
        ends=("<end_function_call>",),
        head=r"<start_function_call>\s*call:(?P<name>[^{]+)",
        quote="<escape>",
        also=("<escape>",),
        signs=(("<start_function_call>",),),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    CallFormat(
        "minimax_m2",
        Style.PARAMETERS,
        FormatTexts(
            '<invoke name="{name}">\n',
            "</invoke>",
            open="<minimax:tool_call>\n",
            separator="\n",
            close="\n</minimax:tool_call>",
        ),
        begins=("<minimax:tool_call>", "<invoke name="),
        ends=("</invoke>", "</minimax:tool_call>"),
        head=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
        parameters=ParameterFormat('<parameter name="', '">', "", "</parameter>"),
        signs=(("<minimax:tool_call>",),),
    ),
    CallFormat(
        "seed_oss",
        Style.PARAMETERS,
        FormatTexts("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>", separator="\n"),
        begins=("<seed:tool_call>", "<function="),
        ends=("</function>", "</seed:tool_call>"),
        head=r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>]+)>",
        parameters=ParameterFormat("<parameter=", ">", "", "</parameter>"),
        signs=(("<seed:tool_call>",),),
    ),
    CallFormat(
        "zyphra",  # ZAYA
        Style.PARAMETERS,
        FormatTexts("<zyphra_tool_call>\n<function={name}>\n", "</function>\n</zyphra_tool_call>", separator="\n"),
        begins=("<zyphra_tool_call>", "<function="),
        ends=("</function>", "</zyphra_tool_call>"),
        head=r"(?:<zyphra_tool_call>\s*)?<function=(?P<name>[^>]+)>",
        parameters=ParameterFormat("<parameter=", ">", "", "</parameter>", lines=True),
        signs=(("<zyphra_tool_call>",),),
    ),
    CallFormat(
        "qwen3_coder",  # Qwen3-Coder, Qwen3.5, Step 3.7, Nemotron 3
        Style.PARAMETERS,
        FormatTexts("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", separator="\n"),
        begins=("<tool_call>", "<function="),
        ends=("</function>", "</tool_call>"),
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>]+)>",
        parameters=ParameterFormat("<parameter=", ">", "", "</parameter>", lines=True),
        signs=(("<function=", "<parameter="),),
    ),
    CallFormat(
        "glm45",  # GLM 4.5 to 4.7
        Style.PARAMETERS,
        FormatTexts("<tool_call>{name}\n", "</tool_call>", separator="\n"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        head=r"<tool_call>\s*(?P<name>[^\s<>{}]+)",
        parameters=ParameterFormat("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=(("<arg_key>",),),
    ),
    CallFormat(
        "gemma4",
        Style.MARKED,
        FormatTexts("<|tool_call>call:{name}", "<tool_call|>"),
        begins=("<|tool_call>",),
        ends=("<tool_call|>",),
        head=r"<\|tool_call>\s*call:(?P<name>[^{]+)",
        also=(QUOTE,),
        signs=(("<|tool_call>call:",),),
    ),
)
