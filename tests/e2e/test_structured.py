"""Structured output on the bundled model: what is asked for is what comes, however it is sampled."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from kvasir import AsyncLLM, SamplingParams
from kvasir.guided.rule import Rule
from kvasir.guided.tools import Function, free_text, tool_grammar
from kvasir.guided.vocabulary import Vocabulary
from kvasir.parse.table import choose
from tests.later import openai

MODEL = "kvasir-mini"
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "juice"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["first_name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASK = [{"role": "user", "content": "Tell me about Anna."}]


@pytest.fixture(scope="module")
def api(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def ask(api, **fields):
    fields = {"messages": ASK, "max_tokens": 120, "seed": 1, **fields}
    return api.chat.completions.create(model=MODEL, **fields)


def is_person(text: str) -> bool:
    value = json.loads(text)
    known = list(value) == list(PERSON["properties"]) and 0 <= value["age"] <= 120
    return known and 1 <= len(value["likes"]) <= 2 and set(value["likes"]) <= {"tea", "coffee", "juice"}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_an_answer_is_of_the_schema_and_the_same_streamed_or_sampled_token_by_token(api, temperature):
    whole = ask(api, response_format=FORMAT, temperature=temperature).choices[0]
    assert whole.finish_reason == "stop" and is_person(whole.message.content)
    pieces = list(ask(api, response_format=FORMAT, temperature=temperature, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.message.content
    slow = ask(api, response_format=FORMAT, temperature=temperature, logprobs=True, top_logprobs=2).choices[0]
    assert slow.message.content == whole.message.content
    assert "".join(t.token for t in slow.logprobs.content).endswith(whole.message.content), "it may think before"


def test_each_of_several_answers_follows_the_schema(api):
    answers = ask(api, response_format=FORMAT, temperature=1.5, n=4, seed=7).choices
    texts = [a.message.content for a in answers]
    assert all(map(is_person, texts)) and len(set(texts)) > 1
    assert texts == [a.message.content for a in ask(api, response_format=FORMAT, temperature=1.5, n=4, seed=7).choices]


def test_a_truncated_answer_has_the_finish_reason_length(api):
    cut = ask(api, response_format=FORMAT, max_tokens=6).choices[0]
    assert cut.finish_reason == "length"
    assert ask(api, response_format=FORMAT).choices[0].message.content.startswith(cut.message.content)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"[A-Z]{2}-\d{4}"}, r"[A-Z]{2}-\d{4}"),
        ({"choice": ["red", "green", "light green"]}, "red|green|light green"),
        ({"grammar": 'root ::= "yes" | "no" " "? [0-9]+\n'}, r"yes|no ?[0-9]+"),
        ({"grammar": 'start: "a"+ "!"\n'}, "a+!"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, r"\d\d"),
        ({"json": '{"enum": [1, "two"]}'}, '1|"two"'),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_all_kinds_in_chats_and_completions(api, wanted, pattern):
    body = {"structured_outputs": wanted}
    chat = ask(api, temperature=1.0, extra_body=body).choices[0]
    assert chat.finish_reason in ("stop", "length")
    assert chat.finish_reason == "length" or re.fullmatch(pattern, chat.message.content)
    text = api.completions.create(model=MODEL, prompt="Answer: ", max_tokens=40, seed=3, extra_body=body).choices[0]
    assert text.finish_reason == "length" or re.fullmatch(pattern, text.text)


def test_an_object_is_an_object(api):
    answer = ask(api, response_format={"type": "json_object"}, max_tokens=300, temperature=0.3).choices[0]
    assert answer.message.content.startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


def test_free_text_becomes_a_call_after_its_trigger(api):
    tag = {"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}
    wanted = {"type": "structural_tag", "structures": [tag], "triggers": ["<call>"]}
    question = [{"role": "user", "content": "Say <call>"}]
    text = ask(api, messages=question, response_format=wanted, temperature=1.0).choices[0].message.content
    for found in re.finditer("<call>(.*?)(</call>|$)", text, re.DOTALL):
        assert re.fullmatch(r"-?\d*", found[1])


REFUSED = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"not": {"multipleOf": 2}}},
            }
        },
        "not",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema is missing"),
    ({"response_format": {"type": "json_schema"}}, "schema is missing"),
    ({"extra_body": {"structured_outputs": {"regex": "a(?=b)"}}}, "look-around"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "2 kinds"),
    ({"extra_body": {"structured_outputs": {}}}, "0 kinds"),
    ({"extra_body": {"structured_outputs": {"choice": []}}}, "empty choice"),
    ({"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}}, "neither Lark nor GBNF"),
    ({"extra_body": {"structured_outputs": {"json": "{"}}}, "not valid JSON"),
    ({"response_format": FORMAT, "extra_body": {"min_tokens": 3}}, "min_tokens"),
    ({"response_format": FORMAT, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ({"response_format": FORMAT, "extra_body": {"structured_outputs": {"regex": "a"}}}, "cannot be combined"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_keywords_that_cannot_be_enforced_are_refused_by_name(api, fields, message):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
        ask(api, **fields)
    assert caught.value.param


def test_lenient_has_to_be_asked_for(api):
    item = {"type": "integer", "minimum": 1, "maximum": 2}
    schema = {"type": "array", "items": item, "maxItems": 3, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(api, extra_body={"structured_outputs": {"json": schema}})
    answer = ask(api, extra_body={"structured_outputs": {"json": schema, "lenient": True}})
    assert set(json.loads(answer.choices[0].message.content)) <= {1, 2}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {},
        "additionalProperties": False}}}  # fmt: skip


def check_calls(calls) -> None:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_time":
            assert arguments == {}
        else:
            assert call.function.name == "get_weather"
            assert list(arguments) == ["city", "unit"] and arguments["unit"] in ("C", "F")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("choice", ["required", "get_weather", "get_time"])
def test_a_choice_of_tools_is_kept(api, choice, temperature):
    named = {"type": "function", "function": {"name": choice}}
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice if choice == "required" else named,
              "temperature": temperature, "parallel_tool_calls": False}  # fmt: skip
    whole = ask(api, **fields).choices[0]
    assert whole.finish_reason == "tool_calls" and len(whole.message.tool_calls) == 1 and not whole.message.content
    check_calls(whole.message.tool_calls)
    assert choice in ("required", whole.message.tool_calls[0].function.name)
    pieces = [c.choices[0].delta for c in ask(api, **fields, stream=True)]
    reported = "".join(t.function.arguments or "" for p in pieces for t in p.tool_calls or ())
    assert reported == whole.message.tool_calls[0].function.arguments


@pytest.mark.parametrize("strict", [True, False])
def test_a_tool_can_only_be_called_well(api, strict):
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": strict}}, TIME]
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = 0
    for seed in range(6):
        fields = {"messages": question, "tools": tools, "temperature": 1.2 * (seed > 0), "seed": seed}
        answer = ask(api, **fields).choices[0]
        if answer.finish_reason != "length":
            check_calls(answer.message.tool_calls or ())
            called += bool(answer.message.tool_calls)
        pieces = [c.choices[0].delta for c in ask(api, **fields, stream=True)]
        assert "".join(p.content or "" for p in pieces) == (answer.message.content or "")
    assert called


def test_a_strict_tool_that_cannot_be_enforced_is_refused_and_others_are_loose(api):
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(api, tools=[{"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}])
    with pytest.raises(openai.BadRequestError, match="array"):
        ask(api, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}])
    for odd in (bad, {"$ref": "#/nowhere"}, {"type": "object", "properties": {"a": {"type": "?"}}}):
        loose = {"type": "function", "function": {"name": "f", "parameters": odd}}
        answer = ask(api, tools=[loose, WEATHER], tool_choice="required", max_tokens=60,
                     extra_body={"thinking_token_budget": 0}).choices[0]  # fmt: skip
        assert answer.message.tool_calls[0].function.name in ("f", "get_weather")


def test_text_beside_tools_is_free(api):
    """Its length may be asked for, and what would end it may be ignored."""
    body = {"temperature": 0.8, "max_tokens": 30, "tools": [WEATHER]}
    long = ask(api, **body, extra_body={"ignore_eos": True}).choices[0]
    assert long.finish_reason == "length"
    assert ask(api, **body, extra_body={"min_tokens": 30}).usage.completion_tokens == 30


@pytest.mark.parametrize("budget", [0, 4])
def test_reasoning_has_a_budget(api, budget):
    fields = {"messages": [{"role": "system", "content": "/think"}, *ASK], "temperature": 0}
    free = ask(api, **fields).choices[0].message
    assert free.reasoning_content
    for more in ({}, {"response_format": FORMAT}, {"tools": [WEATHER]}, {"logprobs": True}, {"stream": True},
                 {"tools": [WEATHER], "tool_choice": "required"}):  # fmt: skip
        body = {"thinking_token_budget": budget, "return_token_ids": True}
        whole = ask(api, **{**fields, **more, "stream": False}, extra_body=body).choices[0]
        message, (start, end) = whole.message, (whole.token_ids.index(i) for i in (3, 4))
        assert end - start - 1 == budget
        thought = getattr(message, "reasoning_content", "") or ""
        assert bool(thought) == bool(budget) and ("tools" in more or free.reasoning_content.startswith(thought))
        if "response_format" in more:
            assert is_person(message.content)
        check_calls(message.tool_calls or ())
        if "stream" in more:
            pieces = [c.choices[0].delta for c in ask(api, **fields, stream=True, extra_body=body)]
            assert "".join(p.content or "" for p in pieces) == message.content


def test_a_budget_without_reasoning_is_refused(api):
    for budget in (-1, 2**31):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
            ask(api, extra_body={"thinking_token_budget": budget})
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        body = {"thinking_token_budget": 3, "structured_outputs": {"regex": "a"}}
        api.completions.create(model=MODEL, prompt="a", extra_body=body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "nobody"),
        ({"tools": [WEATHER], "tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_choice_that_cannot_be_kept_is_refused(api, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(api, **fields)


def test_a_schema_beside_a_required_call_is_for_answers_without_a_call(api):
    """What agents with a type of output send: a call is required first, and the answer after its result is typed."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        fields = {"tools": [WEATHER], "temperature": 1.0, "parallel_tool_calls": False}
        wanted = {**fields, "tool_choice": choice, "response_format": FORMAT}
        called = ask(api, **wanted).choices[0]
        assert called.finish_reason == "tool_calls" and not called.message.content
        check_calls(called.message.tool_calls)
        with api.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=120, seed=1, **wanted) as stream:
            assert stream.get_final_completion().choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "sunny"}
    messages = [*ASK, called.message.model_dump(exclude_none=True), result]
    reply = ask(api, **fields, messages=messages, response_format=FORMAT).choices[0]
    assert reply.message.tool_calls or is_person(reply.message.content)
    reply = ask(api, **fields, messages=messages, tool_choice="none", response_format=FORMAT).choices[0]
    assert is_person(reply.message.content)
    with pytest.raises(openai.BadRequestError, match="extends"):
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"extends": {}}}}
        ask(api, **fields, tool_choice="required", response_format=bad)


