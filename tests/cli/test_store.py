"""The store on the command line, and a running server that is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.chat.conversation import ChatHistory, read
from kvasir.cli.chat.session import Settings
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.errors import KvasirError
from kvasir.serve.settings import ServeSettings
from kvasir.weights.packed_names import model_key
from tests.cli.running import Terminal, run
from tests.serve.running import live
from tests.store import made


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    made.gguf(tmp_path / "weights/tiny.gguf")
    (tmp_path / "Modelfile").write_text(
        "FROM ./weights/tiny.gguf\nSYSTEM Be.\nPARAMETER temperature 0\nPARAMETER num_predict 7\n"
        "PARAMETER num_ctx 64\nMESSAGE user hi\nMESSAGE assistant ho\nLICENSE MIT\n"
    )
    return tmp_path


def kvasir(*arguments: str, fails: bool = False, stdin: str = "") -> str:
    result = CliRunner().invoke(app, arguments, input=stdin)
    if fails:
        assert isinstance(result.exception, KvasirError), result.output
        return f"{result.exception.message} ({result.exception.hint})"
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_short_names_are_listed_with_those_of_the_user(place, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
    (place / "kvasir").mkdir()
    (place / "kvasir/names.toml").write_text('"mine" = "qwen3"\n')
    places = json.loads(kvasir("list", "--names", "--json"))
    assert places["qwen3"] == places["qwen3:8b"] == places["mine"] == "Qwen/Qwen3-8B-GGUF:Q4_K_M"
    assert re.search(r"^mine +Qwen/Qwen3-8B-GGUF:Q4_K_M", kvasir("list", "--names"), re.MULTILINE)


def test_an_empty_store_says_how_to_fill_it(place):
    assert "kvasir pull" in kvasir("list") and json.loads(kvasir("list", "--json")) == []


def test_from_pull_to_rm(place):
    assert "tiny:latest is in the store: llama" in kvasir("pull", "weights/tiny.gguf")
    assert "mine:1 is in" in kvasir("pull", "weights/tiny.gguf", "--name", "mine:1")
    assert "mario:latest is in" in kvasir("create", "mario")
    assert "org/m:latest is in" in kvasir("cp", "mario", "org/m")
    listed = kvasir("list")
    assert listed.index("org/m:latest") < listed.index("mario:latest") < listed.index("tiny:latest")
    assert listed.count("Q4_K_M") == 4 and "just now" in listed
    reported = json.loads(kvasir("list", "--json"))
    assert [model["name"] for model in reported] == ["org/m:latest", "mario:latest", "mine:1", "tiny:latest"]
    shown = kvasir("show", "mario")
    for text in ("llama, 1K, Q4_K_M", "temperature=0.0, num_predict=7", "system         Be.", "licence        MIT"):
        assert text in shown
    assert json.loads(kvasir("show", "mario", "--json"))["messages"][1] == {"role": "assistant", "content": "ho"}
    assert "removed" in kvasir("rm", "tiny", "mine:1", "org/m")
    assert [model["name"] for model in json.loads(kvasir("list", "--json"))] == ["mario:latest"]
    assert (place / "weights/tiny.gguf").exists()


def test_packed_weights_go_with_the_last_model_that_has_them(place, monkeypatch):
    monkeypatch.setenv("KVASIR_PACKED", str(place / "packed"))
    kvasir("pull", "weights/tiny.gguf")
    kvasir("cp", "tiny", "other")
    (place / "packed").mkdir()
    key = model_key([place / "weights/tiny.gguf"])
    mine, others = [place / "packed" / f"{name}-1.weights" for name in (key, "0" * 16)]
    for path in (mine, others):
        path.write_bytes(bytes(5 << 20))
        path.with_suffix(".json").write_text("an index")
    assert kvasir("rm", "tiny") == "tiny:latest was removed\n" and mine.exists()
    assert kvasir("rm", "other") == "other:latest was removed, with 5.0 MiB of packed weights\n"
    assert sorted((place / "packed").iterdir()) == [others.with_suffix(".json"), others]


def test_a_modelfile_shown_makes_the_same_model():
    kvasir("create", "mario", "--quantize", "q8")
    kvasir("create", "luigi", "-f", "-", stdin=kvasir("show", "mario", "--modelfile"))
    mario, luigi = (json.loads(kvasir("show", name, "--json")) for name in ("mario", "luigi"))
    same = ("system", "parameters", "messages", "license", "weights")
    assert [mario[name] for name in same] == [luigi[name] for name in same]
    assert (mario["quantize"], luigi["quantize"]) == ("q8", None)


def test_a_drafter_is_shown(place):
    made.gguf(place / "weights/small.gguf", fill=2)
    (place / "Modelfile").write_text("FROM ./weights/tiny.gguf\nDRAFT ./weights/small.gguf\n")
    kvasir("create", "fast", "--draft-quantize", "q8")
    path = str(place / "weights/small.gguf")
    assert f"drafter        {path}, 4.7 KiB, llama, 1K, Q4_K_M, quantize q8" in kvasir("show", "fast")
    assert f"DRAFT {path}" in kvasir("show", "fast", "--modelfile")
    options, _ = resolve(EngineOptions("fast"))
    assert (options.speculate, options.draft_quantize) == (f"ngram,suffix,draft={path}", "q8")
    assert resolve(EngineOptions("fast", speculate="off"))[0].speculate == "off"


def test_options_of_a_drafter_hold_for_the_one_in_the_store(place, monkeypatch):
    made.gguf(place / "weights/small.gguf", fill=2)
    (place / "Modelfile").write_text("FROM ./weights/tiny.gguf\nDRAFT ./weights/small.gguf\n")
    kvasir("create", "fast")
    served = []
    monkeypatch.setattr("kvasir.cli.serve._serve_one", lambda make, options, *_: served.append(options))
    kvasir("serve", "fast", "--draft-dtype", "float32", "--draft-quantize", "q4")
    assert (served[0].draft_dtype, served[0].draft_quantize) == ("float32", "q4")
    assert "without such a drafter" in kvasir("serve", "weights/tiny.gguf", "--draft-dtype", "float32", fails=True)


def test_errors_say_what_to_do(place):
    assert "write org/repo" in kvasir("pull", "some-model", fails=True)
    assert "available: nothing" in kvasir("show", "other", fails=True)
    assert "none: No such file or directory (name a Modelfile" in kvasir("create", "x", "-f", "none", fails=True)
    for command in (("run", "nobody", "hi"), ("inspect", "nobody"), ("serve", "nobody", "--port", "0")):
        assert "`kvasir list` shows" in kvasir(*command, fails=True)
    (place / "Modelfile").write_text("FROM ./weights/tiny.gguf\nADAPTER ./x\n")
    assert "x: there is no such file or folder" in kvasir("create", "x", fails=True)
    (place / "Modelfile").write_text("FROM ./weights/tiny.gguf\nRENDERER x\n")
    assert "line 2: RENDERER is not supported" in kvasir("create", "x", fails=True)
    assert "is `kvasir serve` running there" in kvasir("ps", "--url", "http://127.0.0.1:9", fails=True)


def test_a_server_is_asked():
    with live() as server:
        assert "echo" in kvasir("ps", "--url", server.url) or "fake" in kvasir("ps", "--url", server.url)
        assert json.loads(kvasir("ps", "--url", f"{server.url}/", "--json"))[0]["context_length"] == 512
        assert "returned 404" in kvasir("stop", "other", "--url", server.url, fails=True)
        error = kvasir("fleet", "status", "--url", server.url, fails=True)
        assert "returned 404: this server has no replicas" in error
    with live(ServeSettings(port=0, api_keys=("a-key-of-mine",))) as server:
        assert "give one with --api-key" in kvasir("ps", "--url", server.url, fails=True)
        assert "until" in kvasir("ps", "--url", server.url, "--api-key", "a-key-of-mine")


def test_names_of_the_store_are_models(place):
    kvasir("create", "mario")
    options, entry = resolve(EngineOptions("mario", max_num_seqs=2))
    assert entry is not None and entry.name == "mario:latest"
    assert (options.model, options.max_model_len) == (str(place / "weights/tiny.gguf"), 64)
    for other in ("kvasir-mini", "weights/tiny.gguf", "./mario", "org/none"):
        assert resolve(EngineOptions(other)) == (EngineOptions(other), None)
    drafted = resolve(EngineOptions("kvasir-mini", speculate="ngram,draft=mario"))[0]
    assert drafted.speculate == f"ngram,draft={place / 'weights/tiny.gguf'}"
    for kept in ("auto", "eagle3=./head", "draft=org/none"):
        assert resolve(EngineOptions("kvasir-mini", speculate=kept))[0].speculate == kept
    (place / "mario").mkdir()
    assert resolve(EngineOptions("mario"))[1] is None, "what is on disk wins"


def test_options_of_the_command_override_those_of_the_store(place):
    own = {"temperature": 0.0, "max_tokens": 7, "top_k": 3}
    recommended = {"temperature": 0.7, "top_p": 0.8}
    params = Settings(own=own).params(recommended)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 0.8, 3, 7)
    params = Settings(1.0, 9, 5, own=own, more={"top_k": 4}).params(recommended)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (1.0, 0.8, 4, 9, 5)
    assert Settings().params({}).max_tokens is None
    talk = ChatHistory("S", [("a", "b")], opening=[{"role": "user", "content": "u"}])
    assert [m["content"] for m in talk.messages("q")] == ["S", "u", "a", "b", "q"]
    talk.save(place / "talk.json", "m")
    assert read(place / "talk.json") == ChatHistory("S", [("a", "b")])


def test_a_server_of_several_models_refuses_options_of_one_model():
    for flags, message in (
        (("a", "b", "--served-model-name", "x"), "served_model_name"),
        (("--chat-template", "x"), "chat_template"),
        (("a", "b", "--speculate", "ngram,draft=x"), "drafts for a single model"),
        (("kvasir-mini", "--model-root", "/"), "model_root"),
        (("--max-loaded-models", "0"), "max_loaded_models is below 1"),
    ):
        assert message in kvasir("serve", *flags, fails=True)


@pytest.mark.slow
def test_a_model_of_the_store_answers_as_it_was_made(place):
    (place / "Modelfile").write_text(
        "FROM kvasir-mini\nPARAMETER temperature 0\nPARAMETER num_predict 6\nSYSTEM Be brief.\n"
    )
    kvasir("create", "brief")
    store = {"KVASIR_MODELS": str(place / "store")}
    asked = ("kvasir.cli", "run", "brief", "What is 23 + 45?", "--verbose")
    done = run(*asked, **store)
    assert done.returncode == 0, done.stderr
    assert run(*asked, "--quiet", **store).stdout == done.stdout and "6 tokens at" in done.stderr
    assert "brief:latest" in done.stderr


def test_a_name_of_the_store_is_inspected(place):
    kvasir("pull", "weights/tiny.gguf")
    by_name, by_path = (json.loads(kvasir("inspect", m, "--json")) for m in ("tiny", str(place / "weights/tiny.gguf")))
    assert by_name == by_path


def test_bars_on_a_terminal(place):
    with Terminal("kvasir.cli", "pull", "weights/tiny.gguf") as terminal:
        terminal.wait_for("hashing tiny.gguf")
        terminal.wait_for("tiny:latest is in")
        assert terminal.end() == 0
    assert "4.8/4.8 kB" in terminal.shown
