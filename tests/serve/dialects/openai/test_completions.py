"""/v1/completions: prompts of every kind, echo and scores, streams of several answers."""

from __future__ import annotations

import pytest

from kvasir.runner.fake import fake_logprob
from kvasir.serve.dialects.openai.shapes import usage_object
from kvasir.serve.settings import ServeSettings
from kvasir.types import Usage
from tests.serve.fakes import EOS, POISON
from tests.serve.running import client, events

URL = "/v1/completions"


def body(**fields) -> dict:
    return {"prompt": "abc", "temperature": 0, "max_tokens": 5, **fields}


async def ask(http, **fields) -> dict:
    response = await http.post(URL, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def texts(http, **fields) -> list[str]:
    return [c["text"] for c in (await ask(http, **fields))["choices"]]


async def refused(http, **fields) -> dict:
    response = await http.post(URL, json=body(**fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def score(position: int) -> float:
    """What the fake engine says of any id of a prompt there."""
    return fake_logprob(0, position)[1]


async def test_the_answer_has_the_shape_of_the_api(http):
    answer = await ask(http)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    choice = {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    assert answer["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("xy", ["xyxyx"]),
        (["xy", "z"], ["xyxyx", "zzzzz"]),
        ([120, 121], ["xyxyx"]),
        ([[120, 121], [122]], ["xyxyx", "zzzzz"]),
        (["xy", [122]], ["xyxyx", "zzzzz"]),
        ("", [""]),  # becomes the beginning-of-text token, which has no text
    ],
)
async def test_prompts_of_every_kind(http, prompt, expected):
    assert await texts(http, prompt=prompt) == expected


@pytest.mark.parametrize("prompt", [[], [[]], [["a"]], {"a": 1}, 5, None, [1, "a"], [True], [1.5], [[1], 5], [[], "a"]])
async def test_a_malformed_prompt_is_refused(http, prompt):
    assert (await refused(http, prompt=prompt))["param"] == "prompt"


async def test_several_prompts_with_several_answers_keep_their_numbers(http):
    fields = {"prompt": ["abcdefgh", "12345678"], "n": 3, "temperature": 1.0, "seed": 4, "no_cache": True}
    whole = await ask(http, **fields)
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert all(c["text"].isalpha() == (c["index"] < 3) for c in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == 16 and whole["usage"]["completion_tokens"] == 30
    options = {"include_usage": True}
    chunks = events((await http.post(URL, json=body(**fields, stream=True, stream_options=options))).text)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]


def test_the_cache_is_counted_once_for_a_prompt():
    answers = [[Usage(10, 3, 8), Usage(10, 4, 8)], [Usage(5, 1, 0)]]
    assert usage_object(answers, 15) == {
        "prompt_tokens": 15,
        "completion_tokens": 8,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


async def test_a_prompts_answer_does_not_depend_on_its_neighbours(http):
    fields = {"temperature": 1.0, "seed": 9}
    together = await texts(http, prompt=["abcdefgh", "12345678"], **fields)
    alone = [await texts(http, prompt=p, **fields) for p in ("abcdefgh", "12345678")]
    assert together == [a[0] for a in alone]


async def test_a_drawn_seed_is_reported_and_reproduces_the_answer(http):
    first = (await ask(http, prompt=["abcdefgh"] * 2, temperature=1.0))["choices"]
    assert first[0]["seed"] != first[1]["seed"]
    for choice in first:
        assert await texts(http, prompt="abcdefgh", temperature=1.0, seed=choice["seed"]) == [choice["text"]]


async def test_echo_puts_the_prompt_before_the_answer(http):
    assert await texts(http, echo=True) == ["abcabcab"]
    halves = [0xA9, 0xC3]  # the answer's first token completes the prompt's last character
    assert await texts(http, prompt=halves, echo=True, max_tokens=1) == ["\ufffdé"]
    assert await texts(http, prompt=["ab", "c"], echo=True, max_tokens=1) == ["aba", "cc"]
    chunks = events((await http.post(URL, json=body(echo=True, stream=True))).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcabcab"
    assert chunks[0]["choices"][0]["text"] == "abca"


async def test_echo_without_tokens_scores_the_prompt(http):
    fields = {"prompt": "né!", "echo": True, "max_tokens": 0, "logprobs": 1}
    (choice,) = (answer := await ask(http, **fields))["choices"]
    assert choice["text"] == "né!" and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["n", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [None, score(1), score(2), score(3)],
        "top_logprobs": [None, {"bytes:\\xc3": score(1)}, {"bytes:\\xa9": score(2)}, {"!": score(3)}],
        "text_offset": [0, 1, 1, 2],
    }
    assert answer["usage"]["completion_tokens"] == 0
    (chunk,) = events((await http.post(URL, json=body(**fields, stream=True))).text)
    assert chunk["choices"] == [choice]


async def test_scores_of_prompt_and_answer_lie_side_by_side(http):
    (choice,) = (await ask(http, prompt="né", echo=True, logprobs=0, max_tokens=4))["choices"]
    assert choice["text"] == "nénén"
    scores = choice["logprobs"]
    assert scores["text_offset"] == [0, 1, 1, 2, 3, 3, 4]
    assert [scores["tokens"][i] for i in (0, 3, 6)] == ["n"] * 3
    assert scores["token_logprobs"] == [None, score(1), score(2), -0.5, -0.5, -0.5, -0.5]


async def test_logprobs_have_the_chosen_token_and_the_best(http):
    scores = (await ask(http, logprobs=2, max_tokens=3))["choices"][0]["logprobs"]
    assert scores["tokens"] == ["a", "b", "c"] and scores["text_offset"] == [0, 1, 2]
    for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert len(top) == 3 and top[token] == -0.5
    chunks = events((await http.post(URL, json=body(logprobs=2, max_tokens=3, stream=True))).text)
    assert [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]] == scores["tokens"]


async def test_prompt_logprobs_by_id(http):
    answer = await ask(http, prompt=["ab", "cd"], prompt_logprobs=0, n=2, echo=True, logprobs=3)
    for choice in answer["choices"]:
        scores = choice["prompt_logprobs"]
        token = "b" if choice["index"] < 2 else "d"
        assert choice["logprobs"]["token_logprobs"][:3] == [None, score(1), -0.5]
        assert scores[0] is None
        assert scores[1] == {str(ord(token)): {"logprob": score(1), "rank": 1, "decoded_token": token}}


async def test_token_ids_come_back_when_asked(http):
    (choice,) = (await ask(http, return_token_ids=True))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 99], [97, 98, 99, 97, 98])


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop"),
    [
        ({"stop": "c"}, "ab", "stop", "c"),
        ({"stop": ["x", "bc"]}, "a", "stop", "bc"),
        ({"stop": "c", "include_stop_str_in_output": True}, "abc", "stop", "c"),
        ({"stop": "c", "min_tokens": 4}, "abcab", "length", None),
        ({"stop_token_ids": [99]}, "ab", "stop", 99),
        ({"prompt": [97, EOS]}, "a", "stop", None),
        (
            {"prompt": [97, EOS], "ignore_eos": True, "skip_special_tokens": False},
            "a<eos>a<eos>a",
            "length",
            None,
        ),
        ({"prompt": [97, EOS], "min_tokens": 3, "max_tokens": 9}, "a_a", "stop", None),
        ({"max_tokens": None}, "abcabcabcabcabca", "length", None),
    ],
)
async def test_how_answers_end(http, fields, text, reason, stop):
    (choice,) = (await ask(http, **fields))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop)


