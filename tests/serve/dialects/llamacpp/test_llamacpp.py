"""llama.cpp's own routes: the engine repeats its prompt."""

from __future__ import annotations

import json
import math
import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.front import Front
from kvasir.serve.dialects.llamacpp.lines import Lines
from kvasir.serve.dialects.llamacpp.params import DEFAULTS, OFF
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import VOCAB, EchoEngine, template
from tests.serve.http.test_streams import post, wait_until
from tests.serve.running import client, live
from tests.text.test_fim import QWEN, tokenizer

MARKS = tuple(f"<{i}>" for i in range(256, VOCAB))  # as many as the byte tokenizer has


def filling() -> Front:
    """A model that has tokens for filling in the middle."""
    return Front(EchoEngine(vocab_size=VOCAB + len(QWEN)), tokenizer(*MARKS, *QWEN), template())


def body(**fields) -> dict:
    """`...` leaves a field out."""
    whole = {"prompt": "abc", "n_predict": 5, "temperature": 0, **fields}
    return {k: v for k, v in whole.items() if v is not ...}


async def ask(http, path: str = "/completion", **fields):
    response = await http.post(path, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http, path: str = "/completion", **fields) -> dict:
    response = await http.post(path, json={"prompt": "abc", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400 and error["type"] == "invalid_request_error"
    return error


def chunks(text: str) -> list[dict]:
    parts = [p for p in text.split("\n\n") if p and not p.startswith(":")]
    return [json.loads(p.removeprefix("data: ")) for p in parts]


# -- completions ---------------------------------------------------------------------------------------------


async def test_the_answer_has_the_shape_of_llama_cpp(http):
    answer = await ask(http, return_tokens=True, n_probs=2, seed=7)
    assert (answer["content"], answer["tokens"]) == ("abcab", list(b"abcab"))
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"], answer["truncated"]) == (
        True,
        "limit",
        "",
        False,
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (5, 3, 0)
    assert (answer["model"], answer["prompt"], answer["has_new_line"]) == ("fake", "abc", False)
    assert answer["generation_settings"]["seed"] == 7 and answer["generation_settings"]["n_predict"] == 5
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (3, 0, 5)
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] >= 0
    first = answer["completion_probabilities"][0]
    assert len(answer["completion_probabilities"]) == 5 and len(first["top_logprobs"]) == 2
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (97, "a", [97], -0.5)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("xy", "xyxyx"),
        ([120, 121], "xyxyx"),
        ([120, "yz"], "xyzxy"),
        (["xy", 122, ""], "xyzxy"),
        ({"prompt_string": "xy"}, "xyxyx"),
        (["xy"], "xyxyx"),
        (["xy", [122]], ["xyxyx", "zzzzz"]),
        ([[120, "y"], {"prompt_string": "z"}, "a"], ["xyxyx", "zzzzz", "aaaaa"]),
    ],
)
async def test_prompts_of_every_kind(http, prompt, expected):
    for path in ("/completion", "/completions"):
        answer = await ask(http, path, prompt=prompt)
        found = answer["content"] if isinstance(answer, dict) else [a["content"] for a in answer]
        assert found == expected


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], [[]], [None], {}, {"prompt_string": 5}, {"text": "x"}, [[1, None]], [True], [1.5], ["a", 5.5]],
)
async def test_a_malformed_prompt_is_refused(http, prompt):
    assert (await refused(http, prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "content", "stop_type", "word"),
    [
        ({}, "abcab", "limit", ""),
        ({"n_predict": ..., "max_tokens": 4}, "abca", "limit", ""),
        ({"stop": ["bc"]}, "a", "word", "bc"),
        ({"stop": "c"}, "ab", "word", "c"),
        ({"prompt": "ab<eos>"}, "ab", "eos", ""),
        ({"prompt": "ab<eos>", "ignore_eos": True}, "abab", "limit", ""),
        ({"n_predict": 0}, "", "limit", ""),
        ({"prompt": "a\n b\nc", "n_predict": 9, "n_indent": 1}, "a\n b\n", "limit", ""),
        ({"logit_bias": [["b", False]], "n_predict": 1}, "a", "limit", ""),
    ],
    ids=str,
)
async def test_an_answer_states_why_it_ended(http, fields, content, stop_type, word):
    answer = await ask(http, **fields)
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (content, stop_type, word)
    text = (await http.post("/completion", json=body(**fields, stream=True))).text
    *pieces, last = chunks(text)
    assert "".join(piece["content"] for piece in pieces) == content and not any(piece["stop"] for piece in pieces)
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "has_new_line", "truncated"):
        assert last[name] == answer[name]


