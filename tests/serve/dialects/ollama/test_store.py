"""Managing models by Ollama's own client: a live server over a store on disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime

import httpx
import ollama
import openai
import pytest

from kvasir.config import EngineOptions
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.hosting.offers import StoreOffers
from kvasir.serve.settings import ServeSettings
from kvasir.store.modelfile import Modelfile
from kvasir.store.progress import PullProgress
from kvasir.store.store import ModelStore
from tests.serve.auth.test_reload import until
from tests.serve.running import live, live_on, make_front
from tests.serve.shelf import Launcher
from tests.store import made
from tests.store.hub import Hub, use

ALL = frozenset(KeyScope)


@pytest.fixture
def store(tmp_path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def several(store: ModelStore, **settings) -> Callable[[], ModelManager]:
    """A server of all that the store has, on echo engines."""
    offers = StoreOffers(store, EngineOptions(""))
    return lambda: ModelManager(offers, Launcher(), ServeSettings(port=0, **settings), store=store)


@pytest.fixture
def url(store):
    with live_on(several(store)) as server:
        yield server.url


@pytest.fixture
def own(url):
    with ollama.Client(host=url) as own:
        yield own


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    use(hub, monkeypatch, tmp_path / "cache")
    made.gguf(hub.root / "org/g/model-Q4_K_M.gguf")
    yield hub
    hub.close()


def names(own) -> set[str]:
    return {model.model for model in own.list().models}


def test_a_model_is_removed_by_openais_clients_too(own, url, store, hub):
    for _ in own.pull("org/g", stream=True):
        pass
    [name] = names(own)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as api:
        assert api.models.delete(name).deleted is True
        assert names(own) == set() == {model.id for model in api.models.list()}
        with pytest.raises(openai.NotFoundError):
            api.models.delete(name)


def test_a_file_is_uploaded_and_a_model_made_of_it(own, url, store, tmp_path):
    path = made.gguf(tmp_path / "up.gguf")
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 404
    assert own.create_blob(path) == digest
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 200
    assert own.create_blob(path) == digest, "once more"
    made_of = dict(
        files={"up.gguf": digest},
        system="Be brief.",
        parameters={"temperature": 0.3, "stop": ["x", "y"]},
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}],
        license="free",
    )
    reported = list(own.create("mine", **made_of, stream=True))
    assert reported[-1].status == "success"
    shown = own.show("mine")
    assert shown.details.format == "gguf" and shown.modelinfo["general.architecture"] == "llama"
    assert shown.template == made.TEMPLATE and shown.license == "free" and "tools" in shown.capabilities
    assert shown.parameters.split() == ["temperature", "0.3", "stop", '"x"', "stop", '"y"']
    assert "SYSTEM Be brief." in shown.modelfile and str(tmp_path) not in shown.modelfile
    [listed] = [m for m in own.list().models if m.model == "mine:latest"]
    assert listed.size == path.stat().st_size and listed.details.quantization_level == "Q4_K_M"
    assert own.create("again", from_="mine", system="Longer.", stream=False).status == "success"
    assert store.get("again").parameters["temperature"] == 0.3
    own.create("small", from_="again", quantize="Q8_0")
    assert store.get("small").quantize == "q8" and own.delete("small").status == "success"
    own.copy("mine", "third:v1")
    assert names(own) == {"mine:latest", "again:latest", "third:v1"}
    for name in names(own):
        assert own.delete(name).status == "success"
    assert names(own) == set() and not list((store.root / "blobs").iterdir())


def test_a_model_is_made_with_a_drafter(own, url, store, tmp_path):
    """Ollama's client for Python lacks these fields of its server; its command sends them."""
    digests = {name: own.create_blob(made.gguf(tmp_path / f"{name}.gguf", fill=i)) for i, name in enumerate("ab")}

    def create(**fields):
        return httpx.post(f"{url}/api/create", json={"stream": False, **fields})

    files = {"files": {"a.gguf": digests["a"]}, "draft_files": {"b.gguf": digests["b"]}}
    assert create(model="fast", **files, draft_quantize="Q8_0").status_code == 200
    entry = store.get("fast")
    assert entry.draft and entry.draft.quantize == "q8" and entry.size == sum(w.size for w in entry.all_weights)
    assert "DRAFT b.gguf" in own.show("fast").modelfile and str(store.root) not in own.show("fast").modelfile
    [listed] = own.list().models
    assert listed.size == entry.size
    assert create(model="small", files={"b.gguf": digests["b"]}).status_code == 200
    assert create(model="again", **{"from": "small"}, draft="fast").status_code == 200
    assert store.get("again").draft.weights == entry.weights
    with (
        live_on(lambda: OneModel(make_front(), ServeSettings(port=0), entry=entry)) as one,
        ollama.Client(host=one.url) as asked,
    ):
        assert "DRAFT b.gguf" in asked.show("fast").modelfile
    refused = create(model="c", **{"from": "small"}, draft_files={"b.gguf": "sha256:" + "0" * 64})
    assert refused.status_code == 400 and "blob" in refused.text
    for name in ("fast", "small", "again"):
        own.delete(name)
    assert not list((store.root / "blobs").iterdir())