async def test_the_default_length_fits_itself_to_the_context(http):
    answer = await ask(http, prompt="x" * 505, max_tokens=None)
    assert answer["usage"]["completion_tokens"] == 7
    assert (await refused(http, prompt="x" * 505, max_tokens=8))["param"] == "max_tokens"
    assert (await refused(http, prompt="x" * 512))["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt"),
    ],
)
async def test_an_unsupported_value_is_refused_by_name(http, fields, param):
    assert (await refused(http, **fields))["param"] == param


async def test_best_of_n_is_n(http):
    assert await texts(http, n=2, best_of=2) == ["abcab"] * 2


async def test_too_many_prompts_are_refused():
    async with client(ServeSettings(max_prompts=3, max_answers=4)) as http:
        assert (await refused(http, prompt=["a"] * 4))["param"] == "prompt"
        assert (await refused(http, prompt=["a"] * 3, n=2))["param"] == "prompt"
        assert await texts(http, prompt=["a"] * 2, n=2) == ["aaaaa"] * 4


async def test_more_prompts_than_the_queue_holds_are_served_in_turns():
    async with client(max_waiting=70, max_rows=4) as http:
        assert await texts(http, prompt=["ab"] * 200) == ["ababa"] * 200


async def test_one_prompt_that_fails_fails_the_request(http):
    for stream in (False, True):
        response = await http.post(URL, json=body(prompt=["abc", POISON, "def"], max_tokens=50, stream=stream))
        assert response.status_code == 500 or "engine_error" in response.text
        assert "[DONE]" not in response.text