async def test_an_answer_ends_with_the_context():
    async with client(max_model_len=16) as http:
        for n_predict in (-1, -2, 14, 100):
            answer = await ask(http, n_predict=n_predict)
            assert (answer["tokens_predicted"], answer["truncated"]) == (13, True)
        assert not (await ask(http, n_predict=13))["truncated"]
        answer = await http.post("/completion", json={"prompt": "x" * 16})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_several_answers_to_several_prompts(http):
    answers = await ask(http, prompt=["ab", "xyz"], n_cmpl=2, temperature=1.0, seed=3)
    assert [a["index"] for a in answers] == [0, 1, 2, 3]
    text = (
        await http.post(
            "/completion",
            json={"prompt": ["ab", "xyz"], "n": 2, "n_predict": 5, "temperature": 1.0, "seed": 3, "stream": True},
        )
    ).text
    reported = ["".join(c["content"] for c in chunks(text) if c["index"] == i) for i in range(4)]
    assert reported == [a["content"] for a in answers]


async def test_the_fields_of_the_response_can_be_selected(http):
    fields = ["content", "timings/prompt_n", "generation_settings/n_predict", "nothing", "content/more"]
    reported = {"content": "abcab", "timings/prompt_n": 3, "generation_settings/n_predict": 5}
    assert await ask(http, response_fields=fields) == reported
    same = ["timings/prompt_n", "timings/cache_n", "tokens_evaluated"]  # no two of these are one name
    assert list(await ask(http, response_fields=same)) == same


async def test_streams_carry_probabilities_and_times(http):
    fields = {"prompt": "ab", "n_predict": 3, "temperature": 0, "n_probs": 1, "timings_per_token": True, "stream": True}
    *pieces, last = chunks((await http.post("/completion", json=fields)).text)
    assert [p["completion_probabilities"][0]["id"] for p in pieces] == list(b"aba")
    assert [p["timings"]["predicted_n"] for p in pieces] == [1, 2, 3]
    assert "completion_probabilities" not in last


async def test_the_cache_is_used_unless_that_is_declined(http):
    prompt = "a prompt of several blocks, which comes again"
    await ask(http, prompt=prompt)
    assert (await ask(http, prompt=prompt))["tokens_cached"] > 0
    assert (await ask(http, prompt=prompt, cache_prompt=False))["tokens_cached"] == 0


async def test_the_time_limit_ends_an_answer_after_a_line_break():
    async with client(step_seconds=0.02) as http:
        answer = await ask(http, prompt="a\nb", n_predict=400, t_max_predict_ms=1)
        assert answer["stop_type"] == "limit" and 2 <= answer["tokens_predicted"] < 400
        answer = await ask(http, prompt="ab", n_predict=10, t_max_predict_ms=1)
        assert answer["tokens_predicted"] == 10


# -- parameters ----------------------------------------------------------------------------------------------


async def settings_of(http, **fields) -> dict:
    return (await ask(http, temperature=..., **fields))["generation_settings"]


