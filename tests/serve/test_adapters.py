"""Adapters over HTTP: how requests select them in each dialect, and how clients load and unload them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.adapters import AdapterOption
from kvasir.engine.front import Front
from kvasir.errors import ConfigError
from kvasir.inputs import Adapter
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.settings import ServeSettings
from kvasir.text.prompts import Prompts
from kvasir.types import Request
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import client

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}


class Recorded(EchoEngine):
    """Records the requests that the engine gets."""

    def __init__(self, **runner: Any):
        super().__init__(**runner)
        self.got: list[Request] = []

    async def submit(self, request: Request) -> AsyncIterator:
        self.got.append(request)
        async for delta in super().submit(request):
            yield delta


def written(folder: Path, name: str, config: dict | None = None) -> str:
    """An adapter as the fake runner reads one."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(config or {}))
    (path / "adapter_model.safetensors").write_bytes(name.encode())
    return str(path)


@asynccontextmanager
async def serving(
    folder: Path, *options: AdapterOption, settings: ServeSettings | None = None, **more: Any
) -> AsyncIterator[Any]:
    """A client; `http.got()` gives the adapters of the requests since the last call."""
    engine = Recorded()
    front = Front(engine, byte_tokenizer(), template(), adapters=options)
    async with client(settings or ServeSettings(lora_dirs=(folder,), **more), front) as http:

        def got() -> list[tuple[Adapter, ...]]:
            found = [tuple(Adapter(a.name, a.scale, a.start) for a in r.adapters) for r in engine.got]
            engine.got.clear()
            return found

        http.got = got  # type: ignore[attr-defined]
        yield http


def three(folder: Path) -> list[AdapterOption]:
    return [AdapterOption(name, written(folder, name)) for name in ("sql", "math", "org/chat")[:2]] + [
        AdapterOption("org/chat", written(folder, "chat"), scale=0.5)
    ]


def only(*adapters: Adapter) -> list[tuple[Adapter, ...]]:
    return [adapters]


# -- selection -----------------------------------------------------------------------------------------------


DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "store": False}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "anthropic": ("/v1/messages", CHAT),
    "ollama": ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}}),
    "ollama's generate": ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 2}}),
    "ollama's embed": ("/api/embed", {"input": "hi"}),
    "llama.cpp": ("/completion", {"prompt": "hi", "n_predict": 2}),
    "tgi": ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}),
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_selects_by_the_name_of_the_model(tmp_path, dialect):
    path, body = DIALECTS[dialect]
    async with serving(tmp_path, *three(tmp_path)) as http:
        for model, expected in (
            ("fake", ()),
            ("sql", (Adapter("sql"),)),
            ("fake:math", (Adapter("math"),)),
            ("org/chat", (Adapter("org/chat", 0.5),)),
        ):
            response = await http.post(path, json={**body, "model": model})
            assert response.status_code == 200, response.text
            assert http.got() == only(*expected)
            if dialect != "tgi":
                assert response.json()["model"] == model


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, dialect):
    path, body = DIALECTS[dialect]
    async with serving(tmp_path, *three(tmp_path)) as http:
        for model in ("sqll", "fake:sqll", "other:sql", ":sql", "sql:", "fake:", "fake:fake"):
            response = await http.post(path, json={**body, "model": model})
            assert response.status_code == 404 and "'sql', 'math', 'org/chat'" in response.text, response.text
        assert http.got() == []


