"""The table against the models' real chat templates: the format is detected, and calls that a template renders
come back as they were."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given, settings

from kvasir.engine.reading import sample_of
from kvasir.errors import ConfigError
from kvasir.parse.detect import DetectedFormat, detect
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format, grammar_parts
from kvasir.parse.marked_text import PLAIN_KEY
from kvasir.parse.table import CALLS, REASONING_FORMATS, TOOL_FORMATS, choose
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateRenderer
from tests._shared import need
from tests.parse.writing import CALL_LISTS, CALLING, format_of, parsed, schemas

FORMATS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "GLM-4.6": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": ("none", "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "LFM2-8B-A1B": ("lfm2", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "google-gemma-2-2b-it": ("none", None),
    "google-gemma-4-31B-it": ("gemma4", "gemma"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "llama-cpp-rwkv-world": ("none", "think"),
    "meetkai-functionary-medium-v3.1": ("functionary", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": ("none", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
}
# Templates that render no calls, and one that appends to a list, which the sandbox forbids.
WITHOUT_CALLS = ("ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "Kimi-K2-Instruct")
RENDERS_CALLS = [name for name, (calls, _) in FORMATS.items() if calls != "none" and name not in WITHOUT_CALLS]
ONE_CALL = ("llama3", "harmony")  # what their templates take in a message
ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<｜end▁of▁sentence｜>|</s>|<\|END_OF_TURN_TOKEN\|>|<\|user\|>"
)
OWN_ENDS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": re.compile(r"<\|START_OF_TURN_TOKEN\|>"),
    "google-gemma-4-31B-it": re.compile(r"<\|tool_response>"),
}
HELLO = {"role": "user", "content": "Hello"}


def source(name: str) -> str:
    return need("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def renderer() -> TemplateRenderer:
    return TemplateRenderer()


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), {"bos_token": "<s>", "eos_token": "</s>"}, renderer())


@functools.cache
def found(name: str) -> DetectedFormat:
    shown = template(name).samples(source(name))
    return detect(source(name), samples=map(sample_of, shown))


def tool(name: str, keys: Iterable[str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "?"} for key in keys}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}


def reply(name: str, answer: dict[str, Any], tools: list[Any]) -> tuple[str, str]:
    """(the prompt, the model's output after it for which the template renders this turn)"""
    prompt = template(name).render([HELLO], tools=tools).text
    whole = template(name).render([HELLO, answer], tools=tools, add_generation_prompt=False).text
    size = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    if prompt.rfind("<", 0, size) > prompt.rfind(">", 0, size):  # not in the middle of a mark
        size = prompt.rfind("<", 0, size)
    return prompt[:size], OWN_ENDS.get(name, ENDS).split(whole[size:])[0].removeprefix("<|CHATBOT_TOKEN|>")


def has_plain_keys(value: Any) -> bool:
    """Gemma's template writes other values so that they cannot be distinguished from the text around them."""
    if isinstance(value, list):
        return all(map(has_plain_keys, value))
    return not isinstance(value, dict) or all(PLAIN_KEY.fullmatch(k) and has_plain_keys(v) for k, v in value.items())


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_detected(name):
    format = found(name).format
    assert (format.calls.name, format.thinking and format.thinking.name) == FORMATS[name]


@pytest.mark.parametrize(
    ("shown", "calls", "thinking"),
    [
        ("'<minimax:tool_call>' <invoke name= <parameter name= <response> '</think>'", "minimax_m2", "minimax_m2"),
        ("<tool> '请使用 Json 格式表示调用的参数' <|observation|>", "glm4", None),
        ("'<extra_id_1>Assistant' '<tool> ' + tool|tojson + ' </tool>'", "nemotron_mini", None),
        ("'<|start_of_role|>tools' respond with <|tool_call|> followed by a JSON list", "granite", None),
        ("You have these functions. Write <function_call> before each call.", "granite_20b", None),
        ("'<seed:tool_call>' '<seed:think>' <function=f> <parameter=p>", "seed_oss", "seed_oss"),
        ("dsml_token = '｜DSML｜' <{{ dsml_token }}function_calls> <think>", "deepseek_v32", "think"),
        ("dsml_token = '｜DSML｜' <{{ dsml_token }}tool_calls> <think>", "deepseek_v4", "think"),
        ("<AVAILABLE_TOOLS>[ '<TOOLCALL>[' <think>", "nemotron", "think"),
    ],
)
def test_a_format_is_detected_by_its_marks(shown, calls, thinking):
    format = detect(shown).format
    assert (format.calls.name, format.thinking and format.thinking.name) == (calls, thinking)


@pytest.mark.parametrize("name", RENDERS_CALLS)
@settings(max_examples=3)
@given(calls=CALL_LISTS)
def test_calls_of_a_template_come_back(name, calls):
    calls = calls[:1] if FORMATS[name][0] in ONE_CALL else calls
    assume(FORMATS[name][0] != "gemma4" or has_plain_keys([arguments for _, arguments in calls]))
    tools = [tool(f, arguments) for f, arguments in calls]
    rendered = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": f, "arguments": arguments}}
        for i, (f, arguments) in enumerate(calls)
    ]
    prompt, text = reply(name, {"role": "assistant", "content": "", "tool_calls": rendered}, tools)
    format = found(name).format
    opened = format.opened_by(prompt)
    message = ParsedMessage.of(parsed(format, text, tools=schemas(calls), opened=opened))
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert not message.content and not message.reasoning.strip()