async def test_defaults_are_those_of_llama_cpp(http):
    found = await settings_of(http)
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    assert found["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    props = (await http.get("/props")).json()["default_generation_settings"]["params"]
    assert {k: v for k, v in props.items() if k not in ("seed", "n_predict", "max_tokens")} == {
        k: v for k, v in found.items() if k not in ("seed", "n_predict", "max_tokens")
    }


async def test_a_models_recommendation_comes_before_them():
    async with client(info={"default_sampling": {"temperature": 0.6, "top_k": 7}}) as http:
        found = await settings_of(http, top_k=3)
        assert (found["temperature"], found["top_k"], found["top_p"]) == (0.6, 3, 0.95)


@pytest.mark.parametrize(
    ("samplers", "acting"),
    [
        (["top_k"], ["top_k"]),
        (["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], ["temperature", "top_k", "top_p", "min_p"]),
        (["temperature", "top-k"], ["temperature", "top_k"]),
        (["adaptive_p", "top_k"], ["top_k"]),
        ("kpt", ["temperature", "top_k", "top_p"]),
        ([], []),
    ],
    ids=str,
)
async def test_samplers_that_are_not_named_do_not_act(http, samplers, acting):
    assert (await settings_of(http, samplers=samplers))["samplers"] == acting


async def test_every_sampler_can_act(http):
    fields = {
        "repeat_penalty": 1.1, "dry_multiplier": 0.8, "top_n_sigma": 1.0, "typical_p": 0.9, "xtc_probability": 0.5,
        "repeat_last_n": -1, "adaptive_target": 0.3,
    }  # fmt: skip
    assert (await settings_of(http, **fields))["samplers"] == list(OFF)
    assert (await settings_of(http, mirostat=2))["samplers"] == ["temperature"]


async def test_values_that_turn_a_parameter_off(http):
    found = (await ask(http, temperature=-1.0, top_k=-1))["generation_settings"]
    assert (found["temperature"], found["top_k"]) == (0.0, 0)
    seeds = {(await settings_of(http, seed=seed))["seed"] for seed in (-1, 2**32 - 1, None)}
    assert len(seeds) == 3
    assert (await settings_of(http, repeat_penalty=1.5, repeat_last_n=0))["repeat_penalty"] == 1.0
    for fields, window in (
        ({}, -1),
        ({"repeat_penalty": 1.1}, 64),
        ({"repeat_last_n": 5}, 5),
        ({"repeat_last_n": -1}, -1),
    ):
        assert (await settings_of(http, **fields))["repeat_last_n"] == window
        counted = (await settings_of(http, frequency_penalty=0.5, **fields))["repeat_last_n"]
        assert counted == (window if fields else 64)


REFUSED = [
    ({"samplers": ["top_p", "top_k"]}, "samplers"),
    ({"samplers": ["infill"]}, "samplers"),
    ({"samplers": "kk"}, "samplers"),
    ({"repeat_last_n": -2, "presence_penalty": 1.1}, "repeat_last_n"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"mirostat": 1}, "mirostat"),
    ({"top_p": 2.0}, "top_p"),
    ({"repeat_penalty": -1.0}, "repeat_penalty"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
    ({"json_schema": {"not": {}}}, "json_schema"),
    ({"n_predict": -3}, "n_predict"),
    ({"n_cmpl": 0}, "n_cmpl"),
    ({"n_cmpl": 1000}, "n_cmpl"),
    ({"n_probs": 100}, "n_probs"),
    ({"logit_bias": [[5]]}, "logit_bias"),
    ({"logit_bias": [[5, True]]}, "logit_bias"),
    ({"logit_bias": [[1000, 1.0]]}, "logit_bias"),
    ({"logit_bias": [[5, 1000.0]]}, "logit_bias"),
    ({"logit_bias": {"1": 1, **{f"t{i}": 1 for i in range(2000)}}}, "logit_bias"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt"),
    ({"lora": [{"id": 0, "scale": 1.0}]}, "lora.0.id"),
    ({"min_keep": 5}, "min_keep"),
    ({"post_sampling_probs": True}, "post_sampling_probs"),
    ({"adaptive_target": 1.5}, "adaptive_target"),
    ({"adaptive_decay": 1.0}, "adaptive_decay"),
    ({"samplers": "aa"}, "samplers"),
    ({"sse_ping_interval": -2}, "sse_ping_interval"),
    ({"image_data": []}, "image_data"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda v: v if isinstance(v, str) else str(v)[:60])
async def test_an_unsupported_value_is_refused_by_name(http, fields, param):
    if param == "model":
        response = await http.post("/completion", json={"prompt": "a", **fields})
        assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    else:
        assert (await refused(http, **fields))["param"] == param


async def test_fields_without_effect_are_accepted(http):
    harmless = {
        "id_slot": 3, "n_keep": -1, "n_discard": 5, "n_cache_reuse": 256, "t_max_prompt_ms": 500, "min_keep": 0,
        "lora": [], "speculative.n_max": 16, "speculative.p_min": 0.5, "adaptive_target": -1.0, "sse_ping_interval": -1,
    }  # fmt: skip
    assert (await ask(http, **harmless))["content"] == "abcab"


# -- infill --------------------------------------------------------------------------------------------------


async def test_infill_builds_the_prompt_in_the_models_tokens():
    async with client(front=filling()) as http:
        fields = {"input_prefix": "be", "input_suffix": "af", "n_predict": 3, "temperature": 0, "ignore_eos": True}
        extra = [{"filename": "x.py", "text": "one"}]
        asked = fields | {"prompt": "mi", "input_extra": extra, "samplers": ["top_k", "top_p", "infill"]}
        answer = (await http.post("/infill", json=asked)).json()
        assert answer["prompt"] == (
            "<|repo_name|>repository\n<|file_sep|>x.py\none\n<|file_sep|>file\n"
            "<|fim_prefix|>bemi<|fim_suffix|>af<|fim_middle|>"
        )
        assert answer["generation_settings"]["samplers"] == ["top_k", "top_p"]
        streamed = chunks((await http.post("/infill", json={**fields, "stream": True})).text)
        assert streamed[-1]["prompt"] == "<|fim_prefix|>be<|fim_suffix|>af<|fim_middle|>"
        ends = (await http.post("/infill", json={**fields, "ignore_eos": False})).json()
        assert (ends["content"], ends["stop_type"]) == ("", "eos")  # a mark ends what stands in the middle


async def test_a_model_without_infill_tokens_refuses_infill(http):
    response = await http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input_suffix")


@given(st.lists(st.text("a \n\t", max_size=6), max_size=6), st.integers(1, 3))
def test_a_line_limit_ends_a_choice_for_any_split_of_its_text(pieces, indent):
    def run(parts) -> tuple[str, bool]:
        lines, kept = Lines(indent), ""
        for part in parts:
            kept += lines.push(part)
            if lines.ended:
                break
        return kept, lines.ended

    whole, text = run(["".join(pieces)]), "".join(pieces)
    assert run(pieces) == whole and text.startswith(whole[0])
    later = whole[0].split("\n")[1:]
    full = later[:-1] if later else []
    assert all(len(line) - len(line.lstrip(" \t")) >= indent for line in full)


# -- the other routes ----------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize(http):
    async def post(path, **fields):
        return (await http.post(path, json=fields)).json()

    assert await post("/tokenize", content="aé") == {"tokens": [97, 195, 169]}
    assert await post("/tokenize", content="") == {"tokens": []}
    assert await post("/tokenize", content="<eos>") == {"tokens": [256]}
    assert await post("/tokenize", content="<eos>", parse_special=False) == {"tokens": list(b"<eos>")}
    pieces = (await post("/tokenize", content="aé", with_pieces=True))["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert (await post("/detokenize", tokens=[97, 195, 169]))["content"] == "aé"
    both = await http.post("/tokenize", json={"content": "a", "prompt": "a"})
    assert both.status_code == 400


async def test_templates_are_applied(http):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await http.post("/apply-template", json=chat)).json() == {
        "prompt": "user: hi\nassistant: ",
        "foreign": [[6, 8]],
    }
    opened = {**chat, "add_generation_prompt": False}
    assert (await http.post("/apply-template", json=opened)).json() == {"prompt": "user: hi\n", "foreign": [[6, 8]]}


async def test_many_embeddings_are_written_off_the_loop(http, monkeypatch):
    threads = set()
    normalized = "kvasir.serve.dialects.llamacpp.server.normalized"
    monkeypatch.setattr(normalized, lambda vector, norm: threads.add(threading.get_ident()) or list(vector))
    assert len((await http.post("/embedding", json={"content": ["a"] * 40})).json()) == 40
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_embeddings_have_the_norm_that_is_asked_for(http, path):
    raw = [195.0, 2.0]  # the fake sums the ids, and counts them

    async def post(**fields):
        [answer] = (await http.post(path, json={"content": "ab", **fields})).json()
        assert answer["index"] == 0
        return answer["embedding"][0]

    assert await post() == pytest.approx([x / math.hypot(*raw) for x in raw])
    assert await post(embd_normalize=1) == pytest.approx([x / sum(raw) for x in raw])
    assert await post(embd_normalize=0) == pytest.approx([x / max(raw) * 32760 for x in raw])
    cubic = sum(x**3 for x in raw) ** (1 / 3)
    assert await post(embd_normalize=3) == pytest.approx([x / cubic for x in raw])
    several = (await http.post(path, json={"input": ["ab", [99], {"prompt_string": "c"}]})).json()
    assert [e["index"] for e in several] == [0, 1, 2] and several[1]["embedding"] == several[2]["embedding"]
    assert (await http.post(path, json={"content": "ab", "embd_normalize": -1})).status_code == 400


async def test_slots_and_props():
    async with client(max_rows=3) as http:
        props = (await http.get("/props")).json()
        assert props["total_slots"] == 3 and props["bos_token"] == "<bos>" and "assistant" in props["chat_template"]
        slots = (await http.get("/slots")).json()
        assert [slot["id"] for slot in slots] == [0, 1, 2] and not any(slot["is_processing"] for slot in slots)
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 200
        assert (await http.get("/slots?model=nobody")).status_code == 404


async def test_properties_slots_and_adapters_stay_as_they_are():
    async with client() as http:
        assert (await http.post("/props", json={})).json() == {"success": True}
        for path, param in (
            ("/props", "n_ctx"),
            ("/slots/0?action=save", "action"),
            ("/slots/1?action=restore", "action"),
            ("/slots/0?action=erase", "action"),
        ):
            answer = await http.post(path, json={"n_ctx": 5})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path
        assert (await http.post("/slots/0?action=burn", json={})).json()["error"]["param"] == "action"
        assert (await http.get("/lora-adapters")).json() == []
        assert (await http.post("/lora-adapters", json=[])).json() == {"success": True}
        answer = await http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert answer.status_code == 400 and "no adapter 0" in answer.json()["error"]["message"]
        answer = await http.post("/lora-adapters", json=[{"id": 0, "scale": "much"}])
        assert answer.status_code == 400 and "scale" in answer.json()["error"]["param"]
        assert (await http.get("/v1/health")).json() == (await http.get("/health")).json() == {"status": "ok"}


def test_slots_state_the_progress_of_answers_without_their_texts():
    with live(max_rows=1, step_seconds=0.02) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        connection = post(server, "/completion", b'{"prompt": "secret", "n_predict": 400, "stream": true}')
        wait_until(lambda: http.get("/slots").json()[0]["is_processing"])
        response = http.get("/slots")
        [slot] = response.json()
        assert slot["n_prompt_tokens"] == 6 and "secret" not in response.text
        assert http.get("/slots?fail_on_no_slot=1").status_code == 503
        connection.close()


def test_routes_about_the_server_ask_for_a_key():
    with live(ServeSettings(port=0, api_keys=("a-secret-key",))) as server:
        for path in ("/props", "/slots", "/lora-adapters"):
            response = httpx.get(server.url + path)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