async def test_an_openai_stream_has_the_name_that_was_asked_for(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        body = {**CHAT, "model": "fake:sql", "stream": True}
        text = (await http.post("/v1/chat/completions", json=body)).text
        assert text.count('"model":"fake:sql"') == text.count('"object"') > 0


async def test_fields_of_other_engines_select(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        asked = await http.post("/v1/chat/completions", json={**CHAT, "model": "fake", "lora_path": "sql"})
        assert asked.json()["model"] == "fake" and http.got() == only(Adapter("sql"))
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "lora_path": "math"})
        assert http.got() == only(Adapter("math"))
        parameters = {"max_new_tokens": 1, "adapter_id": "math"}
        await http.post("/generate", json={"inputs": "hi", "parameters": parameters})
        assert http.got() == only(Adapter("math"))
        twice = await http.post("/v1/chat/completions", json={**CHAT, "model": "math", "lora_path": "sql"})
        unknown = await http.post("/v1/chat/completions", json={**CHAT, "lora_path": "nothing"})
        assert (twice.status_code, unknown.status_code) == (400, 400) and "known: sql, math" in unknown.text
        assert unknown.json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_each_prompt_has_an_adapter_of_its_own(tmp_path, path, field):
    async with serving(tmp_path, *three(tmp_path)) as http:
        body = {field: ["a", "b", "c"], "lora_path": ["math", None, "sql"]}
        found = await http.post(path, json=body)
        assert found.status_code == 200, found.text
        assert http.got() == [(Adapter("math"),), (), (Adapter("sql"),)]
        await http.post(path, json={**body, "lora": []})
        assert http.got() == [(), (), ()]
        for given, param in ((["sql"], "lora_path"), ([], "lora_path"), (["sql", "nothing", None], "lora_path.1")):
            refused = await http.post(path, json={**body, "lora_path": given})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        both = await http.post(path, json={**body, "model": "sql"})
        assert both.status_code == 400 and "two adapters: 'sql' and 'math'" in both.text
        assert http.got() == []


@pytest.mark.parametrize("dialect", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rankings_select_too(tmp_path, dialect):
    path, body = dialect, {"query": "a", "documents": ["b", "c"]}
    async with serving(tmp_path, *three(tmp_path)) as http:
        response = await http.post(path, json={**body, "model": "sql"})
        assert response.status_code == 200 and {*http.got()} == {(Adapter("sql"),)}, response.text


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "tgi"])
async def test_a_list_of_adapters_with_scales(tmp_path, dialect):
    path, body = DIALECTS[dialect]
    async with serving(tmp_path, *three(tmp_path)) as http:
        lora: list[dict] = [{"id": 2, "scale": -1}, {"id": 0, "scale": 0.25}, {"id": 1, "scale": 0}]
        await http.post(path, json={**body, "model": "fake", "lora": lora})
        assert http.got() == only(Adapter("sql", 0.25), Adapter("org/chat", -1.0))
        await http.post(path, json={**body, "model": "fake", "lora": [{"name": "math", "scale": 2.0}]})
        assert http.got() == only(Adapter("math", 2.0))
        await http.post(path, json={**body, "model": "sql", "lora": []})
        assert http.got() == only()


