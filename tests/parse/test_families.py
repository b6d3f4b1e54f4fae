"""The formats in which families publish their chat templates write calls and reasoning: each is recognised by what it
writes. The templates are short ones that write the same marks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvasir.engine.reading import sample_of
from kvasir.parse.detect import detect
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, NO_CALLS, THINKING, choose
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateRenderer

_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_KEYWORDS = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
)
_COMMA = "{{ ', ' if not loop.last }}"


def _each(text: str, before: str = "", after: str = "") -> str:
    calls = "{% for c in m.tool_calls %}" + text + "{% endfor %}"
    return "{% if m.tool_calls %}" + before + calls + after + "{% endif %}"


@dataclass(frozen=True)
class Published:
    """begin, end: of a turn, {role} for the role. calls: the template of a message's calls. output: what the model
    writes for one call and its reasoning. thinking: the expected reasoning format."""

    begin: str
    end: str
    calls: str
    name: str
    output: str
    thinking: str | None = None
    opens: str = ""
    marks: str = ""  # elsewhere in the template

    @property
    def template(self) -> str:
        begin = self.begin.replace("{role}", "{{ m.role }}")
        asked = self.begin.replace("{role}", "assistant") + self.opens
        return (
            "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + begin + "{{ m.content or '' }}"
            + self.calls + self.end + "{% endfor %}{% if add_generation_prompt %}" + asked + "{% endif %}"
            + "{# " + self.marks + " #}"
        )  # fmt: skip


_IM = ("<|im_start|>{role}\n", "<|im_end|>\n")
_ROW = '{"word": "yggdrasil", "count": 3}'
_OBJECT = '{"name": "look_up", "arguments": ' + _ROW + "}"
PUBLISHED = {
    "llama4-pythonic": Published(
        "<|header_start|>{role}<|header_end|>\n\n",
        "<|eot|>",
        _each("{{ c.function.name }}(" + _KEYWORDS + ")" + _COMMA, "<|python_start|>[", "]<|python_end|>"),
        "pythonic",
        '<|python_start|>[look_up(word="yggdrasil", count=3)]<|python_end|>',
    ),
    "llama4-json": Published(
        "<|header_start|>{role}<|header_end|>\n\n",
        "<|eot|>",
        _each(_JSON.replace("arguments", "parameters", 1), "<|python_start|><|python_end|>"),
        "llama4",
        "<|python_start|><|python_end|>" + _OBJECT.replace("arguments", "parameters"),
        marks="<|python_start|>",
    ),
    "command-a": Published(
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        _each(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
            '"parameters": {{ c.function.arguments | tojson }}}{{ "," if not loop.last }}\n',
            "<|START_ACTION|>[\n",
            "]<|END_ACTION|>",
        ),
        "command_a",
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "look_up", "parameters": ' + _ROW + "}\n]<|END_ACTION|>",
        "cohere",
        marks="<|START_THINKING|>",
    ),
    "phi-4-mini": Published(
        "<|{role}|>",
        "<|end|>",
        _each(_JSON + _COMMA, "<|tool_call|>[", "]<|/tool_call|>"),
        "phi4",
        "<|tool_call|>[" + _OBJECT + "]<|/tool_call|>",
        marks="<|tool|><|/tool|>",
    ),
    "granite-3": Published(
        "<|start_of_role|>{role}<|end_of_role|>",
        "<|end_of_text|>\n",
        _each(_JSON + _COMMA, "<|tool_call|>[", "]"),
        "granite",
        "<|tool_call|>[" + _OBJECT + "]",
        marks="available_tools",
    ),
    "granite-4": Published(
        "<|start_of_role|>{role}<|end_of_role|>",
        "<|end_of_text|>\n",
        _each("<tool_call>\n" + _JSON + "\n</tool_call>{{ '\n' if not loop.last }}"),
        "hermes",
        "<tool_call>\n" + _OBJECT + "\n</tool_call>",
    ),
    "exaone4": Published(
        "[|{role}|]\n",
        "[|endofturn|]\n",
        _each("<tool_call>" + _JSON + "</tool_call>{{ '\n' if not loop.last }}"),
        "hermes",
        "<think>\nI look.\n</think>\n\n<tool_call>" + _OBJECT + "</tool_call>",
        "think",
        marks="<think>",
    ),
    "hunyuan-a13b": Published(
        "<|hy_{role}|>",
        "<|eos|>",
        _each(
            "<tool_call>{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```</tool_call>",
            "<tool_calls>",
            "</tool_calls>",
        ),
        "hunyuan",
        "<think>\nI look.\n</think>\n<tool_calls><tool_call>look_up\n```json\n"
        + _ROW
        + "\n```</tool_call></tool_calls>",
        "think",
        marks="<think>",
    ),
    "seed-oss": Published(
        "<seed:bos>{role}\n",
        "<seed:eos>",
        _each(
            "<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
            "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
            "{{ '\n' if not loop.last }}"
        ),
        "seed_oss",
        "<seed:think>I look.</seed:think><seed:tool_call>\n<function=look_up>\n<parameter=word>yggdrasil</parameter>\n"
        "<parameter=count>3</parameter>\n</function>\n</seed:tool_call>",
        "seed_oss",
        marks="<seed:think>",
    ),
    "ernie-4.5-thinking": Published(
        *_IM,
        _each("\n<tool_call>\n" + _JSON + "\n</tool_call>\n"),
        "hermes",
        "I look.\n</think>\n\n<tool_call>\n" + _OBJECT + "\n</tool_call>\n",
        "granite",
        "<think>\n",
        marks="<think><response>",
    ),
    "glm-4.5": Published(
        "<|{role}|>\n",
        "",
        _each(
            "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>\n"
        ),
        "glm45",
        "<think>I look.</think>\n<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>yggdrasil</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "think",
        marks="<think>",
    ),
    "smollm3": Published(
        *_IM,
        _each("<tool_call>\n" + _JSON + "\n</tool_call>\n"),
        "hermes",
        "<think>\nI look.\n</think>\n<tool_call>\n" + _OBJECT + "\n</tool_call>",
        "think",
        marks="<think>",
    ),
    "minimax-m2": Published(
        "]~b]{role}\n",
        "[e~[\n",
        _each(
            '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
            '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n',
            "\n<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
        "minimax_m2",
        'I look.\n</think>\n\n<minimax:tool_call>\n<invoke name="look_up">\n'
        '<parameter name="word">yggdrasil</parameter>\n'
        '<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>',
        "minimax_m2",
        "<think>\n",
        marks="<think><response>",
    ),
    "apertus": Published(
        "<|{role}_start|>",
        "<|{role}_end|>".replace("{role}", "assistant"),
        _each(
            '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}' + _COMMA,
            "<|tools_prefix|>[",
            "]<|tools_suffix|>",
        ),
        "apertus",
        '<|tools_prefix|>[{"look_up": ' + _ROW + "}]<|tools_suffix|>",
    ),
}
PUBLISHED |= {
    "glm-4-0414": Published(
        "<|{role}|>",
        "",
        _each("{{ c.function.name }}\n{{ c.function.arguments | tojson }}{{ '<|assistant|>' if not loop.last }}"),
        "glm4",
        "look_up\n" + _ROW,
    ),
    "granite-20b": Published(
        "{role}: ",
        "<|endoftext|>",
        _each("\n<function_call> " + _JSON),
        "granite_20b",
        "<function_call> " + _OBJECT,
    ),
}
SCHEMA = {"look_up": {"properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_familys_calls_and_reasoning_are_understood(family, renderer):
    given = PUBLISHED[family]
    shown = map(sample_of, ChatTemplate(given.template, renderer=renderer).samples(given.template))
    found = detect(given.template, samples=shown)
    thinking = found.format.thinking
    assert (found.format.calls.name, thinking and thinking.name, found.fault) == (given.name, given.thinking, "")

    parser = Parser(found.format, SCHEMA, opened=found.format.opened_by(given.opens))
    message = ParsedMessage.of([*parser.push(given.output), *parser.finish()])
    (call,) = message.calls
    assert (call.name, call.arguments.replace(" ", "")) == ("look_up", _ROW.replace(" ", ""))
    assert message.reasoning.strip() == ("I look." if given.thinking else "")
    assert not message.content.strip()


@pytest.mark.parametrize("row", THINKING, ids=lambda row: row.name)
@pytest.mark.parametrize("opened", [False, True], ids=["marked", "opened by the prompt"])
def test_reasoning_and_answer_are_told_apart(row, opened):
    """With the marks that the family's answers have. The parser must end, too: some answers have no end mark."""
    if opened and row.name == "harmony":
        pytest.skip("its prompts open no reasoning")
    calls = next((calls for calls in CALLS if calls.name == row.name), NO_CALLS)
    begin, end = row.answer
    text = ("" if opened else row.start) + "I look." + row.end + begin + "There are 3." + end
    for pieces in ([text], text):
        parser = Parser(Format(calls, row), opened=opened)
        message = ParsedMessage.of([e for piece in pieces for e in parser.push(piece)] + parser.finish())
        assert (message.reasoning, message.content, message.calls) == ("I look.", "There are 3.", [])


