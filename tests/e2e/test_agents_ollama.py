"""An agent on the bundled model, by Ollama's client: tools, several turns, lines, structure, cancels."""

from __future__ import annotations

import asyncio
import json

import httpx
import ollama
import pytest

from kvasir.weights.find import ASSETS as BUNDLED
from tests.e2e.server import serving
from tests.e2e.test_agents_openai import MODEL, TOOLS, run
from tests.e2e.test_serve import settled
from tests.e2e.test_structured import ASK, PERSON, is_person
from tests.later import openai

ASSETS = BUNDLED / MODEL
GREEDY = {"temperature": 0, "num_predict": 120}
SEEDED = {"temperature": 0.5, "seed": 3, "top_k": 0, "top_p": 1.0, "num_predict": 120}


@pytest.fixture(scope="module")
def own(server):
    with ollama.Client(host=server) as own:
        yield own


def whole(own: ollama.Client, messages: list, **fields) -> dict:
    answer = own.chat(model=MODEL, messages=messages, tools=TOOLS, **fields)
    assert answer.done_reason == "stop" and answer.eval_count > 0 < answer.prompt_eval_count
    return answer.message.model_dump(exclude_none=True)


def streamed(own: ollama.Client, messages: list, **fields) -> dict:
    """The same, put together from lines."""
    message: dict = {"role": "assistant", "content": ""}
    parts = list(own.chat(model=MODEL, messages=messages, tools=TOOLS, stream=True, **fields))
    for part in parts:
        message["content"] += part.message.content or ""
        for call in part.message.tool_calls or ():
            message.setdefault("tool_calls", []).append(call.model_dump())
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    return message


def converse(own: ollama.Client, ask, questions: list[str], **fields) -> list[dict]:
    """A conversation in which every call is run, until each question has its answer in words."""
    messages: list[dict] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            messages.append(ask(own, messages, **fields))
            calls = [call["function"] for call in messages[-1].get("tool_calls", ())]
            if not calls:
                break
            for call in calls:
                result = json.dumps(run(call["name"], json.dumps(call["arguments"])))
                messages.append({"role": "tool", "tool_name": call["name"], "content": result})
        assert messages[-1]["role"] == "assistant" and messages[-1]["content"], "no answer in words"
    return messages


def test_an_agent_calls_its_tools_and_answers_from_their_results(own):
    messages = converse(own, whole, ["How old is Anna?", "What is 123 + 456?", "How old is Peter?"], options=GREEDY)
    called = [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())]
    assert called == ["get_age", "add", "get_age"]
    words = " ".join(m["content"] for m in messages if m["role"] == "assistant")
    assert "31" in words and "579" in words and "54" in words


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_streamed_lines_equal_whole_answers(own, options):
    questions = ["How old is Anna?", "How old is Peter?"]
    assert converse(own, streamed, questions, options=options) == converse(own, whole, questions, options=options)


def test_the_openai_dialect_gives_the_same_text(own, server):
    ask = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 23 + 45?"}]
    with openai.OpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0) as other:
        for options, fields in ((GREEDY, {"temperature": 0}), (SEEDED, {"temperature": 0.5, "seed": 3, "top_p": 1.0})):
            theirs = other.chat.completions.create(model=MODEL, messages=ask, max_tokens=120, **fields)
            mine = own.chat(model=MODEL, messages=ask, options=options)
            assert mine.message.content == theirs.choices[0].message.content
            counts = (theirs.usage.prompt_tokens, theirs.usage.completion_tokens)
            assert (mine.prompt_eval_count, mine.eval_count) == counts
    prompt = own.generate(model=MODEL, prompt=ask[1]["content"], system=ask[0]["content"], options=GREEDY)
    assert prompt.response == own.chat(model=MODEL, messages=ask, options=GREEDY).message.content


def test_thinking_can_be_switched(own):
    ask = [{"role": "user", "content": "What is 23 + 45?"}]
    thought = own.chat(model=MODEL, messages=ask, think=True, options=GREEDY).message
    assert thought.thinking and "<think>" not in thought.content
    parts = list(own.chat(model=MODEL, messages=ask, think=True, options=GREEDY, stream=True))
    assert "".join(p.message.thinking or "" for p in parts) == thought.thinking
    assert "".join(p.message.content or "" for p in parts) == thought.content
    assert own.chat(model=MODEL, messages=ask, think=False, options=GREEDY).message.thinking is None
    bounded = {**GREEDY, "thinking_token_budget": 4}
    short = own.chat(model=MODEL, messages=ask, think=True, options=bounded).message
    assert short.content and len(short.thinking) < len(thought.thinking)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_a_format(own, temperature):
    options = {"temperature": temperature, "seed": 1, "num_predict": 120}
    answer = own.chat(model=MODEL, messages=ASK, format=PERSON, options=options)
    assert answer.done_reason == "stop" and is_person(answer.message.content)
    parts = own.generate(model=MODEL, prompt=ASK[0]["content"], format=PERSON, options=options, stream=True)
    assert "".join(part.response for part in parts) == answer.message.content
    free = own.generate(
        model=MODEL, prompt="An object, please.", format="json", options={**options, "num_predict": 400}
    )
    assert free.done_reason == "length" or isinstance(json.loads(free.response), dict)


