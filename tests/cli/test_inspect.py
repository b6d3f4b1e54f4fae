"""Inspect: what the real files hold, without reading a weight; unknown and hostile files as well."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.caches import PagedKV
from kvasir.cli.app import app
from kvasir.cli.model_facts import TokenWork, cache_bytes, experts_share, read_needs, read_stored, token_work
from kvasir.cli.program_view import fold
from kvasir.errors import ConfigError, ModelFileError
from kvasir.layers.kv_layout import KVLayout
from kvasir.ops import native
from kvasir.program.cache import NativeCache
from kvasir.runner.load import LoadOptions, load_model, no_attention
from kvasir.weights.find import find_model
from kvasir.weights.mapped import TensorInfo
from tests._shared import need
from tests.weights._files import STRING, entry, gguf_bytes, hf_folder, pair

needs_native = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def inspect(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return result.output


def inspect_json(*arguments: object) -> dict:
    return json.loads(inspect(*arguments, "--json"))


def test_the_bundled_model():
    reported = inspect_json("kvasir-mini", "--tensors")
    assert reported["supported"] and reported["problem"] is None
    assert reported["architecture"] == "LlamaForCausalLM" and reported["class"] == "Llama"
    assert reported["parameters"] == sum(t["parameters"] for t in reported["types"]) > 1e6
    assert sum(t["share"] for t in reported["types"]) == pytest.approx(1)
    assert len(reported["tensors"]) == sum(t["tensors"] for t in reported["types"])
    config = reported["metadata"]
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    memory = reported["memory"]["by_dtype"]
    assert memory["bfloat16"]["kv_per_token"] == 2 * kv and memory["float32"]["kv_per_token"] == 4 * kv
    assert reported["memory"]["executor"] == ("program" if native.available() else "eager")
    vectors = sum(t["shape"][0] for t in reported["tensors"] if len(t["shape"]) == 1)
    packed = 2 * (reported["parameters"] - vectors) + 4 * vectors  # BF16 stays BF16, in either arithmetic
    assert memory["bfloat16"]["weights"] == packed
    assert memory["float32"]["weights"] == (packed if native.available() else 4 * reported["parameters"])
    assert memory["float32"]["kv_of_one_context"] == 4 * kv * reported["max_context"]
    assert reported["tokenizer"].startswith("BPE") and reported["chat_templates"] == ["default"]


# Parameters and context as in the models' own README and config.
REAL = {
    ("stories260K",): (260_032, 512, "Llama"),
    ("TinyStories-656K",): (656_000, 512, "Llama"),
    ("gpt-nano-sort",): (85_728, 11, "GPT2"),
    ("gguf", "TinyStories-656K-Q4_0.gguf"): (656_000, 512, "Llama"),
    ("gguf", "stories260K-F32.gguf"): (260_032, 512, "Llama"),
}


@pytest.mark.parametrize("parts", REAL, ids=lambda parts: parts[-1])
def test_real_models(parts):
    parameters, context, kind = REAL[parts]
    reported = inspect_json(need("models", *parts))
    assert (reported["parameters"], reported["max_context"], reported["class"]) == (parameters, context, kind)
    assert sum(t["bytes"] for t in reported["types"]) == reported["weight_bytes"] <= reported["files"][0]["bytes"]


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "parts",
    [
        ("gguf", "TinyStories-656K-Q4_0.gguf"),
        ("gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf"),
        ("stories260K",),
        ("gpt-nano-sort",),
    ],
    ids=lambda parts: parts[-1],
)
def test_the_memory_is_that_of_a_load(parts, dtype):
    files = find_model(need("models", *parts))
    [reported] = [m for m in read_needs(files).memory if m.dtype == dtype]
    loaded = load_model(files, dtype, options=LoadOptions("program"))
    shapes = [shape for _, part in loaded.model.walk() for shape in part.expects().values()]
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    assert reported.weights == sum(loaded.formats.values()) + 4 * vectors
    spec = loaded.model.cache_spec()
    cache = NativeCache(spec, [2] * len(KVLayout.of(spec).groups), 64, dtype)
    assert reported.kv_token * 64 * 2 == sum(array.nbytes for array in cache.tensors)


def test_without_kernels_the_memory_is_that_of_the_eager_executor(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "PATH", tmp_path / "absent.so")
    path = need("models", "gguf", "TinyStories-656K-Q4_0.gguf")
    memory = inspect_json(path)["memory"]
    shown = inspect(path)
    assert memory["executor"] == "eager" and "not built" in memory["reason"]
    assert memory["by_dtype"]["float32"]["weights"] == 4 * 656_000
    assert "on the eager executor" in shown and "not the program executor: " in shown


@needs_native
def test_heads_without_a_kernel_are_reported():
    needs = read_needs(find_model("kvasir-mini"))
    assert (needs.executor, needs.reason) == ("program", "")
    odd = SimpleNamespace(cache_spec=lambda: [PagedKV(1, 64), PagedKV(1, 33)])
    assert "heads of 33" in no_attention(odd)


@needs_native
@pytest.mark.parametrize(("quantize", "format", "most"), [("q8", "Q8_0", 0.006), ("q4", "Q4_0", 0.08)])
def test_quantizing_changes_the_types_and_bytes(quantize, format, most):
    reported = inspect_json("kvasir-mini", "--quantize", quantize)
    rows, total = reported["tensors"], reported["total"]
    assert len(rows) == 4 * 7 + 1 == total["tensors"] and reported["kept_bytes"] == 0
    assert {r["format"] for r in rows} == {format, "Q8_0"}
    assert total["bytes"] == sum(r["bytes"] for r in rows) == sum(reported["weight_bytes"].values())
    assert all(0 < r["mean_error"] < most and r["mean_error"] < r["max_error"] for r in rows)
    assert total["max_error"] == max(r["max_error"] for r in rows)
    means = [r["mean_error"] for r in rows]
    assert min(means) < total["mean_error"] < max(means)
    shown = inspect("kvasir-mini", "--quantize", quantize)
    assert "model.layers.3.mlp.down_proj.weight" in shown and f"{total['mean_error']:.2%}" in shown


@needs_native
def test_quantized_tensors_keep_their_type():
    path = need("models", "gguf", "TinyStories-656K-Q4_0.gguf")
    reported = inspect_json(path, "--quantize", "q8")
    assert reported["tensors"] == [] and reported["kept_bytes"] == sum(reported["weight_bytes"].values()) > 0
    assert "nothing was quantized" in inspect(path, "--quantize", "q8")
    with pytest.raises(ConfigError, match="q3"):
        inspect("kvasir-mini", "--quantize", "q3")


@needs_native
def test_the_program_of_a_quantized_model():
    assert set(inspect_json("kvasir-mini", "--program", "--quantize", "q4")["weight_bytes"]) == {"Q4_0", "Q8_0"}


def test_a_quantized_file_names_its_types_and_its_long_arrays_are_cut():
    reported = inspect_json(need("models", "gguf", "TinyStories-656K-Q4_0.gguf"))
    assert {t["type"] for t in reported["types"]} == {"Q4_0", "Q8_0", "F32"}
    assert reported["metadata"]["tokenizer.ggml.tokens"].endswith("2048 in all]")
    assert reported["tokenizer"] == "SentencePiece" and reported["tokenizer_vocabulary"] == 2048


def test_an_embedding_model_shows_its_task():
    reported = inspect_json(need("models", "gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf"))
    assert reported["tasks"] == ["embed", "token_embed"] and reported["tokenizer"] == "WordPiece"


# --- configs without weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.5"])  # all: tests/models/test_hf_configs.py
def test_a_published_config_reports_its_memory(name):
    folder = need("hf_configs", name)
    reported = inspect_json(folder / "config.json")
    by_place = {(m["format"], m["devices"]): m for m in reported["memory"]}
    whole = by_place["bfloat16", 1]
    assert 2.2 > whole["weights"] / reported["parameters"] >= 2
    assert 4.4 > by_place["float32", 1]["weights"] / reported["parameters"] >= 4
    kv = [context["kv"] for context in whole["contexts"]]
    assert kv == sorted(kv) and whole["contexts"][-1]["tokens"] == reported["max_context"]
    for devices in (2, 4, 8):
        assert whole["weights"] / devices <= by_place["bfloat16", devices]["weights"] <= whole["weights"]
    if native.available():
        assert by_place["q4", 1]["weights"] < by_place["q8", 1]["weights"] < whole["weights"]


def test_the_memory_of_a_config_is_that_of_the_model(tmp_path):
    folder = find_model("kvasir-mini").root
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    alone, whole = inspect_json(tmp_path), inspect_json("kvasir-mini")
    assert (alone["parameters"], alone["class"]) == (whole["parameters"], whole["class"])
    needs, expected = alone["memory"][4], whole["memory"]["by_dtype"]["bfloat16"]
    assert (needs["format"], needs["devices"], needs["weights"]) == ("bfloat16", 1, expected["weights"])
    assert needs["kv_per_token"] == expected["kv_per_token"]
    assert needs["contexts"][-1]["kv"] == expected["kv_of_one_context"]
    shorter = inspect_json(tmp_path, "--max-model-len", 64)["memory"][4]["contexts"]
    assert [(c["tokens"], c["kv"]) for c in shorter] == [(64, 64 * needs["kv_per_token"])]
    with pytest.raises(ConfigError, match="positions"):
        inspect_json(tmp_path, "--max-model-len", 10**9)
    assert "with 64 tokens" in inspect(tmp_path, "--max-model-len", 64)


def test_bounded_caches_are_counted_in_whole_blocks():
    groups = [SimpleNamespace(kind=SimpleNamespace(bound=bound), bytes_per_block=64 * size)
              for bound, size in ((0, 1), (2, 100), (130, 10))]  # fmt: skip
    assert cache_bytes(groups, 64, 1000) == 1000 + 2 * 64 * 100 + 4 * 64 * 10
    assert cache_bytes(groups[1:2], 64, 60) == 64 * 100


def test_the_table_is_readable_text():
    shown = inspect("kvasir-mini", "--tensors")
    for text in (
        "parameters     3.67 M",
        "bfloat16 (auto)",
        "chat template  default",
        "embed_tokens",
        "share",
    ):
        assert text in shown, shown


def test_an_unknown_architecture_is_shown_with_its_tensors(tmp_path):
    pairs = [pair("general.architecture", STRING, "mamba9"), pair("general.name", STRING, "\x1b[31mred")]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(pairs, [entry("a", [32], 2, 0)], bytes(18)))
    reported = inspect_json(path)
    assert not reported["supported"] and "mamba9" in reported["problem"]["message"] and reported["problem"]["next"]
    assert reported["types"] == [{"type": "Q4_0", "tensors": 1, "parameters": 32, "bytes": 18, "share": 1.0}]
    assert "memory" not in reported
    shown = inspect(path)
    assert "NOT SUPPORTED" in shown and "\x1b" not in shown and "red" in shown


def test_a_config_that_does_not_fit_the_weights_is_reported(tmp_path):
    reported = inspect_json(hf_folder(tmp_path / "model"))
    assert not reported["supported"] and reported["parameters"] == 2


def test_files_that_are_no_models_are_refused(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelFileError):
        inspect(tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError, match=r"absent\.gguf"):
        inspect(tmp_path / "absent.gguf")


def test_the_context_of_the_estimate():
    reported = inspect_json("kvasir-mini", "--max-model-len", "100")
    memory = reported["memory"]["by_dtype"]["bfloat16"]
    assert memory["kv_of_one_context"] == 100 * memory["kv_per_token"]
    with pytest.raises(ConfigError, match="max_model_len"):
        inspect("kvasir-mini", "--max-model-len", "1000000")


def test_the_work_of_a_token():
    """Tied: the token table is read as the output matrix. Untied: it is only looked up."""
    stored = read_stored("kvasir-mini")
    vocab_size = read_needs(stored.files).vocab_size
    work = token_work(stored.tensors, vocab_size)
    assert work.weight_bytes == stored.nbytes
    assert work.head_macs == vocab_size * stored.metadata["hidden_size"]
    vectors = sum(t.shape[0] for t in stored.tensors if len(t.shape) == 1)
    assert work.body_macs + work.head_macs + vectors == stored.parameters


def test_the_work_of_a_token_of_an_untied_model():
    stored = read_stored(str(need("models", "gpt-nano-sort")))
    assert any(t.name == "lm_head.weight" for t in stored.tensors)
    work = token_work(stored.tensors, 3)
    tables = sum(t.nbytes for t in stored.tensors if ".wte." in f".{t.name}" or ".wpe." in f".{t.name}")
    assert tables and work.weight_bytes == stored.nbytes - tables
    assert work.head_macs == 3 * 48


@pytest.mark.parametrize(
    ("metadata", "share"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"qwen3moe.expert_count": 128, "qwen3moe.expert_used_count": 8}, 1 / 16),
        ({"text_config": {"num_experts": 4, "top_k_experts": 1}}, 0.25),
        ({"num_local_experts": 8}, 0.0),
        ({"hidden_size": 8}, 0.0),
    ],
)
def test_the_share_of_the_experts(metadata, share):
    assert experts_share(metadata) == share


def test_the_work_of_a_mixture():
    """A token computes its share of the chosen experts, and all of the shared one."""
    names = ("model.layers.0.mlp.experts.0.up_proj.weight", "blk.0.ffn_up_exps.weight", "mlp.shared_experts.up.weight")
    tensors = [TensorInfo(name, (8, 4), "F32", 128, Path("m")) for name in names]
    assert token_work(tensors, 9, experts=0.25) == TokenWork(2 * 32 + 128, 2 * 8 + 32, 0)
    assert token_work(tensors, 9) == TokenWork(3 * 128, 3 * 32, 0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=5), st.integers(1, 4)), max_size=6))
def test_equal_layers_are_folded_and_nothing_is_lost(parts):
    items = [item for part, times in parts for item in part * times]
    folded = fold(items)
    assert [i for begin, length, times in folded for i in items[begin : begin + length] * times] == items
    assert [begin for begin, _, _ in folded] == [0, *accumulate(n * t for _, n, t in folded)][: len(folded)]


def test_layers_that_differ_are_not_folded():
    assert fold("abcbcbcd") == [(0, 1, 1), (1, 2, 3), (7, 1, 1)]
    assert fold("abc") == [(0, 1, 1), (1, 1, 1), (2, 1, 1)] and fold("") == []
