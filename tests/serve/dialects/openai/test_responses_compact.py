"""POST /v1/responses/compact: what remains of a conversation, and how it continues."""

from __future__ import annotations

import base64

import pytest

from kvasir.engine.front import Front
from kvasir.serve.dialects.openai.responses.compact import ASK
from kvasir.serve.dialects.openai.responses.items import SUMMARY, unsealed
from kvasir.text.chat import ChatTemplate
from tests.later import openai
from tests.serve.dialects.openai.responses_help import CALL, THOUGHT, TOOLS
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import client

TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "three"},
    {"role": "user", "content": [{"type": "input_text", "text": "four"}]},
]
SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# <think> <tool_call> #}"


def saying(template: str, **engine) -> Front:
    """A front whose model repeats what its prompt, made by the template, says."""
    return Front(EchoEngine(**engine), byte_tokenizer(), ChatTemplate(template), trust_special_tokens=True)


async def compacted(http, **fields):
    answer = await http.post("/v1/responses/compact", json={"input": TALK, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def summary_of(found) -> str:
    return unsealed(found["output"][-1]["encrypted_content"], "")


async def test_the_messages_of_users_stay_and_a_summary_follows(http):
    found = await compacted(http, max_output_tokens=40, instructions="I")
    assert found["object"] == "response.compaction" and found["id"].startswith("resp_")
    *messages, compaction = found["output"]
    assert [m["role"] for m in messages] == ["developer", "user", "user"]
    assert messages[2]["content"] == [{"type": "input_text", "text": "four"}]
    assert compaction["type"] == "compaction" and compaction["id"].startswith("cmp_")
    assert found["usage"]["output_tokens"] == 40
    read = summary_of(found)
    assert read.startswith("system: I"), "the model, which repeats its prompt, was given the whole conversation"
    openai.types.responses.ResponseCompactionItem.model_validate(compaction)
    openai.types.responses.ResponseUsage.model_validate(found["usage"])


async def test_the_model_is_asked_for_it_at_the_end():
    async with client(front=saying("{{ messages | length }} {{ messages[-1].content }}{{ tools }}")) as http:
        found = await compacted(http, max_output_tokens=60)
        assert summary_of(found) == f"6 {ASK}"[:60].strip(), "the call and the text before it are one message"


async def test_a_conversation_goes_on_from_its_summary():
    async with client(front=saying(SHOWN, max_model_len=4096, num_blocks=600)) as http:
        found = await compacted(http, max_output_tokens=30)
        body = {"input": [*found["output"], {"role": "user", "content": "five"}], "max_output_tokens": 200}
        made = (await http.post("/v1/responses", json={**body, "temperature": 0})).json()
        text = made["output"][0]["content"][0]["text"]
        assert f"user: four\nassistant: {SUMMARY}{summary_of(found)}\nuser: five\n" in text
        items = (await http.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json()["data"]
        assert [item["type"] for item in items] == ["message"] * 3 + ["compaction", "message"]
        again = await compacted(http, input=None, previous_response_id=made["id"], max_output_tokens=30)
        assert [item["type"] for item in again["output"]] == ["message"] * 4 + ["compaction"]
        asked = {"input": [{"role": "user", "content": "six"}], "previous_response_id": made["id"]}
        answer = await http.post("/v1/responses", json={**asked, "max_output_tokens": 5})
        assert answer.status_code == 200
        count = await http.post("/v1/responses/input_tokens", json={"input": found["output"]})
        assert count.json()["input_tokens"] > 30


async def test_thoughts_and_calls_are_no_summary():
    async with client(front=saying(THOUGHT + "Brief." + "{# <tool_call> #}")) as http:
        assert summary_of(await compacted(http, tools=TOOLS, max_output_tokens=len(THOUGHT) + 6)) == "Brief."
    async with client(front=saying(THOUGHT + "{# <tool_call> #}")) as http:
        body = {"input": "x", "temperature": 0, "max_output_tokens": 10}
        answer = await http.post("/v1/responses/compact", json=body)
        assert answer.status_code == 500 and "no summary" in answer.json()["error"]["message"]
    assert CALL


async def test_a_long_conversation_is_refused_or_loses_its_beginning(http):
    talk = [{"role": "user", "content": str(i) * 60} for i in range(9)]
    answer = await http.post("/v1/responses/compact", json={"input": talk, "max_output_tokens": 10})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    found = await compacted(http, input=talk, truncation="auto", max_output_tokens=10)
    assert found["dropped_items"] > 0 and len(found["output"]) == 10, "messages of users stay in any case"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": [{"type": "compaction", "encrypted_content": "kvasir1." + base64.b64encode(b"\xff").decode()}]},
        {"input": [{"type": "compaction"}]},
        {"prompt_cache_retention": "24h"},
        {"conversation": "c"},
        {"stream": True},
        {"max_output_tokens": 0},
        {"previous_response_id": "resp_x"},
    ],
)
async def test_what_cannot_be_compacted_is_refused(http, fields):
    answer = await http.post("/v1/responses/compact", json={"input": "x", **fields})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]


async def test_it_is_found_without_its_version_too(http):
    assert (await http.post("/responses/compact", json={"input": "x", "max_output_tokens": 3})).status_code == 200