async def test_a_penalty_with_a_window_is_the_same_alone_and_among_others(server):
    async def reply(last_n: int) -> str:
        options = {"temperature": 0, "num_predict": 60, "repeat_penalty": 1.5, "repeat_last_n": last_n}
        return (await other.generate(model=MODEL, prompt="Once there was", raw=True, options=options)).response

    async with ollama.AsyncClient(host=server) as other:
        alone = [await reply(n) for n in (8, 40, -1, 10**6)]
        assert list(await asyncio.gather(*(reply(n) for n in (8, 40, -1, 10**6)))) == alone
    assert alone[2] == alone[3] and len(set(alone)) > 1


def test_a_call_that_has_to_be_made_is_made(own, server):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How old is Anna?"}],
        "tools": TOOLS,
        "stream": False,
    }
    body |= {
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "options": {**GREEDY, "temperature": 1.0},
    }
    message = httpx.post(f"{server}/api/chat", json=body, timeout=60).json()["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert set(message["tool_calls"][0]["function"]["arguments"]) == {"a", "b"}


def test_the_details_of_the_model_are_true(own):
    shown = own.show(MODEL)
    assert {"completion", "tools", "thinking", "embedding"} == set(shown.capabilities)
    [listed], [running] = own.list().models, own.ps().models
    family = listed.details.family
    assert shown.modelinfo[f"{family}.embedding_length"] == len(own.embed(model=MODEL, input="a fox").embeddings[0])
    assert shown.modelinfo["general.parameter_count"] > 10**6 and listed.details.parameter_size.endswith("M")
    assert running.context_length == shown.modelinfo[f"{family}.context_length"]


async def test_disconnected_agents_affect_no_others(server, own):
    expected = converse(own, whole, ["How old is Anna?"], options=GREEDY)

    async def leave(other: ollama.AsyncClient, lines: int) -> None:
        options = {"temperature": 1.5, "seed": lines, "num_predict": 200}
        ask = [{"role": "user", "content": "Tell me a story."}]
        async for _ in await other.chat(model=MODEL, messages=ask, tools=TOOLS, stream=True, options=options):
            lines -= 1
            if lines <= 0:
                return

    async with ollama.AsyncClient(host=server) as other:
        work = [leave(other, n) for n in range(1, 9)]
        work += [
            asyncio.to_thread(converse, own, ask, ["How old is Anna?"], options=GREEDY) for ask in (whole, streamed)
        ]
        results = await asyncio.gather(*work)
    assert [r for r in results if r] == [expected, expected]
    await settled(server)


@pytest.mark.slow
def test_thinking_can_be_disabled_for_a_model_that_always_thinks(tmp_path):
    always = tmp_path / "always.jinja"
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    always.write_text(turns + "<|im_start|>assistant\n<think>\n")
    ask = [{"role": "user", "content": "What is 23 + 45?"}]
    with serving(MODEL, "--chat-template", str(always)) as (base, _), ollama.Client(host=base) as own:
        assert own.chat(model=MODEL, messages=ask, options=GREEDY).message.thinking
        for answer in (
            own.chat(model=MODEL, messages=ask, think=False, options=GREEDY).message,
            own.generate(model=MODEL, prompt=ask[0]["content"], think=False, options=GREEDY),
        ):
            assert not answer.thinking
            assert answer["content" if "content" in answer else "response"]
        body = {"model": MODEL, "messages": ask, "think": "low"}
        assert httpx.post(f"{base}/api/chat", json=body).status_code == 400


@pytest.mark.slow
def test_models_from_pull_to_delete(tmp_path, monkeypatch):
    """A server over an empty store, and nothing but the client: get a model, make one of it and one of its files, ask
    all three, and leave nothing."""
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    ask = [{"role": "user", "content": "What is 23 + 45?"}]
    with serving("--max-num-seqs=4") as (base, _), ollama.Client(host=base, timeout=120) as own:
        assert own.list().models == []
        with pytest.raises(ollama.ResponseError, match="pull"):
            own.chat(model=MODEL, messages=ask)
        assert list(own.pull(MODEL, stream=True))[-1].status == "success"
        own.create("brief", from_=MODEL, system="Be brief.", parameters={"temperature": 0, "num_predict": 40})
        names = [path.name for path in ASSETS.iterdir() if path.suffix in (".json", ".safetensors")]
        files = {name: own.create_blob(ASSETS / name) for name in names}
        assert list(own.create("uploaded", files=files, stream=True))[-1].status == "success"
        reply = own.chat(model=MODEL, messages=ask, options=GREEDY).message.content
        assert reply and own.chat(model="uploaded", messages=ask, options=GREEDY).message.content == reply
        brief = own.chat(model="brief", messages=ask)
        system = {"role": "system", "content": "Be brief."}
        same = own.chat(model=MODEL, messages=[system, *ask], options={"temperature": 0, "num_predict": 40})
        assert (brief.message.content, brief.eval_count) == (same.message.content, same.eval_count)
        assert {m.model for m in own.ps().models} == {"kvasir-mini:latest", "brief:latest", "uploaded:latest"}
        for model in own.list().models:
            assert own.generate(model=model.model, keep_alive=0).done_reason == "unload"
            own.delete(model.model)
        assert own.list().models == []
    assert not [path for path in (tmp_path / "store").rglob("*.safetensors")]
