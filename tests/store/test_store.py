"""The store: listing, changing and removing models, and files that remain."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir.config import EngineOptions, check
from kvasir.environment import models_dir
from kvasir.errors import InvalidRequest, KvasirError, ModelFileError, ModelNotFound
from kvasir.store.modelfile import Modelfile, parse_modelfile
from kvasir.store.names import parse_name
from kvasir.store.progress import PullProgress
from kvasir.store.store import ModelStore
from tests.examples import examples
from tests.store import made
from tests.weights import _files as write


@pytest.fixture
def store(tmp_path) -> ModelStore:
    return ModelStore(tmp_path / "store", any_path=True)


KEYS = [
    *(f"llama.{name}" for name in ("context_length", "embedding_length", "block_count", "attention.head_count")),
    *("llama.attention.head_count_kv", "llama.attention.key_length", "general.file_type", "tokenizer.chat_template"),
]
VALUES = [
    (write.STRING, "x"), (write.U32, 0), (write.U32, 8), (write.I64, -1), (write.U64, 2**64 - 1),
    (write.F32, float("nan")), (write.BOOL, 1), (write.ARRAY, (write.U32, [1, 2])),
    (write.ARRAY, (write.STRING, ["x"])), (write.ARRAY, (write.F64, [float("inf")])),
    (write.ARRAY, (write.I64, [-(2**63), -(2**63)])),
]  # fmt: skip


def upload(store: ModelStore, data: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    with store.receive(digest) as writer:
        writer.write(data[:10])
        writer.write(data[10:])
        writer.keep()
    return digest


def test_a_file_by_its_path(store, tmp_path):
    path, reported = made.gguf(tmp_path / "tiny-q4.gguf"), list[PullProgress]()
    entry = store.pull(str(path), report=reported.append)
    assert entry == store.get("TINY-Q4") == store.find("tiny-q4:latest") == store.list()[0]
    assert (entry.name, entry.weights.format, entry.weights.size) == ("tiny-q4:latest", "gguf", path.stat().st_size)
    assert (
        entry.weights.digest == hashlib.sha256(path.read_bytes()).hexdigest() and entry.digest != entry.weights.digest
    )
    details = entry.details
    assert (details.family, details.parameter_size, details.quantization_level) == ("llama", "1K", "Q4_K_M")
    assert (details.context_length, details.embedding_length) == (2048, 64)
    assert details.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2, "layers, key heads, keys and values, head, bytes"
    assert details.capabilities == ("completion", "tools") and details.template == made.TEMPLATE
    assert [p.status for p in reported] == ["hashing tiny-q4.gguf", "writing manifest", "success"]
    assert reported[0].completed == reported[0].total == path.stat().st_size
    info = store.model_info(entry)
    assert info["llama.block_count"] == 3 and info["tokenizer.ggml.tokens"] is None
    assert len(store.model_info(entry, verbose=True)["tokenizer.ggml.tokens"]) == 20
    store.remove("tiny-q4")
    assert path.exists() and store.list() == []


def test_a_folder_by_its_path(store, tmp_path):
    path = made.folder(tmp_path / "m")
    entry = store.pull(str(path), name="Mine:1b")
    assert (entry.name, entry.weights.path, entry.weights.format) == ("Mine:1b", str(path), "safetensors")
    assert (entry.details.family, entry.details.quantization_level) == ("qwen3", "BF16")
    assert entry.details.kv_bytes_per_token == 3 * 2 * 2 * 32 * 2
    before = entry.weights.digest
    (path / "chat_template.jinja").write_text("another")
    assert store.pull(str(path), name="mine:1b").weights.digest != before
    assert store.model_info(entry)["qwen3.context_length"] == 512


def test_the_bundled_model_is_found_and_unknown_names_are_refused(store):
    assert store.pull("kvasir-mini").name == store.pull("mini").name == "kvasir-mini:latest"
    assert store.get("kvasir-mini").details.capabilities[0] == "completion"
    with pytest.raises(InvalidRequest, match=r"some-model.* hub"):
        store.pull("some-model")
    with pytest.raises(ModelNotFound, match=r"'other'.*kvasir-mini:latest"):
        store.get("other")


RECIPE = """FROM tiny
PARAMETER temperature 0
PARAMETER num_ctx 256
PARAMETER num_thread 1
SYSTEM You are Mario.
MESSAGE user hi
MESSAGE assistant it's me
LICENSE MIT
"""


def test_a_model_made_of_another(store, tmp_path):
    tiny = store.pull(str(made.gguf(tmp_path / "tiny.gguf")))
    mario = store.create("mario", parse_modelfile(RECIPE))
    assert (mario.parent, mario.weights, mario.details) == ("tiny:latest", tiny.weights, tiny.details)
    luigi = store.create("luigi", Modelfile(("mario",), {"temperature": 0.5}, system="You are Luigi."))
    assert luigi.parameters == {"temperature": 0.5, "num_ctx": 256, "num_thread": 1}
    assert luigi.messages == mario.messages and luigi.license == ("MIT",)
    question = [{"role": "user", "content": "?"}]
    assert [m["content"] for m in luigi.conversation(question)] == ["You are Luigi.", "hi", "it's me", "?"]
    own = [{"role": "system", "content": "be"}, *question]
    assert [m["content"] for m in luigi.conversation(own)] == ["hi", "it's me", "be", "?"]
    assert tiny.conversation(question) == question
    copy = store.copy("luigi", "org/luigi:2")
    assert copy.digest == luigi.digest != mario.digest and copy.name == "org/luigi:2"
    options = store.options(luigi, EngineOptions("", max_num_seqs=3))
    assert (options.max_model_len, options.threads, options.max_num_seqs) == (256, 1, 3)
    assert (options.model, options.served_model_name) == (tiny.weights.path, "luigi:latest")
    assert store.options(luigi, EngineOptions("", max_model_len=64)).max_model_len == 64, "what is asked for wins"


def test_a_model_may_have_its_own_template_and_quantization(store, tmp_path):
    store.pull(str(made.folder(tmp_path / "m")))
    recipe = Modelfile(("m",), template="{{ messages[0].content }}!", quantize="q4")
    entry = store.create("loud", recipe)
    options = store.options(entry, EngineOptions(""))
    assert options.chat_template and Path(options.chat_template).read_text() == recipe.template
    assert options.quantize == "q4"
    store.copy("loud", "louder")
    store.remove("loud")
    assert Path(options.chat_template).exists()
    store.remove("louder")
    assert not Path(options.chat_template).exists()


@pytest.mark.parametrize(
    ("recipe", "message", "param"),
    [
        (Modelfile(("m",), template="{{ if .System }}{{ .System }}{{ end }}"), "Go's syntax", "template"),
        (Modelfile(("m",), template="{{- range $i, $_ := .Messages }}"), "Go's syntax", "template"),
        (Modelfile(("m",), template="{% for m in messages %}"), "failed", "template"),
        (Modelfile(("m",), template="Hello"), "does not render", "template"),
        (Modelfile(("m",), {"num_ctx": 513}), "num_ctx.*513.*512", "num_ctx"),
        (Modelfile(("m",), {"temperature": -1}), "temperature", "temperature"),
        (Modelfile(("m",), quantize="q5_K_M"), "'q5_K_M'.*q8", "quantize"),
        (Modelfile(("m",), messages=({"role": "tool", "content": "x"},)), "message", "messages"),
        (Modelfile(()), "base model", "from"),
        (Modelfile(("no/such/model/at/all",)), "no/such/model/at/all", "model"),
        (Modelfile(("m",), draft="m"), "the model itself", "draft"),
        (Modelfile(("m",), draft="no/such/model/at/all"), "no/such/model/at/all", "model"),
        (Modelfile(("m",), draft_quantize="q8"), "without a draft", "draft_quantize"),
        (Modelfile(("m",), draft="kvasir-mini", draft_quantize="q5"), "'q5'.*none", "draft_quantize"),
    ],
)
def test_recipes_that_are_refused(store, tmp_path, recipe, message, param):
    store.pull(str(made.folder(tmp_path / "m")))
    with pytest.raises(InvalidRequest, match=message) as error:
        store.create("new", recipe)
    assert error.value.param == param and store.find("new") is None


def test_a_model_may_have_a_drafter(store, tmp_path):
    plain = store.pull(str(made.gguf(tmp_path / "big.gguf")))
    small = made.gguf(tmp_path / "small.gguf", fill=2)
    text = "FROM big\nDRAFT ./small.gguf\n"
    entry = store.create("fast", parse_modelfile(text), base=tmp_path)
    assert entry.draft and (entry.draft.weights.path, entry.draft.details.family) == (str(small), "llama")
    assert entry.size == 2 * plain.size and len({entry.digest, plain.digest}) == 2
    assert store.options(entry, EngineOptions("")).speculate == f"ngram,suffix,draft={small}"
    assert store.options(entry, EngineOptions("", speculate="ngram")).speculate == "ngram", "what is asked for wins"
    assert store.options(plain, EngineOptions("")).speculate == "auto"
    named = store.pull(str(small))
    again = store.create("faster", Modelfile(("big",), draft="small", draft_quantize="q4"))
    assert again.draft and again.draft.weights == named.weights
    assert store.options(again, EngineOptions("")).draft_quantize == "q4"
    assert store.options(again, EngineOptions("", draft_quantize="none")).draft_quantize == "none"
    inherited = store.create("fastest", Modelfile(("faster",), system="s"))
    assert inherited.draft == again.draft == store.get("fastest").draft
    check(store.options(inherited, EngineOptions("")))
    store.remove("small")
    small.unlink()
    with pytest.raises(ModelFileError, match=r"small\.gguf"):
        store.options(entry, EngineOptions(""))


def test_uploaded_drafters_are_removed_with_the_last_model_that_has_them(store, tmp_path):
    big, small = (upload(store, made.gguf(tmp_path / f"{i}.gguf", fill=i).read_bytes()) for i in (1, 2))
    files, draft = {"big.gguf": big}, {"small.gguf": small}
    entry = store.create("a", Modelfile(()), files=files, draft_files=draft)
    store.create("b", Modelfile(("a",), system="s"))
    folders = {Path(weights.path).parent for weights in entry.all_weights}
    assert len(folders) == 2 and all(folder.is_relative_to(store.root) for folder in folders)
    store.remove("a")
    assert all(folder.exists() for folder in folders) and store.has_blob(small)
    store.remove("b")
    assert not any(folder.exists() for folder in folders) and not store.has_blob(small) and not store.has_blob(big)


@pytest.mark.parametrize("half", ["\ud800", "a\udfff"])
def test_text_that_is_no_unicode_is_refused(store, tmp_path, half):
    store.pull(str(made.gguf(tmp_path / "m.gguf")))
    message = {"role": "user", "content": half}
    for recipe in (
        Modelfile(("m",), system=half), Modelfile(("m",), template="{{ messages[0].content }}" + half),
        Modelfile(("m",), {"stop": [half]}), Modelfile(("m",), license=(half,)), Modelfile(("m",), messages=(message,)),
        Modelfile((half,)), Modelfile((f"/{half}",)),
    ):  # fmt: skip
        with pytest.raises((InvalidRequest, ModelFileError)):
            store.create("new", recipe)
    assert store.find("new") is None and len(store.list()) == 1


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES)))
def test_values_of_gguf_headers_may_be_anything(reported):
    pairs = [
        write.pair("general.architecture", write.STRING, "llama"),
        *(write.pair(k, *v) for k, v in reported.items()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(write.gguf_bytes(pairs, [write.entry("a", [32], 0, 0)], bytes(128)))
        store = ModelStore(Path(folder) / "store", any_path=True)
        details = store.pull(str(path)).details
        assert details.parameters == 32 and details.kv_bytes_per_token >= 0
        json.dumps(store.model_info(store.get("m")), allow_nan=False)


def test_paths_relative_to_a_modelfile_and_parts(store, tmp_path):
    for i in (1, 2):
        made.gguf(tmp_path / "sub" / f"m{i}.gguf", fill=i)
    entry = store.create("m", Modelfile(("./m1.gguf",)), base=tmp_path / "sub")
    assert entry.weights.path == str(tmp_path / "sub/m1.gguf") and entry.parent == "./m1.gguf"
    with pytest.raises(InvalidRequest, match="parts"):
        store.create("m", Modelfile(("m*.gguf",)), base=tmp_path / "sub")
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        store.create("m", Modelfile(("./none.gguf",)), base=tmp_path)


def test_paths_of_clients_are_restricted_to_allowed_folders(tmp_path):
    inside, outside = made.folder(tmp_path / "in/m"), made.gguf(tmp_path / "out.gguf")
    (tmp_path / "in/link.gguf").symlink_to(outside)
    linked = made.folder(tmp_path / "in/linked")
    (linked / "tokenizer.json").symlink_to(outside)
    store = ModelStore(tmp_path / "store", allowed_roots=(tmp_path / "in",))
    assert store.create("m", Modelfile((str(inside),))).weights.path == str(inside)
    for ref in (
        outside,
        tmp_path / "in/../out.gguf",
        tmp_path / "in/link.gguf",
        linked,
        tmp_path / "none.gguf",
        "/etc",
    ):
        with pytest.raises(InvalidRequest, match="not in a folder"):
            store.pull(str(ref))
    for ref in ("./m", "../out.gguf", "x.gguf", "~/x.gguf", "~root/x.gguf"):
        with pytest.raises(InvalidRequest, match="relative"):
            store.pull(ref)
    for pattern in ("o*.gguf", "z*.gguf"):  # an existing file, and a missing one
        with pytest.raises(InvalidRequest, match="not in a folder") as reported:
            store.pull(str(tmp_path / pattern))
        assert "out.gguf" not in str(reported.value)
    assert [entry.name for entry in store.list()] == ["m:latest"]


def test_uploads_become_a_model_and_are_removed_with_it(store, tmp_path):
    data = made.gguf(tmp_path / "x.gguf").read_bytes()
    digest = upload(store, data)
    assert store.has_blob(digest)
    entry = store.create("up", Modelfile((), system="s"), files={"x.gguf": digest})
    path = Path(entry.weights.path)
    assert path.is_relative_to(store.root) and path.read_bytes() == data and entry.weights.digest == digest[7:]
    assert store.create("again", Modelfile(()), files={"x.gguf": digest}).weights == entry.weights
    assert store.remove("up").weights == 0
    assert path.exists() and store.has_blob(digest)
    assert store.remove("again").weights == len(data)
    assert not path.parent.exists() and not store.has_blob(digest)


def test_uploads_that_are_refused(store):
    digest = f"sha256:{'0' * 64}"
    with store.receive(digest) as writer, pytest.raises(InvalidRequest, match="digest"):
        writer.write(b"x")
        writer.keep()
    assert not store.has_blob(digest) and not list((store.root / "blobs").iterdir())
    for bad in ("sha256:../../etc/passwd", "md5:00", "sha256:" + "g" * 64, ""):
        with pytest.raises(InvalidRequest, match=f"{re.escape(repr(bad))}.*digest"):
            store.has_blob(bad)
    for name in ("../x.gguf", "/x.gguf", "x.bin", ".gguf", "a/b.gguf", ""):
        with pytest.raises(InvalidRequest, match="names"):
            store.create("m", Modelfile(()), files={name: digest})
    with pytest.raises(InvalidRequest, match="blob"):
        store.create("m", Modelfile(()), files={"x.gguf": digest})


def test_uploads_that_are_no_model_leave_nothing(store, tmp_path):
    junk, good = upload(store, b"no model at all"), upload(store, made.gguf(tmp_path / "x.gguf").read_bytes())
    with pytest.raises(KvasirError):
        store.create("m", Modelfile(()), files={"x.gguf": junk})
    with pytest.raises(InvalidRequest, match="num_ctx"):
        store.create("m", Modelfile((), {"num_ctx": 1 << 30}), files={"x.gguf": good})
    assert not [path for path in (store.root / "models").iterdir() if path.is_dir()]
    assert store.has_blob(good) and store.create("m", Modelfile(()), files={"x.gguf": good}).name == "m:latest"


def test_manifests_are_private_and_damaged_ones_are_skipped(store, tmp_path, caplog):
    store.pull(str(made.gguf(tmp_path / "a.gguf")))
    store.pull(str(made.gguf(tmp_path / "b.gguf")))
    path = store.root / "manifests" / "++a+latest.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(store.root.stat().st_mode) == 0o700
    reported = json.loads(path.read_bytes())
    for bad in (
        b"", b"{}", b"[" * 100_000, msgspec.json.encode(reported | {"name": "b:latest"}), b"\xff",
        msgspec.json.encode(reported | {"name": "../b"}),
        msgspec.json.encode(reported | {"parameters": {"top_k": "x"}}),
        msgspec.json.encode(reported | {"weights": reported["weights"] | {"path": "relative"}}),
        msgspec.json.encode(reported | {"draft": {"weights": reported["weights"] | {"path": "relative"}}}),
    ):  # fmt: skip
        path.write_bytes(bad)
        assert [entry.name for entry in store.list()] == ["b:latest"] and store.find("a") is None
        with pytest.raises(ModelFileError, match="manifest"):
            store.get("a")
    assert "manifest" in caplog.text
    assert store.pull(str(tmp_path / "a.gguf")) == store.get("a")


def test_a_manifest_cannot_make_the_store_remove_outside_files(store, tmp_path):
    made.gguf(tmp_path / "keep/a.gguf")
    entry = store.pull(str(tmp_path / "keep/a.gguf"))
    path = store.root / "manifests" / "++a+latest.json"
    reported = json.loads(path.read_bytes())
    (store.root / "models").mkdir(exist_ok=True)
    for evil in (f"{store.root}/models/../../keep/a.gguf", f"{store.root}/models"):
        path.write_bytes(msgspec.json.encode(reported | {"weights": reported["weights"] | {"path": evil}}))
        store.remove("a")
    assert (tmp_path / "keep/a.gguf").exists() and (store.root / "models").exists()
    assert entry.name == "a:latest"


def test_deleted_weights_are_an_error(store, tmp_path):
    path = made.gguf(tmp_path / "a.gguf")
    entry = store.pull(str(path))
    path.unlink()
    with pytest.raises(ModelFileError, match=re.escape(str(path))):
        store.options(entry, EngineOptions(""))


def test_an_unwritable_store_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    store = ModelStore(tmp_path / "file", any_path=True)
    made.gguf(tmp_path / "a.gguf")
    for change in (
        lambda: store.pull(str(tmp_path / "a.gguf")), lambda: store.remove("a"),
        lambda: store.receive(f"sha256:{'0' * 64}"),
    ):  # fmt: skip
        with pytest.raises(KvasirError, match="KVASIR_MODELS"):
            change()
    with pytest.raises(KvasirError, match="Not a directory"):
        store.list()


def test_where_the_store_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.delenv("KVASIR_MODELS", raising=False)
    assert models_dir() == Path("/data/kvasir/models")
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path))
    assert models_dir() == tmp_path == ModelStore().root


def test_several_processes_change_one_store(store, tmp_path):
    made.gguf(tmp_path / "a.gguf")
    script = (
        "import sys; from kvasir.store.store import ModelStore; from pathlib import Path\n"
        "s = ModelStore(Path(sys.argv[1]), any_path=True)\n"
        "for i in range(10): s.pull(sys.argv[2], name=f'{sys.argv[3]}{i}'); i % 2 or s.remove(f'{sys.argv[3]}{i}')\n"
    )
    src = Path(__file__).resolve().parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(src)}
    command = [sys.executable, "-c", script, str(store.root), str(tmp_path / "a.gguf")]
    running = [subprocess.Popen([*command, name], env=environment) for name in ("x", "y")]
    assert [process.wait(60) for process in running] == [0, 0]
    assert {entry.name for entry in store.list()} == {f"{n}{i}:latest" for n in "xy" for i in range(1, 10, 2)}


NAMES = st.sampled_from(["a", "b", "org/c:1", "d"])


class Life(RuleBasedStateMachine):
    """Whatever is done, the store lists what was named, and holds exactly the files that this needs."""

    def __init__(self):
        super().__init__()
        self.tmp = Path(tempfile.mkdtemp())
        self.store = ModelStore(self.tmp / "store", any_path=True)
        self.model: dict[str, tuple[str, str | None]] = {}  # name -> (digest of weights, system)

    @rule(name=NAMES, fill=st.integers(0, 1))
    def uploads(self, name, fill):
        digest = upload(self.store, made.gguf(self.tmp / "x.gguf", fill).read_bytes())
        entry = self.store.create(name, Modelfile(()), files={"x.gguf": digest})
        self.model[entry.parsed.key] = (digest[7:], None)

    @rule(name=NAMES, source=NAMES, system=st.none() | st.sampled_from("st"))
    def creates(self, name, source, system):
        known = self.model.get(self.key(source))
        if known is not None:
            entry = self.store.create(name, Modelfile((source,), system=system))
            self.model[entry.parsed.key] = (known[0], system or known[1])

    @rule(name=NAMES, source=NAMES)
    def copies(self, name, source):
        known = self.model.get(self.key(source))
        if known is None:
            with pytest.raises(ModelNotFound):
                self.store.copy(source, name)
        else:
            self.model[self.key(name)] = known
            self.store.copy(source, name)

    @rule(name=NAMES)
    def removes(self, name):
        if self.model.pop(self.key(name), None) is None:
            with pytest.raises(ModelNotFound):
                self.store.remove(name)
        else:
            self.store.remove(name)

    @staticmethod
    def key(name: str) -> str:
        return parse_name(name).key

    @invariant()
    def holds_what_it_lists(self):
        listed = {e.parsed.key: (e.weights.digest, e.system) for e in ModelStore(self.store.root).list()}
        assert listed == self.model == {e.parsed.key: (e.weights.digest, e.system) for e in self.store.list()}
        weights = {digest for digest, _ in self.model.values()}
        folders = [p for p in (self.store.root / "models").glob("*") if p.is_dir()]
        there = {hashlib.sha256(next(p.glob("*.gguf")).read_bytes()).hexdigest() for p in folders}
        assert there == weights and len(folders) == len(weights)
        assert {p.name.removeprefix("sha256-") for p in (self.store.root / "blobs").glob("*")} == weights

    def teardown(self):
        shutil.rmtree(self.tmp, ignore_errors=True)


Life.TestCase.settings = examples(20, stateful_step_count=20)
test_life = Life.TestCase