_NEXT = "<|im_end|>\n<|im_start|>assistant"


@pytest.mark.parametrize(
    ("output", "opened", "reasoning", "content", "calls"),
    [
        ("\nThere are 3.<|im_end|>", False, "", "There are 3.", 0),
        (f"/think\nI look.{_NEXT}\nThere are 3.<|im_end|>", False, "I look.", "There are 3.", 0),
        (f"I look.{_NEXT}\nThere are 3.<|im_end|>", True, "I look.", "There are 3.", 0),
        (f"/think\nI look.{_NEXT} -> tool/function_call\n[{_OBJECT}]<|im_end|>", False, "I look.", "", 1),
        (f" -> tool/function_call\n[{_OBJECT}, {_OBJECT}]<|im_end|>", False, "", "", 2),
        ("\nA /think in a text.", False, "", "A /think in a text.", 0),
    ],
)
def test_the_messages_of_a_turn_of_hyperclova(output, opened, reasoning, content, calls):
    format = choose("hyperclovax", "hyperclovax")
    for pieces in ([output], output):
        parser = Parser(format, SCHEMA, opened=opened)
        message = ParsedMessage.of([e for piece in pieces for e in parser.push(piece)] + parser.finish())
        assert (message.reasoning.strip(), message.content.strip(), len(message.calls)) == (reasoning, content, calls)