def test_a_model_is_pulled_with_its_progress(own, hub):
    reported = list(own.pull("hf.co/org/g", stream=True))
    assert reported[-1].status == "success" and len(names(own)) == 1
    counted = [p for p in reported if p.total]
    assert counted and all(0 <= p.completed <= p.total for p in counted)
    assert own.pull("hf.co/org/g").status == "success"


async def test_the_async_client(url, hub):
    async with ollama.AsyncClient(host=url) as own:
        reported = [p async for p in await own.pull("org/g", stream=True)]
        assert reported[-1].status == "success"
        [name] = [m.model for m in (await own.list()).models]
        assert (await own.create("made", from_=name, system="S")).status == "success"
        await own.copy("made", "copied")
        assert (await own.delete("made")).status == "success"
        assert (await own.show("copied")).details.family == "llama"


ERRORS = [
    (lambda own: own.pull("hf.co/org/nothing"), 400, "hub"),
    (lambda own: list(own.pull("hf.co/org/nothing", stream=True)), -1, "hub"),  # it had begun
    (lambda own: own.pull("g", insecure=True), 400, "insecure"),
    (lambda own: own.pull("../../etc"), 400, ""),
    (lambda own: own.pull("/etc/passwd"), 400, ""),
    (lambda own: own.create("x", from_="/etc"), 400, ""),
    (lambda own: own.create("x"), 400, "from"),
    (lambda own: own.create("a/b/c/d/e", from_="g"), 400, "name"),
    (lambda own: own.create("x", from_="nothing"), 400, "nothing"),
    (lambda own: own.create("x", from_="g", template="{{ .Prompt }}"), 400, "template"),
    (lambda own: own.create("x", from_="kvasir-mini", adapters={"a.gguf": "sha256:" + "0" * 64}), 400, "blob"),
    (lambda own: own.create("x", from_="kvasir-mini", parameters={"colour": 1}), 400, "colour"),
    (lambda own: own.create("x", from_="g", quantize="q3"), 400, "quantize"),
    (lambda own: own.create("x", files={"a.gguf": "sha256:" + "0" * 64}), 400, ""),
    (lambda own: own.create("x", from_="g", messages=[{"role": "tool", "content": "a"}]), 400, "messages"),
    (lambda own: own.create("x", from_="g", messages=[{"role": "user", "images": ["aGk="]}]), 400, "messages.0"),
    (lambda own: own.copy("nothing", "x"), 404, "nothing"),
    (lambda own: own.delete("nothing"), 404, "nothing"),
    (lambda own: own.show("nothing"), 404, "nothing"),
    (lambda own: own.push("a"), 400, "registry"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error_is_reported_at_once_and_leaves_no_files(own, hub, store, number):
    ask, status, named = ERRORS[number]
    with pytest.raises(ollama.ResponseError) as caught:
        ask(own)
    assert caught.value.status_code == status and named in caught.value.error
    assert names(own) == set()


def test_uploads_are_checked(url, store):
    right = "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert httpx.post(f"{url}/api/blobs/{right}", content=b"abd").status_code == 400
    assert httpx.head(f"{url}/api/blobs/{right}").status_code == 404
    for wrong in ("sha256:abc", "md5:" + "0" * 64, "..%2f..%2fetc", "sha256:" + "g" * 64):
        assert httpx.post(f"{url}/api/blobs/{wrong}", content=b"abc").status_code in (400, 404)
        assert httpx.head(f"{url}/api/blobs/{wrong}").status_code in (400, 404)
    assert httpx.post(f"{url}/api/blobs/{right}", content=b"abc").status_code == 201
    large = bytes(range(256)) * (90 << 10)  # more than a JSON body may have
    digest = "sha256:" + hashlib.sha256(large).hexdigest()
    assert httpx.post(f"{url}/api/blobs/{digest}", content=large).status_code == 201
    assert {p.name for p in (store.root / "blobs").iterdir()} == {f"sha256-{d[7:]}" for d in (right, digest)}


async def test_an_interrupted_upload_leaves_no_files(url, store):
    async def half():
        yield b"a" * 100_000
        raise ConnectionError

    digest = "sha256:" + "0" * 64
    async with httpx.AsyncClient() as http:
        with pytest.raises(ConnectionError):
            await http.post(f"{url}/api/blobs/{digest}", content=half())
    for _ in range(200):
        if not list((store.root / "blobs").glob("*")):
            break
        await asyncio.sleep(0.01)
    assert not list((store.root / "blobs").glob("*"))


def test_a_client_that_disconnects_ends_its_pull_and_few_run_at_once(url, store, monkeypatch):
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def pull(ref, name=None, report=None, stop=None):
        report(PullProgress("pulling"))
        begun.release()
        assert stop.wait(10), "nobody stopped it"
        ended.release()

    monkeypatch.setattr(store, "pull", pull)
    with ollama.Client(host=url) as own, ollama.Client(host=url) as other, ollama.Client(host=url) as third:
        streams = [c.pull("a/b", stream=True) for c in (own, other)]
        for stream in streams:
            assert next(stream).status == "pulling"
        with pytest.raises(ollama.ResponseError) as caught:
            third.pull("a/b")
        assert caught.value.status_code == 429
        for stream in streams:
            stream.close()
        assert all(ended.acquire(timeout=10) for _ in streams)


def test_a_key_without_the_scope_manages_nothing(store):
    store.pull("kvasir-mini")
    with live_on(several(store, keys=(Key("secret-of-ann", "ann"),))) as server:
        with ollama.Client(host=server.url, headers={"Authorization": "Bearer secret-of-ann"}) as own:
            assert own.list().models and own.generate(model="kvasir-mini", prompt="a", options={"num_predict": 1}).done
            asks = [
                lambda: own.pull("a/b"),
                lambda: own.create("x", from_="y"),
                lambda: own.copy("a", "b"),
                lambda: own.delete("a"),
                lambda: own.push("a"),
                lambda: own.generate(model="kvasir-mini", keep_alive=0),
            ]
            for ask in asks:
                with pytest.raises(ollama.ResponseError) as caught:
                    ask()
                assert caught.value.status_code == 403 and "management" in caught.value.error
            headers = {"Authorization": "Bearer secret-of-ann"}
            blob = f"{server.url}/api/blobs/sha256:{'0' * 64}"
            assert httpx.post(blob, content=b"", headers=headers).status_code == 403
        with ollama.Client(host=server.url) as nobody, pytest.raises(ollama.ResponseError) as caught:
            nobody.list()
        assert caught.value.status_code == 401


def test_a_server_of_one_model_manages_none():
    with live() as server, ollama.Client(host=server.url) as own:
        for ask in (lambda: own.pull("a/b"), lambda: own.copy("a", "b"), lambda: own.delete("fake")):
            with pytest.raises(ollama.ResponseError, match="does not manage"):
                ask()


# -- models of the store are asked -------------------------------------------------------------------------------------


@pytest.fixture
def mine(store):
    """A model with its own defaults."""
    recipe = Modelfile(
        ("kvasir-mini",),
        {"temperature": 0, "num_predict": 5, "stop": ["!"]},
        system="S",
        messages=({"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}),
    )
    store.create("mine", recipe)


def test_a_models_own_defaults_stand_below_the_requests(own, url, mine):
    hello = [{"role": "user", "content": "hello"}]

    def prompt(**fields) -> str:
        body = {"model": "mine", "messages": hello, "_debug_render_only": True, **fields}
        return httpx.post(f"{url}/api/chat", json=body).json()["_debug_info"]["rendered_template"]

    before = "user: u\nassistant: v\nuser: hello\nassistant: "
    assert prompt() == f"system: S\n{before}"
    assert prompt(messages=[{"role": "system", "content": "T"}, *hello]).count("system") == 1
    answer = own.chat(model="mine", messages=hello)
    assert (answer.eval_count, answer.message.content) == (5, "syste")
    assert own.chat(model="mine:latest", messages=hello, options={"num_predict": 7}).eval_count == 7
    reply = own.generate(model="mine", prompt="hello", options={"num_predict": 300})
    assert reply.response.startswith(f"system: S\n{before}")
    assert own.generate(model="mine", prompt="hello", system="T", options={"num_predict": 9}).response == "system: T"
    assert own.generate(model="mine", prompt="a!b", raw=True).response == "a"
    assert own.generate(model="mine", prompt="a!b", raw=True, options={"stop": ["b"]}).response == "a!"


def test_models_are_loaded_and_unloaded_on_request(own, mine):
    assert not own.ps().models
    assert own.generate(model="mine", keep_alive=0).done_reason == "unload" and not own.ps().models, (
        "not loaded for that"
    )
    assert own.generate(model="mine", keep_alive="10m").done_reason == "load"
    [running] = own.ps().models
    left = (running.expires_at - datetime.now(UTC)).total_seconds()
    assert running.model == "mine:latest" and 500 < left <= 600
    own.generate(model="mine", prompt="a", keep_alive=-1)
    assert own.ps().models[0].expires_at.year == 9999
    for long in (9e14, "9" * 60 + "h"):
        own.generate(model="mine", prompt="a", keep_alive=long)
        assert own.ps().models[0].expires_at.year == 9999
    assert own.chat(model="mine", messages=[], keep_alive=0).done_reason == "unload"
    assert not own.ps().models


def test_a_key_ends_only_its_own_keep_alive_of_a_model(store, mine):
    keys = (Key("secret-of-ann", "ann"), Key("secret-of-bob", "bob"), Key("secret-of-root", "root", scopes=ALL))
    with live_on(several(store, keys=keys)) as server, ExitStack() as stack:
        ann, bob, root = (
            stack.enter_context(ollama.Client(host=server.url, headers={"Authorization": f"Bearer {key.secret}"}))
            for key in keys
        )

        def gone() -> bool:
            return not ann.ps().models

        assert ann.generate(model="mine", prompt="a", keep_alive=0).eval_count == 5
        until(gone)
        ann.generate(model="mine", prompt="a")
        bob.chat(model="mine", messages=[{"role": "user", "content": "a"}], keep_alive=0)
        left = (ann.ps().models[0].expires_at - datetime.now(UTC)).total_seconds()
        assert 200 < left <= 300, "ann's"
        assert bob.embed(model="mine", input="a", keep_alive=0).embeddings and not gone()
        with pytest.raises(ollama.ResponseError, match="management"):
            ann.generate(model="mine", keep_alive=0)
        assert root.generate(model="mine", keep_alive=0).done_reason == "unload"
        until(gone)


def test_management_actions_are_audited(store, hub, tmp_path):
    log = tmp_path / "audit.jsonl"
    with live_on(several(store, audit_log=log)) as server, ollama.Client(host=server.url) as own:
        list(own.pull("org/g", stream=True))
        with pytest.raises(ollama.ResponseError):
            list(own.pull("org/nothing", stream=True))
        with pytest.raises(ollama.ResponseError):
            own.delete("nothing")
        own.list()
    reported = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(t["route"], t["target"], t["outcome"]) for t in reported] == [
        ("/api/pull", {"model": "org/g"}, "done"),
        ("/api/pull", {"model": "org/nothing"}, "failed"),
        ("/api/delete", {"model": "nothing"}, "refused"),
    ]
