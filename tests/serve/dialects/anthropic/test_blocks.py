"""Content blocks: the same however an answer is cut; inputs and signatures that go there and back."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvasir.parse.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning, merged
from kvasir.serve.dialects.anthropic.blocks import Blocks, content, input_of
from kvasir.serve.dialects.anthropic.prompt import signature, thought
from kvasir.serve.dialects.anthropic.wire import ThinkingBlock

TEXT = st.text(min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def answers(draw) -> list[Event]:
    """Events as a parser tells them, in small pieces; the last call may be broken off."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thinking", "call"]), max_size=5)):
        if kind == "call":
            events.append(CallStart(calls, draw(TEXT)))
            text = json.dumps(draw(OBJECTS), ensure_ascii=draw(st.booleans()))
            cut = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
            pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
            events += [Arguments(calls, piece) for piece in pieces if piece]
            events.append(CallEnd(calls))
            calls += 1
        else:
            events += [
                (Content if kind == "text" else Reasoning)(t) for t in draw(st.lists(TEXT, min_size=1, max_size=3))
            ]
    return events


def reported(events: list[Event], omitted: bool) -> list[dict]:
    """The blocks that a client puts together from a stream's events."""
    blocks, found, arguments = Blocks(None, omitted), [], {}
    for event in (*blocks.push(events), *blocks.close()):
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(found)
            found.append(dict(event["content_block"]))
            arguments[index] = ""
        elif event["type"] == "content_block_delta":
            assert index == len(found) - 1
            for name, value in event["delta"].items():
                if name == "partial_json":
                    arguments[index] += value
                elif name != "type":
                    found[index][name] += value
        else:
            assert index == len(found) - 1
            if found[index]["type"] == "tool_use":
                found[index]["input"] = json.loads(arguments[index])
    return found


@given(answers(), st.booleans())
def test_a_streams_blocks_are_those_of_the_whole(events, omitted):
    whole, pieces = (json.loads(msgspec.json.encode(content(e, None, omitted))) for e in (merged(events), events))
    streamed = reported(events, omitted)
    for block in (*whole, *pieces, *streamed):
        block.pop("id", None)
    assert whole == pieces == streamed
    assert all(a["type"] != b["type"] or a["type"] == "tool_use" for a, b in pairwise(whole))
    reply = "".join(e.text for e in events if isinstance(e, Reasoning))
    carried = [ThinkingBlock.model_validate(block) for block in whole if block["type"] == "thinking"]
    assert "".join(map(thought, carried)) == reply


@given(OBJECTS, st.booleans(), st.data())
def test_an_input_is_as_it_was_written_or_as_far_as_it_came(value, ascii, data):
    text = json.dumps(value, ensure_ascii=ascii)
    assert json.loads(msgspec.json.encode(input_of(text))) == value
    cut = input_of(text[: data.draw(st.integers(0, len(text) - 1))])
    assert isinstance(cut, dict) and cut.keys() <= value.keys()
    assert all(isinstance(cut[k], list | dict) or cut[k] == value[k] or isinstance(value[k], int | float) for k in cut)


@given(st.text())
def test_anything_for_arguments_becomes_an_object(text):
    assert isinstance(json.loads(msgspec.json.encode(input_of(text))), dict)


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_thinking_that_is_left_out_comes_back(text):
    block = ThinkingBlock(type="thinking", thinking="", signature=signature(text, omitted=True))
    assert thought(block) == text
    shown = ThinkingBlock(type="thinking", thinking=text, signature=signature(text, omitted=False))
    assert thought(shown) == text and len(shown.signature) == 64