@pytest.mark.parametrize("name", RENDERS_CALLS)
def test_the_texts_for_a_grammar_are_the_template_s(name):
    """What a grammar would make the model say is what its template renders."""
    if name == "Mistral-Small-3.2-24B-Instruct-2506":
        pytest.skip("this template renders the calls' ids, which models do not write")
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"key": "x"}}}
    tools = [tool("look_up", ["key"])]
    text = (
        template(name)
        .render(
            [HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}],
            tools=tools,
            add_generation_prompt=False,
        )
        .text
    )
    parts = grammar_parts(found(name).format, "look_up")
    place = text.rfind(parts.begin.replace(" <|constrain|>json<|message|>", ""))
    assert place >= 0
    assert parts.end + parts.close in text[place:]


@pytest.mark.parametrize("name", [name for name in CALLING if format_of(name).calls.enforced])
def test_the_trigger_begins_a_call(name):
    parts = grammar_parts(format_of(name), "f")
    assert parts.begin.startswith(parts.trigger)
    assert parts.begin.endswith(parts.begin_next)


def test_no_calls_no_grammar():
    with pytest.raises(ValueError):
        grammar_parts(choose(), "f")


@pytest.mark.parametrize("name", CALLING)
def test_no_mark_lies_inside_another(name):
    """A mark that is found must not turn out to be the beginning, or the middle, of another one."""
    calls, thinking = format_of(name).calls, format_of(name).thinking
    assert thinking
    for group in ((*calls.begins, thinking.start), (*calls.begins, thinking.end, thinking.answer[1])):
        marks = [mark for mark in group if mark]
        assert not [(a, b) for a in marks for b in marks if a != b and a in b]


@pytest.mark.parametrize(
    ("prompt", "opened"), [("x<think>\n", True), ("x<think>", True), ("<think>\n\n</think>\n\n", False), ("x", False)]
)
def test_a_prompt_opens_the_reasoning(prompt, opened):
    assert choose(reasoning="think").opened_by(prompt) is opened
    assert not choose(reasoning="none").opened_by(prompt)


@pytest.mark.parametrize(
    ("name", "tokens", "used"),
    [
        ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"), True),
        ("mistral_args", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"), True),
        ("harmony", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"), True),
        ("deepseek_v3", ("<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"), True),
        ("hermes", ("<|im_end|>", "<|endoftext|>", "<s>", "", "\n"), False),
    ],
)
def test_marks_that_are_special_tokens_are_known(name, tokens, used):
    assert [format_of(name).uses(token) for token in tokens] == [used] * len(tokens)


def test_reasoning_is_detected_from_the_vocabulary():
    assert detect("{{ messages }}", ["<think>", "</think>"]).format.thinking == choose(reasoning="think").thinking


def test_formats_are_chosen_by_name():
    assert choose(tools="glm45", reasoning="none") == Format(next(row for row in CALLS if row.name == "glm45"))
    hermes = detect("<tool_call> <think>").format
    assert choose(tools="none", found=hermes) == Format(choose().calls, hermes.thinking)
    assert choose(found=hermes).calls.name == "hermes"
    for name in TOOL_FORMATS:
        assert choose(tools=name).calls.name == name
    for name in REASONING_FORMATS:
        assert (choose(reasoning=name).thinking is None) is (name == "none")
    with pytest.raises(ConfigError, match=r"tool.*'x'"):
        choose(tools="x")
    with pytest.raises(ConfigError, match=r"reasoning.*'x'"):
        choose(reasoning="x")
