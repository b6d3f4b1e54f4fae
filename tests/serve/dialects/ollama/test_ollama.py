"""Ollama's API by its own client, on a live server whose engine repeats its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import ollama
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.engine.front import Front
from kvasir.serve.settings import ServeSettings
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import POISON, EchoEngine, byte_tokenizer
from tests.serve.running import assert_idle, client, live

GREEDY = {"temperature": 0, "num_predict": 12}
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant: "  # as the template has it


@pytest.fixture(scope="module")
def own(server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as own:
        yield own


def test_a_prompt_is_answered_whole_and_in_lines_alike(own):
    whole = own.generate(model="fake", prompt="hello", options=GREEDY)
    assert whole.response == PROMPT[:12] and whole.done and whole.done_reason == "length"
    assert (whole.prompt_eval_count, whole.eval_count) == (len(PROMPT), 12)
    assert whole.context == list((PROMPT + whole.response).encode())
    parts = list(own.generate(model="fake", prompt="hello", options=GREEDY, stream=True))
    assert "".join(p.response for p in parts) == whole.response
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("length", len(PROMPT), 12)
    assert last.context == whole.context


def test_a_conversation_is_answered_whole_and_in_lines_alike(own):
    whole = own.chat(model="fake", messages=HELLO, options=GREEDY)
    assert (whole.message.role, whole.message.content) == ("assistant", PROMPT[:12])
    parts = list(own.chat(model="fake", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(p.message.content for p in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count == 12


def test_the_parts_of_a_duration_sum_to_at_most_the_total(own):
    for answer in (own.chat(model="fake", messages=HELLO, options=GREEDY), own.generate(model="fake", prompt="a")):
        parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
        assert all(part > 0 for part in parts) and sum(parts) <= answer.total_duration


def test_a_context_is_continued(own):
    first = own.generate(model="fake", prompt="hello", options=GREEDY)
    second = own.generate(model="fake", prompt="more", context=first.context, options=GREEDY)
    before = bytes(first.context).decode()
    assert bytes(second.context).decode() == before + "user: more\nassistant: " + second.response


def test_raw_prompts_are_taken_as_they_are(own):
    answer = own.generate(model="fake", prompt="ab<eos>", raw=True, options={"temperature": 0})
    assert (answer.response, answer.done_reason, answer.context) == ("ab", "stop", None)
    with pytest.raises(ollama.ResponseError, match="system"):
        own.generate(model="fake", prompt="a", raw=True, system="b")


@pytest.mark.parametrize("bare", [{"raw": True}, {"suffix": "b"}])
@pytest.mark.parametrize("trust", [True, False])
def test_a_prompt_that_is_no_conversation_refuses_a_switch_of_conversations(server, bare, trust):
    body = {"model": "fake", "prompt": "a", "trust_special_tokens": trust, **bare}
    answer = httpx.post(f"{server.url}/api/generate", json=body)
    assert answer.status_code == 400 and "trust_special_tokens" in answer.json()["error"]


def test_system_and_template_are_the_requests(own):
    def reply(**fields) -> str:
        return own.generate(model="fake", prompt="hi", options={"temperature": 0, "num_predict": 30}, **fields).response

    assert reply(system="Be brief.").startswith("system: Be brief.\nuser: hi\n")
    jinja = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<eos>"
    assert reply(template=jinja, system="S") == "<system>S<user>hi"
    for go in ("{{ .Prompt }}", "{{- if .System }}{{ .System }}{{ end }}", "{{ range .Messages }}x{{ end }}"):
        with pytest.raises(ollama.ResponseError, match=r"Go's syntax.*Jinja") as caught:
            reply(template=go)
        assert caught.value.status_code == 400


def test_a_last_message_of_the_assistant_is_continued(own):
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    answer = own.chat(model="fake", messages=messages, options={"temperature": 0, "num_predict": 64})
    assert answer.prompt_eval_count == len("user: hello\nassistant: Sure, ")


def test_a_rendered_prompt_can_be_inspected(server):
    body = {"model": "fake", "messages": HELLO, "_debug_render_only": True}
    shown = httpx.post(f"{server.url}/api/chat", json=body).json()
    assert shown["_debug_info"] == {"rendered_template": PROMPT}
    body = {"model": "fake", "prompt": "hello", "_debug_render_only": True}
    assert httpx.post(f"{server.url}/api/generate", json=body).json()["_debug_info"]["rendered_template"] == PROMPT


def test_log_probabilities(own):
    fields = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 2, "options": GREEDY}
    whole = own.chat(**fields)
    assert "".join(entry.token for entry in whole.logprobs) == whole.message.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in whole.logprobs)
    parts = list(own.chat(**fields, stream=True))
    assert [entry for part in parts for entry in part.logprobs or ()] == list(whole.logprobs)
    with pytest.raises(ollama.ResponseError, match="top_logprobs"):
        own.generate(model="fake", prompt="a", top_logprobs=3)


def test_a_drawn_seed_is_reported_and_reproduces_the_text(server):
    def ask(**options) -> dict:
        body = {"model": "fake", "prompt": "abcdefghij", "raw": True, "stream": False}
        return httpx.post(f"{server.url}/api/generate", json={**body, "options": {"num_predict": 8, **options}}).json()

    drawn = [ask(seed=seed) for seed in (None, -1)]
    assert drawn[0]["seed"] != drawn[1]["seed"] >= 0
    for answer in drawn:
        assert ask(seed=answer["seed"])["response"] == answer["response"]
    assert "seed" not in ask(temperature=0)


def test_several_choices_of_a_chat(server):
    body = {"model": "fake", "messages": HELLO, "n": 3, "options": {"seed": 5, "num_predict": 6}}
    whole = httpx.post(f"{server.url}/api/chat", json={**body, "stream": False}).json()
    assert [a["index"] for a in whole["answers"]] == [0, 1, 2] and whole["eval_count"] == 18
    assert whole["message"] == whole["answers"][0]["message"]
    lines = [json.loads(text) for text in httpx.post(f"{server.url}/api/chat", json=body).text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 18 and "index" not in lines[-1]
    for answer in whole["answers"]:
        mine = [line for line in lines if line.get("index") == answer["index"]]
        assert "".join(line["message"]["content"] for line in mine) == answer["message"]["content"]
        assert [line["done_reason"] for line in mine if "done_reason" in line] == [answer["done_reason"]]


def test_nothing_asked_loads_and_the_only_model_stays(own):
    for load in (own.generate(model="fake"), own.chat(model="fake", messages=[], keep_alive="5m")):
        assert load.done and load.done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="stays loaded"):
        own.generate(model="fake", keep_alive=0)


def test_embeddings(own, server):
    [one, other] = own.embed(model="fake", input=["ab", "cd"]).embeddings
    assert one != other and abs(sum(x * x for x in one) - 1) < 1e-5
    assert own.embed(model="fake", input="ab").embeddings == [one]
    assert own.embed(model="fake", input="").embeddings == []
    assert len(own.embeddings(model="fake", prompt="ab").embedding) == len(one)
    assert list(own.embeddings(model="fake", prompt="").embedding) == []
    long = "a" * 600
    with pytest.raises(ollama.ResponseError, match=r"600.*512"):
        own.embed(model="fake", input=long)
    cut = own.embed(model="fake", input=[long], truncate=True)
    assert cut.prompt_eval_count == 512 and cut.embeddings == own.embed(model="fake", input=long[:512]).embeddings
    body = {"model": "fake", "input": [long, "b"], "truncate": True}
    assert httpx.post(f"{server.url}/api/embed", json=body).json()["truncated"] == {"tokens": 88}


def test_models_are_listed_and_shown(own, server):
    [listed], [running] = own.list().models, own.ps().models
    assert listed.model == running.model == "fake" and listed.digest == running.digest
    assert running.context_length == 512 and running.expires_at.year == 9999
    shown = own.show("fake")
    assert shown.modelinfo["fake.context_length"] == 512 and "messages" in shown.template
    assert {"completion", "embedding"} <= set(shown.capabilities)
    assert own.show("fake:latest").details == listed.details, "the default tag may be given"
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2
    for path in ("/", "/api/version", "/api/tags"):
        assert httpx.head(server.url + path).status_code == 200, "what clients ask first"


async def test_the_async_client(server):
    async with ollama.AsyncClient(host=server.url) as own:
        await talk(own)


async def talk(own: ollama.AsyncClient) -> None:
    whole = await own.chat(model="fake", messages=HELLO, options=GREEDY)
    parts = [part async for part in await own.chat(model="fake", messages=HELLO, options=GREEDY, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    answer = await own.generate(model="fake", prompt="hello", options=GREEDY)
    assert answer.response == whole.message.content
    assert (await own.embed(model="fake", input="a")).embeddings
    assert (await own.list()).models and (await own.ps()).models and (await own.show("fake")).template
    many = await asyncio.gather(
        *(own.generate(model="fake", prompt=f"p{i}", raw=True, options=GREEDY) for i in range(8))
    )
    assert [m.response[:2] for m in many] == [f"p{i}" for i in range(8)]


def test_a_silence_is_broken_by_an_empty_line_of_the_answer():
    settings = ServeSettings(port=0, ping=0.02)
    with live(settings, step_seconds=0.1) as server, ollama.Client(host=server.url) as own:
        parts = list(own.chat(model="fake", messages=HELLO, options={"temperature": 0, "num_predict": 3}, stream=True))
        assert "".join(p.message.content for p in parts) == PROMPT[:3] and len(parts) > 4
        assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]


def test_a_body_declared_as_a_form_is_read_as_json(server):
    body = json.dumps({"model": "fake", "prompt": "hello", "stream": False, "options": GREEDY})
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        headers = {"Content-Type": kind} if kind else {}
        answer = httpx.post(f"{server.url}/api/generate", content=body, headers=headers)
        assert answer.json()["response"] == PROMPT[:12]


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_nothing_is_cut_unasked(own):
    long = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(ollama.ResponseError, match=r"512.*truncate"):
        own.chat(model="fake", messages=long)
    with pytest.raises(ollama.ResponseError, match=r"num_ctx.*513"):
        own.chat(model="fake", messages=HELLO, options={"num_ctx": 513})
    with pytest.raises(ollama.ResponseError, match=r"20.*num_ctx"):
        own.chat(model="fake", messages=HELLO, options={"num_ctx": 20})
    answer = own.chat(model="fake", messages=HELLO, options={"num_ctx": 40, "num_predict": 400})
    assert (answer.eval_count, answer.done_reason) == (40 - len(PROMPT), "length")
    assert own.chat(model="fake", messages=HELLO, options={"num_ctx": 40, "num_predict": -1}).eval_count == 17


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    roles=st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=8, max_size=8),
    num_ctx=st.integers(120, 512),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncation_drops_the_oldest_messages_and_reports_their_number(server, lengths, roles, num_ctx):
    messages = [{"role": role, "content": f"{i}" * n} for i, (n, role) in enumerate(zip(lengths, roles, strict=False))]
    messages[-1] = {"role": "user", "content": "last"}
    body = {"model": "fake", "messages": messages, "truncate": True, "stream": False}
    body["options"] = {"num_ctx": num_ctx, "num_predict": 10, "temperature": 0}
    response = httpx.post(f"{server.url}/api/chat", json=body)
    answer = response.json()

    def rendered(kept: list[dict]) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in kept) + "assistant: "

    others = [m for m in messages[:-1] if m["role"] != "system"]
    for count in range(len(others) + 1):
        kept = [m for m in messages if not any(m is gone for gone in others[:count])]
        if len(rendered(kept)) <= num_ctx - 10 or count == len(others):
            break
    if len(rendered(kept)) >= num_ctx:
        assert response.status_code == 400 and "context holds" in answer["error"]
    else:
        assert answer["prompt_eval_count"] == len(rendered(kept))
        assert answer.get("truncated") == ({"messages": count} if count else None)


def test_a_truncated_conversation_is_still_valid():
    """Results of tools go with their calls, and a template that wants turns in order gets them."""
    strict = (
        "{% for m in messages %}{% if loop.first and m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a" * 50},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b" * 10, "tool_name": "f"},
        {"role": "assistant", "content": "c" * 10},
        {"role": "user", "content": "d" * 10},
    ]
    with live(front=Front(EchoEngine(), byte_tokenizer(), ChatTemplate(strict))) as server:
        for num_ctx, left_out in ((200, 0), (70, 4), (30, 4)):
            options = {"num_ctx": num_ctx, "num_predict": 5}
            body = {"model": "fake", "messages": messages, "truncate": True, "stream": False, "options": options}
            answer = httpx.post(f"{server.url}/api/chat", json=body).json()
            assert answer.get("truncated", {"messages": 0}) == {"messages": left_out}


def test_a_prompt_is_cut_in_its_middle(server):
    body = {"model": "fake", "prompt": "0123456789" * 10, "raw": True, "truncate": True, "stream": False}
    body["options"] = {"num_ctx": 60, "num_keep": 5, "num_predict": 20, "temperature": 0}
    answer = httpx.post(f"{server.url}/api/generate", json=body).json()
    assert answer["truncated"] == {"tokens": 60} and answer["prompt_eval_count"] == 40
    assert answer["response"] == ("01234" + ("0123456789" * 10)[65:])[:20]


# -- errors ------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"options": {"tfs_z": 0.5}}, "tfs_z"),
    ({"options": {"penalize_newline": False}}, "penalize_newline"),
    ({"options": {"mirostat": 1}}, "mirostat"),
    ({"options": {"presence_penalty": 1.2, "repeat_last_n": -2}}, "repeat_last_n"),
    ({"options": {"repeat_penalty": 1.2, "repeat_last_n": -2}}, "repeat_last_n"),
    ({"options": {"num_predict": 0}}, "num_predict"),
    ({"options": {"temperature": -1}}, "temperature"),
    ({"options": {"top_k": 1.5}}, "top_k"),
    ({"options": {"logit_bias": {"x": 1}}}, "logit_bias"),
    ({"options": {"colour": "red"}}, "options.colour"),
    ({"images": ["aGk="]}, "images"),
    ({"width": 512}, "width"),
    ({"shift": True}, "shift"),
    ({"think": True}, "think"),
    ({"think": "max"}, "think"),
    ({"format": "xml"}, "format"),
    ({"format": {"type": "object", "patternProperties": {"a": 5}}}, "format"),
    ({"keep_alive": "5 minutes"}, "keep_alive"),
    ({"keep_alive": float("1e300")}, "keep_alive"),
    ({"suffix": "b"}, "suffix"),
    ({"n": 1000}, "n is"),
    ({"colour": "red"}, "colour"),
    ({"context": [99999]}, "token id"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_an_unsupported_value_is_refused_by_name(server, fields, named):
    answer = httpx.post(f"{server.url}/api/generate", json={"model": "fake", "prompt": "a", **fields})
    assert answer.status_code == 400 and set(answer.json()) == {"error"}
    assert named in answer.json()["error"]


def test_options_of_other_engines_change_nothing(own):
    harmless = {
        **{"num_gpu": 99, "num_thread": 4, "use_mmap": True, "numa": False, "num_batch": 512, "main_gpu": 0},
        **{"low_vram": False, "vocab_only": False, "f16_kv": True, "logits_all": False, "use_mlock": False},
        **{"embedding_only": False, "num_keep": 4, "tfs_z": 1, "penalize_newline": True, "repeat_last_n": 64},
        **{"typical_p": 1.0, "num_ctx": 512.0, "mirostat": 0, "min_p": 0.0, "stop": [], "seed": 3},
    }
    plain = own.generate(model="fake", prompt="hello", options={**GREEDY, "seed": 3})
    assert own.generate(model="fake", prompt="hello", options={**GREEDY, **harmless}).response == plain.response


def test_errors_are_the_clients_own(own, server):
    with pytest.raises(ollama.ResponseError) as caught:
        own.chat(model="nobody", messages=HELLO)
    assert caught.value.status_code == 404 and "nobody" in caught.value.error
    with pytest.raises(ollama.ResponseError) as caught:
        list(own.chat(model="nobody", messages=HELLO, stream=True))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        own.generate(model="fake", prompt=POISON, raw=True)
    assert caught.value.status_code == 500 and "SecretError" not in caught.value.error
    server.ask(assert_idle(server.front))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("-1m", -60.0),
        ("0", 0.0),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        (42, 42.0),
        (-1, -1.0),
    ],
)
def test_keep_alive_durations_are_parsed(text, seconds):
    from kvasir.serve.dialects.ollama.wire import to_seconds

    assert to_seconds(text) == pytest.approx(seconds)


async def test_samplers_and_defaults_reach_the_engine():
    """What is asked for is asked of the engine; what is not has Ollama's defaults below the model's own."""
    seen = []

    async def ask(options: dict, **info) -> object:
        front = Front(EchoEngine(info=info), byte_tokenizer(), ChatTemplate("{{ messages[0].content }}"))
        stream = front.stream
        front.stream = lambda core, *rest: (seen.append(core.params), stream(core, *rest))[1]  # type: ignore[method-assign]
        async with client(front=front) as http:
            body = {"model": "fake", "prompt": "a", "stream": False, "options": {"num_predict": 2, **options}}
            response = await http.post("/api/generate", json=body)
            assert response.status_code == 200, response.text
        return seen[-1]

    plain = await ask({})
    assert (plain.temperature, plain.top_k, plain.top_p, plain.repetition_penalty) == (0.8, 40, 0.9, 1.0)
    own = await ask({"top_k": 7}, default_sampling={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty) == (0.6, 7, 0.9, 1.05)
    off = await ask({"repeat_last_n": 0, "repeat_penalty": 1.3, "presence_penalty": 1})
    assert (off.repetition_penalty, off.presence_penalty) == (1.0, 0.0)
    for window, asked in ((64, {}), (9, {"repeat_last_n": 9}), (-1, {"repeat_last_n": -1})):
        params = await ask({"repeat_penalty": 1.1, **asked})
        assert (params.repetition_penalty, params.repetition_last_n, params.occurrence_last_n) == (1.1, window, 0)
        params = await ask({"presence_penalty": 0.5, **asked})
        assert (params.presence_penalty, params.occurrence_last_n) == (0.5, window)
    assert own.repetition_last_n == -1, "what a model recommends is meant for all"
    mirostat = await ask({"mirostat": 2, "mirostat_tau": 3.0})
    assert (mirostat.top_k, mirostat.top_p, mirostat.mirostat_tau) == (0, 1.0, 3.0)
    rest = {
        **{"min_p": 0.1, "typical_p": 0.5, "repeat_penalty": 1.2, "repeat_last_n": -1, "frequency_penalty": 0.5},
        **{"stop": ["x", "y"], "seed": 9, "logit_bias": {"5": -3}, "min_tokens": 1, "ignore_eos": True},
        **{
            "xtc_probability": 0.2,
            "dry_multiplier": 0.8,
            "top_n_sigma": 1.0,
            "dynatemp_range": 0.1,
            "bad_words": ["q"],
        },
    }
    params = await ask(rest)
    assert (params.min_p, params.typical_p, params.repetition_penalty, params.frequency_penalty) == (0.1, 0.5, 1.2, 0.5)
    assert (params.stop, params.seed, params.logit_bias, params.min_tokens) == (("x", "y"), 9, {5: -3}, 1)
    assert (params.xtc_probability, params.dry_multiplier, params.bad_words) == (0.2, 0.8, ("q",))
