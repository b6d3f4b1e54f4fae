"""Keys with names, classes and shares: the file that holds them, and what they make of a request."""

from __future__ import annotations

import hashlib
import json
import os
import typing

import pytest

from kvasir.errors import ConfigError
from kvasir.serve.auth.keys import Key, KeyLimits, read_keys
from kvasir.serve.dialects.openai.wire import ServiceTier
from kvasir.serve.settings import ServeSettings
from kvasir.types import ServiceClass
from tests.serve.running import client, events, out_of_time

INTERACTIVE, BATCH, BACKGROUND = ServiceClass
ENTRY = {"key": "first-key", "name": "ann"}
DIGEST = hashlib.sha256(b"first-key").hexdigest()


def write(path, content, mode: int = 0o600):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


# -- the file ----------------------------------------------------------------------------------------------


def test_a_file_of_keys(tmp_path):
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "concurrent": 4, "max_class": "batch"}
    full = {"key": "second-key", "name": "bob", "class": "background", "weight": 2, "limits": limits}
    bounded = {"key": "third-key", "name": "eve", "limits": {"max_class": "batch"}}
    hidden = {
        "secret_sha256": hashlib.sha256(b"fourth-key").hexdigest().upper(),
        "name": "ops",
        "scopes": ["management"],
    }
    *clear, last = read_keys(write(tmp_path / "keys.json", [ENTRY, full, bounded, hidden]))
    assert (last.name, last.scopes, last.digest) == ("ops", {"management"}, hashlib.sha256(b"fourth-key").digest())
    assert tuple(clear) == (
        Key("first-key", "ann", INTERACTIVE, 1.0, KeyLimits()),
        Key("second-key", "bob", BACKGROUND, 2.0, KeyLimits(60, 1000, 4, BATCH)),
        Key("third-key", "eve", BATCH, 1.0, KeyLimits(max_class=BATCH)),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "truncated"),
        ("[{]", "malformed"),
        ("[" * 100_000, ""),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), ""),
        ([], "0 keys"),
        (ENTRY, "array"),
        ([{"key": "first-key"}], "name"),
        ([{"name": "ann"}], "secret_sha256"),
        ([ENTRY | {"secret_sha256": DIGEST}], "either"),
        ([{"name": "ann", "secret_sha256": DIGEST[1:]}], "64 hex"),
        ([ENTRY, {"name": "bob", "secret_sha256": DIGEST}], "same key"),
        ([ENTRY | {"scopes": ["root"]}], "root"),
        ([ENTRY | {"scopes": "management"}], "array"),
        ([ENTRY | {"wieght": 2}], "wieght"),
        ([ENTRY | {"limits": {"requests": 2}}], "requests"),
        ([ENTRY | {"class": "best"}], "best"),
        ([ENTRY | {"weight": 0}], "weight"),
        ([ENTRY | {"weight": "2"}], "float"),
        ([ENTRY | {"limits": {"concurrent": 0}}], "concurrent"),
        ([ENTRY | {"limits": {"tokens_per_minute": 10**10}}], "tokens_per_minute"),
        ([ENTRY | {"limits": {"tokens_per_minute": 1.5}}], "int"),
        ([ENTRY | {"class": "interactive", "limits": {"max_class": "batch"}}], "max_class"),
        ([ENTRY | {"key": "short"}], "weak"),
        ([ENTRY | {"name": "a/b"}], "named"),
        ([ENTRY, ENTRY | {"name": "bob"}], "same key"),
        ([ENTRY, ENTRY | {"key": "other-key"}], "same name"),
    ],
)
def test_a_malformed_file_is_refused_without_its_secrets(tmp_path, content, message):
    path = write(tmp_path / "keys.json", content)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert message in str(caught.value) and "first-key" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_file_that_is_open_to_others_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match="chmod"):
        read_keys(write(tmp_path / "keys.json", [ENTRY], mode))


def test_a_key_file_that_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError):
            read_keys(path)


def test_keys_of_all_kinds_together():
    named = Key("named-key", "ann")
    settings = ServeSettings(host="0.0.0.0", keys=(named,), api_keys=("plain-key", "plain-key"))
    assert settings.all_keys[0] == named and len(settings.all_keys) == 2
    assert "plain-key" not in repr(settings.all_keys) and "named-key" not in repr(settings.all_keys)
    with pytest.raises(ConfigError, match="same key"):
        ServeSettings(keys=(named,), api_keys=("named-key",))


# -- requests ----------------------------------------------------------------------------------------------

KEYS = (
    Key("plain-key", "plain"),
    Key("batch-key", "batch", BATCH, 3.0, KeyLimits(max_class=BATCH)),
    Key("ground-key", "ground", BACKGROUND),
)


