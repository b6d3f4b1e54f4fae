"""Structured output over HTTP: a schema is followed, or refused before anything is computed; none fails a server."""

from __future__ import annotations

import asyncio
import json

import jsonschema_rs
import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.front import Front
from kvasir.engine.inproc import InProcessEngine
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.guided.walk import TOKENIZER, VOCAB, make_guides
from tests.serve.fakes import template
from tests.serve.running import client

WORDS = r"^$|(^(?:\S+\s+){0,99}\S+$)"


@pytest.fixture
async def http():
    def build() -> EngineCore:
        fake = FakeRunner(vocab_size=VOCAB, num_blocks=500, max_rows=8, max_model_len=1024)
        return EngineCore(fake, Scheduler(fake.capacity, eos_ids=TOKENIZER.eos_ids, guides=make_guides()))

    async with client(front=Front(InProcessEngine(build), TOKENIZER, template())) as http:
        yield http


async def asked(http, schema, seed=0):
    wanted = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 1.0, "seed": seed}
    return await http.post("/v1/chat/completions", json={"model": "fake", **body, "response_format": wanted})


FEW = [(1, None), (None, 500), (3, 3)]
MORE = [pytest.param(*one, marks=pytest.mark.slow) for one in ((None, None), (None, 10), (0, 0), (9, 200))]


@pytest.mark.few(2)
@pytest.mark.parametrize(("least", "most"), [*FEW, *MORE])
async def test_counted_words_are_followed_or_refused(http, least, most):
    bounds = {"minLength": least, "maxLength": most}
    words = {"type": "string", "pattern": WORDS, **{key: n for key, n in bounds.items() if n is not None}}
    schema = {"type": "object", "properties": {"a": words}, "required": ["a"], "additionalProperties": False}
    for answer in await asyncio.gather(*(asked(http, schema, seed) for seed in range(2))):
        reply = answer.json()
        if answer.status_code != 200:
            assert answer.status_code == 400 and "enforced" in reply["error"]["message"], reply
        elif (choice := reply["choices"][0])["finish_reason"] == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(choice["message"]["content"]))


@pytest.mark.parametrize("more", [{"minLength": 5, "maxLength": 4}, {"pattern": "a(?=b)"}], ids=["lengths", "pattern"])
async def test_unsupported_structures_are_refused_before_computing(http, more):
    answer = await asked(http, {"type": "string", "pattern": WORDS, **more})
    assert answer.status_code == 400 and "enforced" in answer.json()["error"]["message"]
    assert (await http.front.stats()).steps == 0