async def test_a_task_of_embeddings_is_an_adapter_and_its_prompt(tmp_path):
    options, prompts = three(tmp_path), Prompts({"sql": "find: "})
    front = Front(Recorded(), byte_tokenizer(), template(), adapters=options, prompts=prompts)
    async with client(ServeSettings(), front) as http:
        for task, prompt in (("sql", "find: "), ("math", "")):
            response = await http.post("/v1/embeddings", json={"input": "a", "task": task, "add_special_tokens": False})
            assert response.status_code == 200 and response.json()["model"] == "fake"
            request: Request = front.engine.got.pop()  # type: ignore[attr-defined]
            assert bytes(request.prompt_ids).decode() == f"{prompt}a"
            assert [adapter.name for adapter in request.adapters] == [task]
        refused = await http.post("/v1/embeddings", json={"input": "a", "task": "other"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"


@pytest.mark.parametrize(
    "lora",
    [
        *([{"id": 3, "scale": 1}], [{"id": -1, "scale": 1}], [{"scale": 1}], [{"id": 0, "name": "sql"}], {}, "sql"),
        *([{"id": 0, "scale": "1"}], [{"id": 0, "scale": 1e9}], [{"id": 0}] * 65, [{"id": 0, "rank": 1}]),
    ],
)
async def test_lists_that_are_refused(tmp_path, lora):
    async with serving(tmp_path, *three(tmp_path)) as http:
        for path, body in (DIALECTS["llama.cpp"], DIALECTS["chat"]):
            response = await http.post(path, json={**body, "lora": lora})
            assert response.status_code == 400 and "lora" in response.text
        assert http.got() == []


async def test_the_settings_of_a_response_have_the_adapters(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        body = {"prompt": "hi", "n_predict": 1, "lora": [{"id": 1, "scale": 0.5}]}
        settings = (await http.post("/completion", json=body)).json()["generation_settings"]
        assert settings["lora"] == [{"id": 1, "scale": 0.5}]


async def test_an_adapter_begins_at_its_last_invocation(tmp_path):
    text = "ab use: cd use: ef"
    at = text.rindex("use:")
    config = {"alora_invocation_tokens": list(b"use:")}
    option = AdapterOption("alora", written(tmp_path, "alora", config))
    async with serving(tmp_path, option) as http:
        await http.post("/completion", json={"prompt": list(text.encode()), "n_predict": 1, "model": "alora"})
        assert http.got() == only(Adapter("alora", 1.0, at))
        await http.post("/completion", json={"prompt": list(b"us e:"), "n_predict": 1, "model": "alora"})
        assert http.got() == only()


# -- defaults ------------------------------------------------------------------------------------------------


async def test_an_adapter_without_a_name_applies_to_requests_that_select_none(tmp_path):
    every = AdapterOption("every", written(tmp_path, "every"), 1.0, 0.75)
    sql = AdapterOption("sql", written(tmp_path, "sql"))
    async with serving(tmp_path, every, sql) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        assert http.got() == only(Adapter("every", 0.75))
        await http.post("/v1/chat/completions", json={**CHAT, "model": "sql"})
        assert http.got() == only(Adapter("sql"))
        props = (await http.get("/props")).json()
        assert props["default_generation_settings"]["params"]["lora"] == [{"id": 0, "scale": 0.75}]


async def test_default_scales_are_set_by_number(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        scales = [{"id": 2, "scale": 0.5}, {"id": 0, "scale": 2}]
        assert (await http.post("/lora-adapters", json=scales)).json() == {"success": True}
        shown = (await http.get("/lora-adapters")).json()
        assert [(one["id"], one["scale"], one["path"]) for one in shown] == [
            (0, 2, "sql"),
            (1, 0, "math"),
            (2, 0.5, "chat"),
        ]
        await http.post("/completion", json={"prompt": "hi", "n_predict": 1})
        assert http.got() == only(Adapter("sql", 2.0), Adapter("org/chat", 0.5))
        await http.post("/lora-adapters", json=[])
        await http.post("/completion", json={"prompt": "hi", "n_predict": 1})
        assert http.got() == only()
        assert (await http.post("/lora-adapters", json=[{"id": 9, "scale": 1}])).status_code == 400


# -- listings ------------------------------------------------------------------------------------------------


async def test_listings_have_the_adapters_with_their_model(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        models = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
        assert [*models] == ["fake", "sql", "math", "org/chat"]
        assert models["fake"]["parent"] is None and models["sql"]["parent"] == "fake"
        assert models["org/chat"]["root"] == "chat"
        one = (await http.get("/v1/models/fake:sql")).json()
        assert (one["id"], one["parent"]) == ("fake:sql", "fake")
        assert (await http.get("/v1/models/fake:none")).status_code == 404
        tags = {model["name"]: model for model in (await http.get("/api/tags")).json()["models"]}
        assert tags["sql"]["details"]["parent_model"] == "fake" and tags["sql"]["digest"] != tags["fake"]["digest"]
        assert (await http.post("/api/show", json={"model": "sql"})).status_code == 200
        page = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [model["id"] for model in page.json()["data"]] == [*models]
        info = (await http.get("/kvasir/info", params={"model": "sql"})).json()
        assert info["model"] == "sql" and info["adapters"] == ["sql", "math", "org/chat"]


# -- loading and unloading -----------------------------------------------------------------------------------


ROUTES = ("/v1/load_lora_adapter", "/load_lora_adapter")


@pytest.mark.parametrize("route", ROUTES)
async def test_adapters_come_and_go(tmp_path, route):
    path, away = written(tmp_path, "sql"), route.replace("load", "unload", 1)
    async with serving(tmp_path) as http:
        for given in (path, "sql"):
            asked = {"lora_name": "mine", "lora_path": given}
            response = await http.post(route, json=asked)
            assert response.status_code == 200, response.text
            again = await http.post(route, json=asked)
            assert again.status_code == 400 and "loaded already" in again.text
            assert (await http.post(route, json={**asked, "load_inplace": True})).status_code == 200
            await http.post("/v1/chat/completions", json={**CHAT, "model": "mine"})
            assert http.got() == only(Adapter("mine"))
            assert (await http.post(away, json={"lora_name": "mine"})).status_code == 200
            assert (await http.post(away, json={"lora_name": "mine"})).status_code == 404
            assert (await http.post("/v1/chat/completions", json={**CHAT, "model": "mine"})).status_code == 404


async def test_metrics_of_each_adapter_end_when_it_is_unloaded(tmp_path):
    async with serving(tmp_path, *three(tmp_path)) as http:
        for model in ("sql", "sql", "math", "fake"):
            await http.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2})
        text = (await http.get("/metrics")).text
        for line in (
            'kvasir_adapter_requests_total{adapter="sql",model_name="fake"} 2.0',
            'kvasir_adapter_prompt_tokens_total{adapter="math",model_name="fake"} 2.0',
            'kvasir_adapter_generated_tokens_total{adapter="sql",model_name="fake"} 4.0',
            'kvasir_adapter_requests_open{adapter="math",model_name="fake"} 0.0',
        ):
            assert line in text
        labels = 'max_lora="8",model_name="fake",running_lora_adapters="",waiting_lora_adapters=""'
        assert f"vllm:lora_requests_info{{{labels}}} " in text
        await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        text = (await http.get("/metrics")).text
        assert 'adapter="sql"' not in text and 'adapter="math"' in text


async def test_a_model_without_adapters_has_no_metrics_of_them(tmp_path):
    async with serving(tmp_path) as http:
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        text = (await http.get("/metrics")).text
        assert "kvasir_adapters_registered" in text and 'adapter="' not in text and "lora_adapters=" not in text


async def test_sglang_gets_its_own_response(tmp_path):
    written(tmp_path, "sql")
    async with serving(tmp_path) as http:
        body = {"lora_name": "mine", "lora_path": "sql", "pinned": True}
        response = (await http.post("/load_lora_adapter", json=body)).json()
        assert response == {"success": True, "error_message": "", "loaded_adapters": {"mine": "mine"}}
        assert http.front.adapters.known[0].pinned


@pytest.mark.parametrize("route", ROUTES)
async def test_only_adapters_in_the_servers_folders_are_loaded(tmp_path, route):
    inside, outside = tmp_path / "in", tmp_path / "out"
    written(inside, "sql")
    secret = written(outside, "secret")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "linked").mkdir()
    (inside / "linked" / "adapter_model.safetensors").symlink_to(Path(secret) / "adapter_model.safetensors")
    (inside / "sibling").mkdir()
    written(tmp_path, "in-other")
    async with serving(inside) as http:
        refused = (
            secret,
            "../out/secret",
            "sql/../../out/secret",
            "link",
            "linked",
            "none",
            "/etc/passwd",
            "a\0b",
            "~",
        )
        texts = set()
        for path in (*refused, "/nonexistent", str(tmp_path / "in-other")):
            response = await http.post(route, json={"lora_name": "x", "lora_path": path})
            assert response.status_code == 400, path
            texts.add(response.json()["error"]["message"].replace(repr(path)[1:-1], ""))
        assert len(texts) == 1  # so nobody learns what exists
        assert http.front.adapters.known == ()


async def test_without_a_folder_nothing_is_loaded(tmp_path):
    path = written(tmp_path, "sql")
    async with serving(tmp_path, settings=ServeSettings()) as http:
        response = await http.post(ROUTES[0], json={"lora_name": "x", "lora_path": path})
        assert response.status_code == 400 and "--lora-dir" in response.text


@pytest.mark.parametrize("name", ["fake", "a b", "a:b", "", "a=b", "x" * 300])
async def test_names_that_cannot_be_loaded(tmp_path, name):
    written(tmp_path, "sql")
    async with serving(tmp_path) as http:
        response = await http.post(ROUTES[0], json={"lora_name": name, "lora_path": "sql"})
        assert response.status_code == 400 and http.front.adapters.known == ()


async def test_damaged_files_are_the_requests_fault(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text("{")
    async with serving(tmp_path, lora_resolve=True) as http:
        response = await http.post(ROUTES[0], json={"lora_name": "bad", "lora_path": "bad"})
        assert response.status_code == 400 and "not JSON" in response.text
        assert (await http.post("/v1/chat/completions", json={**CHAT, "model": "bad"})).status_code == 400


KEYS = (
    Key("infer-key", "infers", scopes=frozenset((KeyScope.INFERENCE,))),
    Key("manage-key", "manages", scopes=frozenset((KeyScope.MANAGEMENT,))),
)


async def test_changes_need_the_scope_management(tmp_path):
    path = written(tmp_path, "sql")
    settings = ServeSettings(lora_dirs=(tmp_path,), keys=KEYS)
    async with serving(tmp_path, settings=settings) as http:
        load: Any = {"lora_name": "a", "lora_path": path}
        bodies: dict[str, Any] = {ROUTES[0]: load, ROUTES[1]: {**load, "lora_name": "b"}, "/lora-adapters": []}
        bodies |= {"/v1/unload_lora_adapter": {"lora_name": "a"}, "/unload_lora_adapter": {"lora_name": "b"}}
        for key, status in (("infer-key", 403), ("manage-key", 200)):
            for route, body in bodies.items():
                response = await http.post(route, json=body, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == status, (route, response.text)


# -- names that are resolved ---------------------------------------------------------------------------------


async def test_a_folders_name_is_loaded_on_first_use(tmp_path):
    written(tmp_path, "sql")
    async with serving(tmp_path, lora_resolve=True) as http:
        asked = [http.post("/v1/chat/completions", json={**CHAT, "model": name}) for name in ("sql", "fake:sql") * 4]
        responses: list[httpx.Response] = await asyncio.gather(*asked)
        assert {response.status_code for response in responses} == {200}
        assert http.got() == [(Adapter("sql"),)] * 8
        assert [info.name for info in http.front.adapters.known] == ["sql"]
        parameters = {"max_new_tokens": 1, "adapter_id": "math"}
        written(tmp_path, "math")
        assert (await http.post("/generate", json={"inputs": "a", "parameters": parameters})).status_code == 200


async def test_reading_loads_nothing(tmp_path):
    written(tmp_path, "sql")
    async with serving(tmp_path, lora_resolve=True) as http:
        for path in ("/v1/models/sql", "/props?model=sql", "/kvasir/info?model=sql", "/info?model=fake:sql"):
            assert (await http.get(path)).status_code == 404
        assert http.front.adapters.known == ()


async def test_only_plain_names_of_folders_are_resolved(tmp_path):
    inside = tmp_path / "in"
    written(inside, "deep/er")
    written(inside, ".hidden")
    written(tmp_path, "out")
    (inside / "link").symlink_to(tmp_path / "out")
    async with serving(inside, lora_resolve=True) as http:
        for name in ("../out", "deep/er", ".hidden", "link", "fake:../out", str(tmp_path / "out"), ".", ".."):
            response = await http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert response.status_code == 404, name


async def test_names_are_not_resolved_unless_asked_for(tmp_path):
    written(tmp_path, "sql")
    async with serving(tmp_path) as http:
        assert (await http.post("/v1/chat/completions", json={**CHAT, "model": "sql"})).status_code == 404


# -- settings ------------------------------------------------------------------------------------------------


async def test_an_adapter_cannot_have_the_models_name(tmp_path):
    front = Front(EchoEngine(), byte_tokenizer(), adapters=[AdapterOption("fake", written(tmp_path, "a"))])
    with pytest.raises(ConfigError, match="both named"):
        await OneModel(front, ServeSettings()).start()
    assert front.engine.ended


@pytest.mark.parametrize("settings", [{"lora_resolve": True}, {"lora_dirs": (Path("/none/such"),)}])
def test_settings_that_are_refused(settings):
    with pytest.raises(ConfigError, match="lora"):
        ServeSettings(**settings)
