"""The families' table: files with random weights that have what their loaders expect, limits, and continued results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import random_vocab
from benchmarks.peers.families import apart_by, continued, judged, rows_of
from benchmarks.peers.family_shapes import SHAPES
from benchmarks.peers.limits import caches_of, experts_of, limit
from benchmarks.peers.probe import Rates
from benchmarks.peers.random_gguf import Tensor, blocks, kinds, matrix, norm, write
from benchmarks.peers.rows import LLAMA, OURS, Row
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.text import gguf_tokenizer
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.source import GGUFSource

gguf = pytest.importorskip("gguf", reason="gguf writes these files")
RATES = Rates(1e10, 2e11, 3e11, 1e11, "probe.c")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "MXFP4"])
def test_random_blocks_have_mean_0_and_the_spread(kind):
    ggml_type = GGMLType[kind]
    found = blocks(ggml_type, 1 << 16 >> (ggml_type.block_size > 1) * 5, 0.25, np.random.default_rng(0))
    weights = dequantize(found.view(np.uint8), ggml_type, (1, len(found) * ggml_type.block_size))
    assert abs(weights.mean()) < 0.01
    assert weights.std() == pytest.approx(0.25, rel=0.5 if kind == "MXFP4" else 0.03)  # that has powers of two


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tensors_are_those_of_the_architecture(shape):
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[shape.architecture]
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[number]}
    tensors = shape.tensors()
    names = [tensor.name for tensor in tensors]
    assert len(set(names)) == len(names)
    for name in names:
        parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
        template = ".".join(["blk.{bid}", *parts[2:]] if parts[0] == "blk" else parts)
        assert template in known, name
    assert {int(name.split(".")[1]) for name in names if name.startswith("blk.")} == set(range(shape.layers))
    for tensor, kind in zip(tensors, kinds(tensors, shape.kind, shape.layers), strict=True):
        assert tensor.shape[-1] % kind.block_size == 0
        small = tensor.draw is not None or "ffn_gate_inp" in tensor.name or tensor.name == "per_layer_model_proj.weight"
        assert (kind is GGMLType.F32) == small, tensor.name


def test_the_mixture_is_that_of_llama_cpp():
    parts = ("attn_q", "attn_v", "ffn_down")
    tensors = [matrix("token_embd", 512, 256), *norm("output_norm", 256)]
    tensors += [matrix(f"blk.{i}.{part}", 256, 256) for i in range(16) for part in parts]
    tensors += [matrix("blk.0.attn_k_b", 2, 256, 128), matrix("blk.0.ffn_gate_inp", 8, 256)]
    names = [tensor.name for tensor in tensors]
    found = dict(zip(names, kinds(tensors, "Q4_K_M", 16), strict=True))
    assert found["token_embd.weight"] is GGMLType.Q6_K  # it is the output matrix too
    more = [i for i in range(16) if found[f"blk.{i}.ffn_down.weight"] is GGMLType.Q6_K]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert more == [i for i in range(16) if found[f"blk.{i}.attn_v.weight"] is GGMLType.Q6_K]
    assert found["blk.3.attn_q.weight"] is GGMLType.Q4_K
    assert found["blk.0.attn_k_b.weight"] is GGMLType.Q5_0  # rows of half a block
    assert found["output_norm.weight"] is found["blk.0.ffn_gate_inp.weight"] is GGMLType.F32


def test_the_file_is_written_in_pieces_and_is_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.random_gguf.CHUNK", 512)
    tensors = [matrix("token_embd", 16, 256), Tensor("rope_freqs.weight", (3,), draw=lambda _, n: np.arange(n))]
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for path in paths:
        write(path, "llama", lambda writer: writer.add_block_count(0), tensors, "Q4_K_M", 1)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    source = GGUFSource(open_gguf(paths[0]))
    assert source.info("token_embd.weight").dtype == "Q6_K"
    table = dequantize(source.raw("token_embd.weight"), GGMLType.Q6_K, (16, 256))
    assert source.array("rope_freqs.weight").tolist() == [0, 1, 2]
    source.close()
    assert len(np.unique(table, axis=0)) == 16 and table.std() == pytest.approx(256**-0.5, rel=0.05)


def vocabularies(writer, size: int) -> dict:
    return {
        "gpt2": lambda: random_vocab.byte_level(writer, size, "qwen2", {"<|end|>": 3}, eos=3),
        "gemma4": lambda: random_vocab.gemma(writer, size, {"<bos>": 2, "<eos>": 1}, bos=2, eos=1),
        "t5": lambda: random_vocab.unigram(writer, size, {"<s>": 0, "</s>": 2, "<unk>": 3}, unknown=3, bos=0, eos=2),
        "bert": lambda: random_vocab.wordpiece(writer, size, {"[UNK]": 100, "[CLS]": 101, "[SEP]": 102}, unk=100),
    }


@pytest.mark.parametrize("kind", ["gpt2", "gemma4", "t5", "bert"])
def test_vocabularies_have_their_size_and_cut_texts(tmp_path, kind):
    def add(writer) -> None:
        writer.add_block_count(0)
        vocabularies(writer, 1700)[kind]()

    write(tmp_path / "a.gguf", "llama", add, [matrix("token_embd", 4, 256)], "F32", 1)
    with open_gguf(tmp_path / "a.gguf") as model:
        tokenizer, _ = gguf_tokenizer.build(model.metadata)
    assert tokenizer.get_vocab_size() == 1700
    ids = tokenizer.encode("a cat", add_special_tokens=False).ids
    assert len(ids) >= 3 and "cat" in tokenizer.decode(ids).replace(" ", "")


# --- rows and results ----------------------------------------------------------------------------------


def test_limits_count_chosen_experts_and_states(tmp_path):
    from tests.models.hf import randomized
    from tests.models.test_gguf_llamas import CONFIGS, write_gguf

    transformers = pytest.importorskip("transformers")
    config = dict(CONFIGS["qwen3_5_moe"])
    hf = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    path = write_gguf(randomized(transformers.AutoModelForCausalLM.from_config(hf)), tmp_path / "m.gguf")
    experts, (per_token, states) = experts_of(path), caches_of(path)
    assert experts.share == hf.num_experts_per_tok / hf.num_experts and experts.nbytes > 0
    assert experts.chosen(1) == pytest.approx(experts.share) and experts.chosen(1000) == pytest.approx(1)
    attention = sum(kind == "full_attention" for kind in hf.layer_types)
    assert per_token == 2 * attention * 2 * hf.num_key_value_heads * hf.head_dim
    state = hf.linear_num_value_heads * hf.linear_key_head_dim * hf.linear_value_head_dim
    assert states == 4 * state * (len(hf.layer_types) - attention)
    row = Row("m decode", "m", "Q8_0", "decode", 1, 8, 6, (LLAMA,), 1.3, 1.6)
    alone, eight = limit(row, path, RATES), limit(replace(row, users=8), path, RATES)
    assert alone and eight and alone < eight < 8 * alone


def test_a_row_meets_its_bar_by_its_share_of_the_limit():
    row = {"values": {OURS: {"median": 90.0}}, "limit": 100.0, "meets_bar": False, "value": 1.1}
    assert judged(row)["meets_bar"] is True and judged(row)["of_limit"] == 0.9
    assert judged({**row, "limit": 200.0})["meets_bar"] is False
    assert judged({**row, "limit": None, "meets_bar": True})["meets_bar"] is True
    assert judged({**row, "limit": None, "value": None, "meets_bar": None})["meets_bar"] is None


def test_results_are_continued(tmp_path):
    path: Path = tmp_path / "r.json"
    assert continued(path, lambda: {"rows": []}, ()) == {"rows": [], "agreement": {}}
    path.write_text(json.dumps({"rows": [{"name": "a"}, {"name": "b"}], "agreement": {"m": 1}}))
    assert continued(path, dict, ())["rows"] == [{"name": "a"}, {"name": "b"}]
    assert continued(path, dict, ("a",))["rows"] == [{"name": "b"}]


def test_answers_are_compared_by_common_tokens():
    assert apart_by({"1": -1.0, "2": -2.0}, {"2": -2.5, "3": -3.0}) == 0.5
    assert apart_by({"1": -1.0}, {"3": -3.0}) == float("inf")


def test_rows_have_the_bars_of_their_kind():
    assert [row.figure for row in rows_of(SHAPES["lfm2-1.2b"])] == ["decode", "decode", "prefill"]
    assert [(row.figure, row.bar) for row in rows_of(SHAPES["bge-m3"])] == [("embed", 2.0)]
