"""Answers with tool calls: whatever is drawn under the grammar of a format, its parser reads calls of the tools."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.guided.lark import Lark
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format, Style
from kvasir.parse.parser import Parser
from kvasir.parse.table import CALLS, THINKING
from tests.examples import examples
from tests.guided.walk import SPECIALS, TOKENIZER, allowed_ids, make_guides, walk

GUIDES = make_guides()
LOOK_UP = {
    "type": "object",
    "properties": {
        "number": {"type": "integer"},
        "mode": {"enum": ["fast", "slow"]},
        "exact": {"type": "boolean"},
        "text": {"type": "string", "maxLength": 6},
    },
    "required": ["number", "mode"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (Function("look_up", LOOK_UP), Function("end", NOTHING))
TOOLS = {f.name: f.parameters for f in FUNCTIONS}
FORMATS = {calls.name: calls for calls in CALLS if calls.enforced and calls.style is not Style.NONE}


def read(text: str, format: Format, opened: bool = False) -> ParsedMessage:
    parser = Parser(format, TOOLS, calls=True, opened=opened)
    return ParsedMessage.of([*parser.push(text), *parser.finish()])


def drawn(format: Format, seed: int, first: str = "", **wanted) -> str | None:
    """An answer under the grammar; None where it found no end."""
    guide = GUIDES.take(GUIDES.begin(tool_grammar(format, FUNCTIONS, SPECIALS, **wanted)))
    ids = walk(guide, seed, first=TOKENIZER.encode(first, add_special_tokens=False), limit=300)
    return None if ids is None else TOKENIZER.decode(ids, skip_special_tokens=False)


def check(message: ParsedMessage) -> None:
    for call in message.calls:
        arguments = json.loads(call.arguments)
        assert call.name in TOOLS
        if call.name == "end":
            assert arguments == {}
        else:
            assert type(arguments["number"]) is int and arguments["mode"] in ("fast", "slow")
            assert set(arguments) <= set(LOOK_UP["properties"])


@pytest.mark.few(16)
@pytest.mark.parametrize("name", FORMATS)
@examples(15)
@given(seed=st.integers(0, 2**32), parallel=st.booleans())
def test_a_required_call_is_made_and_can_be_read(name, seed, parallel):
    format = Format(FORMATS[name])
    text = drawn(format, seed, required=True, parallel=parallel)
    if text is None:
        return
    message = read(text, format)
    assert message.calls and not message.content.strip(), text
    assert parallel or len(message.calls) == 1
    check(message)


@pytest.mark.parametrize("thinking", [t for t in THINKING if t.name in ("think", "mistral", "granite32")],
                         ids=lambda t: t.name)  # fmt: skip
@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_comes_before_a_required_call(thinking, opened):
    format = Format(FORMATS["hermes"], thinking)
    first = f"{'' if opened else thinking.start}so it is{thinking.end}"
    seen = 0
    for seed in range(6):
        text = drawn(format, seed, first=first, required=True, parallel=False, opened=opened)
        if text is None:
            continue
        message = read(text, format, opened)
        check(message)
        assert message.reasoning.strip() == "so it is" and len(message.calls) == 1
        seen += 1
    assert seen


def test_a_value_may_contain_the_text_before_its_end_token():
    """A mark that is text and then a special token, as DeepSeek's: text alone ends no value."""
    mark, special = next((text, i) for text, i in SPECIALS.items() if text.startswith("<"))
    lark = Lark({mark: special})
    lark.until("start", f"</{mark}x>")
    at = GUIDES.take(GUIDES.begin(lark.text()), TOKENIZER.encode("a </b> </", add_special_tokens=False))
    assert special in allowed_ids(at) and set(TOKENIZER.encode("p", add_special_tokens=False)) < set(allowed_ids(at))
    at.advance([special, *TOKENIZER.encode("x>", add_special_tokens=False)])
    assert at.done


def test_content_may_have_its_own_schema():
    format = Format(FORMATS["hermes"])
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    kinds = set()
    for seed in range(12):
        text = drawn(format, seed, content=answer)
        if text is not None:
            message = read(text, format)
            check(message)
            kinds.add(bool(message.calls))
            assert message.calls or list(json.loads(text)) == ["a"]
    assert kinds == {True, False}


def test_a_strict_tool_is_enforced_or_refused():
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    GUIDES.take(GUIDES.begin(tool_grammar(Format(FORMATS["hermes"]), [Function("f", loose)], SPECIALS, required=True)))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        tool_grammar(Format(FORMATS["hermes"]), [Function("f", loose, True)], SPECIALS, required=True)
    with pytest.raises(ValueError, match="tool calls"):
        tool_grammar(Format(CALLS[-1]), FUNCTIONS, SPECIALS)


def test_loosened_functions_keep_names_and_plain_types():
    properties = {"a": {"type": "integer", "uniqueItems": True}, "b": {"$ref": "#/no"}, "c": 1}
    odd = {"type": "array", "properties": properties, "required": ["b", "zzz"]}
    loose = Function("f", odd).loosened()
    assert loose.parameters == {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {}}, "required": ["b"]
    }  # fmt: skip
    for format in FORMATS.values():
        GUIDES.take(GUIDES.begin(tool_grammar(Format(format), [loose], SPECIALS, required=True)))
    with pytest.raises(InvalidRequest, match="array"):
        tool_grammar(Format(FORMATS["hermes"]), [Function("f", odd)], SPECIALS)