async def seen_by_the_core(path: str, secret: str | None, fields: dict, header: str | None = None):
    """The status, the error, and the core's request if there was one."""
    seen = []
    settings = ServeSettings(keys=KEYS if secret else ())
    async with client(settings) as http:
        submit = http.front.engine.submit
        http.front.engine.submit = lambda request: seen.append(request) or submit(request)
        headers = {"X-Kvasir-Class": header} if header else {}
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        body = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
            "/v1/completions": {"prompt": "x", "max_tokens": 1},
            "/v1/embeddings": {"input": "x"},
        }[path]
        response = await http.post(path, json=body | fields, headers=headers)
    return response.status_code, response.json().get("error"), seen[0] if seen else None


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("secret", "fields", "header", "expected"),
    [
        (None, {}, None, INTERACTIVE),
        (None, {}, "background", BACKGROUND),
        ("plain-key", {}, " Batch ", BATCH),
        ("plain-key", {"service_tier": "flex"}, "background", BATCH),
        ("plain-key", {"service_tier": "flex", "service_class": "background"}, None, BACKGROUND),
        ("plain-key", {"service_tier": "auto"}, "background", BACKGROUND),
        ("batch-key", {}, None, BATCH),
        ("batch-key", {"service_tier": "default"}, None, BATCH),
        ("batch-key", {"service_class": "background"}, None, BACKGROUND),
        ("ground-key", {"service_tier": "priority"}, None, INTERACTIVE),
    ],
)
async def test_the_class_comes_from_field_tier_header_and_key(secret, fields, header, expected):
    status, _, request = await seen_by_the_core(CHAT, secret, fields, header)
    assert status == 200 and request.slo is expected


@pytest.mark.parametrize(
    ("fields", "header", "served"),
    [
        ({}, None, None),
        ({"service_tier": None}, None, None),
        ({"service_class": "batch"}, None, None),
        ({"service_tier": "auto"}, None, "default"),
        ({"service_tier": "default"}, "background", "flex"),
        ({"service_tier": "flex"}, None, "flex"),
        ({"service_tier": "flex", "service_class": "interactive"}, None, "default"),
        ({"service_tier": "priority"}, None, "priority"),
        ({"service_tier": "fast"}, None, "priority"),
        ({"service_tier": "scale"}, None, "default"),
        ({"service_tier": "fast", "service_class": "batch"}, None, "flex"),
    ],
)
async def test_an_answer_states_its_service_tier_if_one_was_asked_for(fields, header, served):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}
    async with client(headers={"x-kvasir-class": header} if header else None) as http:
        whole = (await http.post(CHAT, json=body)).json()
        chunks = events((await http.post(CHAT, json=body | {"stream": True})).text)
    for found in (whole, *chunks):
        assert found.get("service_tier") == served and ("service_tier" in found) == (served is not None)


@pytest.mark.parametrize("tier", [*typing.get_args(typing.get_args(ServiceTier)[0]), "gold", "", 1])
async def test_chat_and_responses_judge_a_tier_alike(tier):
    async with client() as http:
        reported = []
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        for path, body in ((CHAT, chat), ("/v1/responses", {"input": "a", "max_output_tokens": 2})):
            answer = await http.post(path, json={**body, "service_tier": tier})
            found = answer.json()
            reported.append((answer.status_code, found.get("service_tier"), found.get("error")))
    assert reported[0] == reported[1]


@pytest.mark.parametrize(
    ("secret", "fields", "header", "status", "code"),
    [
        ("batch-key", {"service_tier": "priority"}, None, 403, "class_not_allowed"),
        ("batch-key", {"service_class": "interactive"}, None, 403, "class_not_allowed"),
        ("batch-key", {}, "interactive", 403, "class_not_allowed"),
        ("plain-key", {}, "urgent", 400, "invalid_value"),
        ("plain-key", {"service_class": "urgent"}, None, 400, "invalid_value"),
        ("plain-key", {"service_tier": "gold"}, None, 400, "invalid_value"),
    ],
)
async def test_a_class_above_the_keys_best_is_refused(secret, fields, header, status, code):
    got, error, request = await seen_by_the_core(CHAT, secret, fields, header)
    assert (got, error["code"], request) == (status, code, None)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
async def test_the_key_of_a_request_reaches_the_core_on_every_route(path):
    fields = {"service_class": "background", "deadline": 9.5, "priority": 2}
    _, _, request = await seen_by_the_core(path, "batch-key", fields)
    assert (request.tenant, request.weight, request.cache_salt) == ("batch", 3.0, "5:batch")
    assert (request.slo, request.deadline, request.priority) == (BACKGROUND, 9.5, 2)
    _, _, request = await seen_by_the_core(path, None, {})
    assert (request.tenant, request.weight, request.cache_salt) == ("", 1.0, None)
    assert (request.slo, request.deadline, request.priority) == (INTERACTIVE, None, 0)


# -- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", [0, -1, 86401, "5", True])
async def test_a_deadline_out_of_its_range_is_refused(http, deadline):
    response = await http.post("/v1/completions", json={"prompt": "x", "deadline": deadline})
    assert response.status_code == 400 and response.json()["error"]["param"] == "deadline"


@pytest.mark.parametrize("after", [0, 3])
async def test_a_deadline_that_passed_is_a_408_for_an_embedding(after):
    async with client(front=out_of_time(after)) as http:
        response = await http.post("/v1/embeddings", json={"input": "x"})
    assert response.status_code == 408 and response.json()["error"]["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