@pytest.mark.parametrize("more", [{"response_format": FORMAT}, {"tools": [WEATHER], "tool_choice": "required"}],
                         ids=["schema", "call"])  # fmt: skip
def test_a_structure_does_not_make_a_chat_think(api, more):
    def thought(think: bool | None) -> list[bool]:
        body = {} if think is None else {"extra_body": {"chat_template_kwargs": {"enable_thinking": think}}}
        answers = ask(api, **more, **body, n=4, temperature=1.0, max_tokens=200).choices
        return [bool(getattr(answer.message, "reasoning_content", None)) for answer in answers]

    assert not any(thought(None)), "it does not think without a structure"
    assert not any(thought(False)) and all(thought(True))


def test_masked_rows_and_forced_tokens_are_counted(api):
    def counted() -> tuple[float, float]:
        text = httpx.get(f"{str(api.base_url).removesuffix('v1/')}metrics").text
        names = ("kvasir_masked_rows", "kvasir_forced_tokens")
        masked, forced = (float(re.search(rf"^{n}_total(?:{{.*}})? (\S+)", text, re.MULTILINE)[1]) for n in names)
        return masked, forced

    before = counted()
    ask(api, response_format=FORMAT)
    masked, forced = (now - then for now, then in zip(counted(), before, strict=True))
    assert masked > 5 and forced > 5
    before = counted()
    ask(api, tools=[WEATHER], messages=[{"role": "user", "content": "Hi"}])
    assert counted()[0] - before[0] < 5, "free text has no masks"


@pytest.mark.slow
async def test_free_text_is_sampled_as_without_a_grammar():
    """Tokens and the bits of their log-probabilities, with no mask made, at any temperature."""
    format = choose(tools="functionary")
    async with AsyncLLM(MODEL) as llm:
        front = llm.front
        specials = Vocabulary(front.tokenizer, llm.info.vocab_size).specials
        rule = Rule(tool_grammar(format, [Function("f", {})], specials), free_text(format)).text()

        async def answer(seed: int, grammar: str | None):
            params = SamplingParams(temperature=seed / 2, seed=seed, max_tokens=60, ignore_eos=True, logprobs=1)
            request = front.resolve(front.tokenizer.encode("Once"), params, grammar=grammar)
            [found] = await front.complete(request)
            return found.token_ids, [(t.logprob, t.rank) for t in found.logprobs]

        for seed in range(5):
            assert await answer(seed, rule) == await answer(seed, None)
        assert (await front.stats()).masked_rows == 0
