"""Finding a model's files: folders, GGUF files, bundled models; and the errors if there is none."""

import json

import pytest

from kvasir.errors import ModelFileError
from kvasir.weights import find
from kvasir.weights.find import find_model
from kvasir.weights.local import gguf_chat_templates
from tests._shared import need
from tests.weights import _files as write


def test_a_hugging_face_folder(tmp_path):
    folder = write.hf_folder(tmp_path / "m", tokenizer__json="{}", generation_config__json="{}")
    files = find_model(str(folder))
    assert (files.kind, files.root, files.weights) == ("hf", folder, (folder / "model.safetensors",))
    assert files.config == folder / "config.json"
    assert files.generation_config == folder / "generation_config.json"
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.tokenizer_config is files.tokenizer_model is files.chat_template is None


def test_a_real_folder():
    files = find_model(need("models/stories260K"))
    assert files.tokenizer_model is not None and files.tokenizer_config is not None


def test_a_gguf_file_needs_no_other_files_and_may_use_those_of_its_folder(tmp_path):
    (tmp_path / "m.gguf").write_bytes(write.small_gguf())
    (tmp_path / "mmproj-m.gguf").write_bytes(write.small_gguf())
    (tmp_path / "chat_template.jinja").write_text("beside")
    by_file, by_folder = find_model(tmp_path / "m.gguf"), find_model(tmp_path)
    assert by_file.kind == by_folder.kind == "gguf"
    assert by_file.weights == by_folder.weights == (tmp_path / "m.gguf",)
    assert by_file.chat_template is None and by_folder.chat_template == "beside"


def test_a_split_gguf_is_one_model(tmp_path):
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        (tmp_path / name).touch()
    expected = tuple(tmp_path / name for name in names)
    assert find_model(tmp_path).weights == find_model(tmp_path / names[1]).weights == expected


def test_safetensors_win_over_gguf_files_beside_them(tmp_path):
    folder = write.hf_folder(tmp_path / "m", a__gguf="", b__gguf="")
    assert find_model(folder).kind == "hf"


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "C"}}, {"default": "C"}),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, {"default": "D", "tool_use": "T"}),
        ({"tokenizer_config.json": {"chat_template": None}}, {}),
        ({"chat_template.json": {"chat_template": "P"}}, {"default": "P"}),
        ({"chat_template.jinja": "J"}, {"default": "J"}),
        ({"additional_chat_templates/rag.jinja": "R"}, {"rag": "R"}),
        (
            {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.json": {"chat_template": "P"}},
            {"default": "P", "tool_use": "T"},
        ),
        (
            {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.json": {"chat_template": "P"}}
            | {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "R"},
            {"default": "J", "tool_use": "R"},
        ),
    ],
)
def test_chat_templates_from_every_place(tmp_path, files, expected):
    write.hf_folder(tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    found = find_model(tmp_path)
    assert found.chat_templates == expected and found.chat_template == expected.get("default")


@pytest.mark.parametrize("value", [3, True, {"a": "b"}, ["a"], [{"name": "a"}], [{"name": "a", "template": 3}]])
def test_chat_templates_of_another_shape_are_refused(tmp_path, value):
    folder = write.hf_folder(tmp_path, tokenizer_config__json=json.dumps({"chat_template": value}))
    with pytest.raises(ModelFileError, match=r"chat_template|template"):
        find_model(folder)


def test_a_huge_template_is_refused(tmp_path):
    folder = write.hf_folder(tmp_path, chat_template__jinja="x" * (2 << 20))
    with pytest.raises(ModelFileError, match="larger than"):
        find_model(folder)


def test_chat_templates_inside_gguf_metadata():
    metadata = {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.odd": 3,
    }
    assert gguf_chat_templates(metadata) == {"default": "D", "tool_use": "T"}
    assert gguf_chat_templates({}) == {}


def test_bundled_models(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "ASSETS", tmp_path)
    with pytest.raises(ModelFileError, match="kvasir-mini"):
        find_model("mini")
    folder = write.hf_folder(tmp_path / "kvasir-mini")
    assert find_model("mini").root == find_model("kvasir-mini").root == folder


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin.*safetensors"):
        find_model(tmp_path)


def test_a_folder_without_a_model_is_refused_with_its_files(tmp_path):
    with pytest.raises(ModelFileError, match="found nothing"):
        find_model(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelFileError, match=r"notes\.txt"):
        find_model(tmp_path)
    with pytest.raises(ModelFileError, match=r"expected.*\.gguf.*folder"):
        find_model(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFileError, match=r"a\.gguf, b\.gguf"):
        find_model(tmp_path)


@pytest.mark.parametrize("ref", ["none", "./a/b", "/a/b", "~/a", "a/b/c", "a/b.gguf", "", "a/", "../x", "a\\b/c"])
def test_paths_that_are_not_there_never_reach_the_hub(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="no such"):
        find_model(ref)


@pytest.mark.parametrize("ref", ["a\0b", "x" * 5000, "~no-such-user/a"])
def test_strings_that_cannot_be_paths_are_refused(ref):
    with pytest.raises(ModelFileError):
        find_model(ref)


@pytest.mark.parametrize("host", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/"])
def test_a_repository_may_be_named_with_its_host(host, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFileError, match=r"^no-such-org/model:Q8_0: incomplete in the local"):
        find_model(f"{host}no-such-org/model:Q8_0", allow_download=False)
