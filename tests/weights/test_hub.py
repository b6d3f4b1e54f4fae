"""Models from the hub, on the real client and a small hub of our own on this machine."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvasir.errors import ModelFileError
from kvasir.weights.find import find_model
from kvasir.weights.hub import choose_files, choose_gguf
from tests.weights import _files as write

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves folders under `root` as repositories org/name with one commit; `asked` lists the file paths."""

    def __init__(self, root: Path):
        self.root, self.asked = root, []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str) -> bytes | list | dict | None:
        if path.startswith("/api/models/"):
            org, name, *rest = path.removeprefix("/api/models/").split("/")
            return self._about(self.root / org / name, f"{org}/{name}", rest[:1] == ["tree"])
        org, name, _, _, file = path[1:].split("/", 4)
        self.asked.append(file)
        source = self.root / org / name / file
        return source.read_bytes() if source.is_file() else None

    def _about(self, folder: Path, repository: str, tree: bool) -> list | dict | None:
        if not folder.is_dir():
            return None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if tree:
            sizes = [path.stat().st_size for path in files]
            return [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                for name, size in zip(names, sizes, strict=True)
            ]
        return {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = hub.answer(self.path.partition("?")[0])
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                if found is None:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_) -> None:
                pass

        return Handler


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.close()


def test_a_repository_is_downloaded_once_without_pickles_and_code(hub):
    write.hf_folder(hub.root / "org/m", tokenizer__json="{}", pytorch_model__bin="evil", modeling__py="evil")
    write.hf_folder(hub.root / "org/m/onnx")
    (hub.root / "org/m/additional_chat_templates").mkdir()
    (hub.root / "org/m/additional_chat_templates/rag.jinja").write_text("R")
    files = find_model("org/m")
    assert files.kind == "hf" and files.chat_templates == {"rag": "R"} and files.tokenizer_json is not None
    fetched = {path.relative_to(files.root).as_posix() for path in files.root.rglob("*") if path.is_file()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/rag.jinja"}
    assert fetched == wanted and set(hub.asked) == wanted
    hub.close()
    assert find_model("org/m") == find_model("org/m", allow_download=False) == files


def test_a_gguf_model_of_a_repository(hub):
    folder = hub.root / "org/g"
    folder.mkdir(parents=True)
    for name in ("m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"GGUF")
    files = find_model("org/g:q4_k_m")
    assert files.kind == "gguf" and [path.name for path in files.weights] == ["m-Q4_K_M.gguf"]
    assert [path.name for path in find_model("org/g:F16").weights] == [
        "m-F16-00001-of-00002.gguf",
        "m-F16-00002-of-00002.gguf",
    ]
    assert [path.name for path in find_model("org/g:m-Q4_K.gguf").weights] == ["m-Q4_K.gguf"]
    with pytest.raises(ModelFileError, match=r"'Q8_0'.*m-Q4_K\.gguf"):
        find_model("org/g:Q8_0")


def test_without_leave_nothing_is_fetched(hub):
    write.hf_folder(hub.root / "org/m")
    with pytest.raises(ModelFileError, match="downloads"):
        find_model("org/m", allow_download=False)
    assert hub.asked == []


def test_offline_setting_is_honoured(hub, monkeypatch):
    write.hf_folder(hub.root / "org/m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFileError, match=r"org/m.* hub"):
        find_model("org/m")
    assert hub.asked == []


def test_an_unfinished_download_is_finished(hub):
    write.hf_folder(hub.root / "org/m")
    files = find_model("org/m")
    (files.root / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="cache"):
        find_model("org/m", allow_download=False)
    assert find_model("org/m").weights[0].is_file()


@pytest.mark.parametrize("ref", ["org/none", "org/bad--..name"])
def test_unknown_repositories_are_refused(hub, ref):
    with pytest.raises(ModelFileError, match=re.escape(ref)):
        find_model(ref)


def test_a_repository_of_pickles_is_refused(hub):
    (hub.root / "org/p").mkdir(parents=True)
    (hub.root / "org/p/pytorch_model.bin").touch()
    (hub.root / "org/p/config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"safetensors.*GGUF"):
        find_model("org/p")
    assert hub.asked == []


def test_weights_held_twice_are_fetched_once():
    names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    twice = [*names, "consolidated.safetensors", "original/model.safetensors"]
    assert choose_files(twice, "", "org/m") == names
    assert choose_files(["consolidated.safetensors"], "", "org/m") == ["consolidated.safetensors"]


def test_modules_of_sentence_transformers_are_fetched():
    top = ["config.json", "model.safetensors", "modules.json", "config_sentence_transformers.json"]
    modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "onnx/config.json", "onnx/model.onnx", "1_Pooling/x.py"]
    assert choose_files([*top, *modules, *others], "", "org/m") == [*top, *modules]
    assert choose_files(["model.safetensors", *modules], "", "org/m") == ["model.safetensors"]
    heads = ["model.safetensors", "colbert_linear.safetensors", "sparse_linear.safetensors"]
    assert choose_files([*heads, "colbert_linear.pt", "other.safetensors"], "", "org/m") == heads


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("F16", ["a-F16.gguf"]),
        ("BF16", ["a-BF16.gguf"]),
        ("Q8_0", ["Q8_0/a-00001-of-00002.gguf", "Q8_0/a-00002-of-00002.gguf"]),
        ("a-F16.gguf", ["a-F16.gguf"]),
        ("Q8_0/a-00002-of-00002.gguf", ["Q8_0/a-00001-of-00002.gguf", "Q8_0/a-00002-of-00002.gguf"]),
    ],
)
def test_a_format_must_be_a_whole_part_of_the_file_name(tag, expected):
    names = ["a-F16.gguf", "a-BF16.gguf", "mmproj-F16.gguf", "README.md", "Q8_0/a-00001-of-00002.gguf"]
    assert choose_gguf([*names, "Q8_0/a-00002-of-00002.gguf"], tag, "org/m") == expected


def test_an_ambiguous_choice_lists_what_fits():
    with pytest.raises(ModelFileError, match=r"'Q4_0'.*a-Q4_0\.gguf, b-Q4_0\.gguf"):
        choose_gguf(["a-Q4_0.gguf", "b-Q4_0.gguf", "c.gguf"], "Q4_0", "org/m")
