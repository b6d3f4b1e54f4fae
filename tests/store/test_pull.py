"""Pulling from a hub: resumed, compared, stopped, and never half there."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import aclosing
from threading import Event

import pytest
from huggingface_hub import constants, snapshot_download

from kvasir.errors import ModelFileError, quoted
from kvasir.store.files import Stopped
from kvasir.store.job import follow
from kvasir.store.modelfile import Modelfile
from kvasir.store.progress import PullProgress
from kvasir.store.store import ModelStore
from tests.store import made
from tests.store.hub import COMMIT, Hub, use

NAMES = ("m-Q4_K_M.gguf", "m-Q8_0.gguf")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    use(hub, monkeypatch, tmp_path / "cache")
    for i, name in enumerate(NAMES):
        made.gguf(hub.root / "org/g" / name, fill=i)
    made.folder(hub.root / "org/m")
    (hub.root / "org/m/pytorch_model.bin").write_bytes(b"evil")
    (hub.root / "org/m/modeling.py").write_bytes(b"evil")
    yield hub
    hub.close()


@pytest.fixture
def store(tmp_path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def inside(store: ModelStore) -> set[str]:
    return {p.relative_to(store.root / "models").as_posix() for p in (store.root / "models").rglob("*") if p.is_file()}


def test_one_gguf_file_of_a_repository(hub, store):
    reported = list[PullProgress]()
    entry = store.pull("hf.co/org/g:Q4_K_M", report=reported.append)
    folder = f"org--g--{COMMIT[:12]}--Q4_K_M"
    assert entry.name == "hf.co/org/g:Q4_K_M" and store.find("org/g:q4_k_m") == entry
    assert (entry.weights.source, entry.weights.revision) == ("hf.co/org/g:Q4_K_M", COMMIT)
    assert inside(store) == {f"{folder}/{NAMES[0]}", f".{folder}.lock"}
    assert hub.asked == [(NAMES[0], 0)]
    assert reported[0].status == "pulling manifest" and reported[-1].status == "success"
    bytes_told = [p for p in reported if p.digest]
    assert {p.digest for p in bytes_told} == {entry.weights.digest}
    assert (bytes_told[0].completed, bytes_told[-1].completed, bytes_told[-1].total) == (0, *[entry.weights.size] * 2)
    assert store.pull("org/g:Q4_K_M").name == "org/g:Q4_K_M" and len(store.list()) == 1, "it has the name last given"
    assert hub.asked == [(NAMES[0], 0)], "nothing is fetched twice"
    store.remove("org/g:Q4_K_M")
    assert inside(store) == {f".{folder}.lock"}


def test_a_folder_without_pickles_and_code(hub, store):
    entry = store.pull("org/m")
    assert entry.name == "org/m:latest" and entry.weights.format == "safetensors"
    names = {"config.json", "chat_template.jinja", "model.safetensors"}
    assert set(entry.weights.files) == names == {name for name, _ in hub.asked}
    assert entry.details.template == made.TEMPLATE


def test_several_that_fit_are_listed(hub, store):
    with pytest.raises(ModelFileError, match=r"m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        store.pull("org/g")
    assert store.list() == []


@pytest.mark.parametrize("ref", ["org/none", "org/none:Q4", "hf.co/other/none"])
def test_an_absent_repository_is_refused(hub, store, ref):
    with pytest.raises(ModelFileError, match="hub"):
        store.pull(ref)


def test_an_interrupted_download_resumes(hub, store):
    size = (hub.root / "org/g" / NAMES[0]).stat().st_size
    stop = Event()
    stop.set()
    with pytest.raises(Stopped):
        store.pull("org/g:Q4_K_M", stop=stop)
    hub.cut = {NAMES[0]: 2000}  # the client asks again by itself
    entry = store.pull("org/g:Q4_K_M")
    assert hub.asked == [(NAMES[0], 0), (NAMES[0], 2000)] and entry.weights.size == size
    store.remove("org/g:Q4_K_M")
    folder = store.root / "models" / f"org--g--{COMMIT[:12]}--Q4_K_M"
    folder.mkdir()
    (folder / f"{NAMES[0]}.partial").write_bytes((hub.root / "org/g" / NAMES[0]).read_bytes()[:3000])
    assert store.list() == []
    assert store.pull("org/g:Q4_K_M").digest == entry.digest and hub.asked[-1] == (NAMES[0], 3000)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_altered_bytes_are_refused(hub, store, name):
    own = (hub.root / "org/m" / name).read_bytes()
    hub.swapped = {name: own[:-1] + b"?"}
    with pytest.raises(ModelFileError, match="checksum"):
        store.pull("org/m")
    hub.swapped = {name: own + b"?" * 5000}
    with pytest.raises(ModelFileError, match=re.escape(name)):
        store.pull("org/m")
    assert store.list() == [] and not any(path.endswith((f"/{name}", ".bin")) for path in inside(store))
    hub.swapped = {}
    assert store.pull("org/m").weights.files.keys() == {"config.json", "chat_template.jinja", "model.safetensors"}


def test_file_names_outside_the_folder_are_refused(hub, store, monkeypatch):
    for name in ("../x.gguf", "/etc/x.gguf", "a/../x.gguf", "a\\x.gguf", "\0.gguf", "\ud800.gguf", "a\n.gguf"):
        about = {"id": "org/g", "sha": COMMIT, "siblings": [{"rfilename": name, "size": 5}]}
        monkeypatch.setattr(hub, "about", lambda _, about=about: about)
        with pytest.raises(ModelFileError, match=re.escape(quoted(name))):
            store.pull("org/g")


def test_a_download_beyond_the_free_disk_is_refused(hub, store, monkeypatch):
    about = {"id": "org/g", "sha": COMMIT, "siblings": [{"rfilename": "x.gguf", "size": 40 << 30}]}
    monkeypatch.setattr(hub, "about", lambda _: about)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 62, 0, 1 << 30))
    with pytest.raises(ModelFileError, match=r"40\.?\d* GiB"):
        store.pull("org/g")
    about["siblings"][0]["size"] = 60 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 62, 0, 1 << 62))
    with pytest.raises(ModelFileError, match="hf download"):
        store.pull("org/g")
    assert hub.asked == []


def test_unknown_sizes_are_bounded_by_the_disk(hub, store, monkeypatch):
    about = hub.about("org/m")
    for sibling in about["siblings"]:
        sibling.pop("size")
    monkeypatch.setattr(hub, "about", lambda _: about)
    free = shutil._ntuple_diskusage(1 << 62, 0, (256 << 20) + 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ModelFileError, match="room"):
        store.pull("org/m")


def test_a_new_commit_replaces_the_old_one(hub, store):
    first = store.pull("org/g:Q8_0")
    hub.commit = "f" * 40
    made.gguf(hub.root / "org/g" / NAMES[1], fill=9)
    second = store.pull("org/g:Q8_0")
    assert second.digest != first.digest and second.created == first.created < second.modified
    assert [path for path in inside(store) if path.endswith(".gguf")] == [f"org--g--{'f' * 12}--Q8_0/{NAMES[1]}"]


def test_files_in_the_cache_of_the_hub_are_used(hub, store, monkeypatch):
    snapshot_download("org/m", allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    asked = list(hub.asked)
    entry = store.pull("org/m")
    assert (
        str(constants.HF_HUB_CACHE) in entry.weights.path
        and hub.asked == asked
        and not (store.root / "models").exists()
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert store.pull("org/m").weights.path == entry.weights.path, "also without the hub"
    with pytest.raises(ModelFileError, match="hub"):
        store.pull("org/g:Q8_0")
    store.remove("org/m")
    assert store.find("org/m") is None


def test_created_from_the_hub(hub, store):
    entry = store.create("mine", Modelfile(("org/g:Q8_0",), system="s"))
    assert (entry.name, entry.parent, entry.system) == ("mine:latest", "org/g:Q8_0", "s")


async def test_followed_from_a_loop_and_left_in_the_middle(hub, store):
    async with aclosing(follow(lambda report, stop: store.pull("org/g:Q8_0", report=report, stop=stop))) as events:
        statuses = [event.status async for event in events]
    assert statuses[0] == "pulling manifest" and statuses[-1] == "success"
    async with aclosing(follow(lambda report, stop: store.pull("org/none", report=report, stop=stop))) as events:
        with pytest.raises(ModelFileError):
            async for _ in events:
                pass
    seen = Event()

    def endless(report, stop):
        report(PullProgress("on"))
        assert stop.wait(10)
        seen.set()
        raise Stopped

    async with aclosing(follow(endless)) as events:
        assert (await anext(events)).status == "on"
    assert seen.is_set() and asyncio.get_running_loop().is_running()
