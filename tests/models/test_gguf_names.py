"""GGUF tensors under Hugging Face's names: real files first, then each name by itself."""

import re

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError
from kvasir.layers.tensors import tensor_of
from kvasir.models.config import read_hf_config
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import FAMILIES, halves_from_pairs, hf_name
from kvasir.models.gguf_view import HFView
from kvasir.models.registry import model_class_for
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import DummySource, GGUFSource, SafetensorsSource
from tests._shared import need
from tests.models.rwkv7_plain import rwkv7_name

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")

# --- real files -------------------------------------------------------------------------------------


def open_hf(name: str) -> tuple[dict, HFView]:
    source = GGUFSource(need("models", "gguf", name))
    config = hf_config_from_gguf(source.model.metadata, source)
    return config, HFView(source, config, source.model.metadata["general.architecture"])


@pytest.mark.parametrize(
    ("name", "folder"),
    [("stories260K-F32", "stories260K")]
    + [(f"TinyStories-656K-{kind}", "TinyStories-656K") for kind in ("BF16", "F16", "Q8_0", "Q4_0")],
)
def test_the_gguf_config_equals_the_folders_config(name, folder):
    found, _ = open_hf(f"{name}.gguf")
    original = read_hf_config(need("models", folder))
    assert model_class_for(found) is model_class_for(original)
    given = {**original, "head_dim": original["hidden_size"] // original["num_attention_heads"]}
    for key, value in found.items():
        assert (value if key != "eos_token_id" else value[0]) == given[key], key


@pytest.mark.parametrize(
    ("name", "folder"), [("stories260K-F32", "stories260K"), ("TinyStories-656K-BF16", "TinyStories-656K")]
)
def test_the_weights_are_the_folders_bit_for_bit(name, folder):
    _, view = open_hf(f"{name}.gguf")
    original = SafetensorsSource(need("models", folder))
    assert set(view.names()) == set(original.names())
    for tensor in original.names():
        expected = tensor_of(original.array(tensor))
        assert view.info(tensor).shape == tuple(expected.shape) and view.info(tensor).name == tensor
        assert torch.equal(tensor_of(view.array(tensor)).float(), expected.float()), tensor


def test_quantized_weights_lie_near_the_folders():
    original = SafetensorsSource(need("models", "TinyStories-656K"))
    for kind, bound in (("Q8_0", 0.01), ("Q4_0", 0.12)):
        _, view = open_hf(f"TinyStories-656K-{kind}.gguf")
        for tensor in original.names():
            expected, found = tensor_of(original.array(tensor)).float(), tensor_of(view.array(tensor)).float()
            assert (found - expected).norm() <= bound * expected.norm(), (kind, tensor)


def test_raw_rows_come_in_the_same_order_as_the_decoded_ones():
    _, view = open_hf("stories260K-F32.gguf")
    for tensor in view.names():
        raw = torch.from_numpy(view.raw(tensor).copy()).view(torch.float32)
        assert torch.equal(raw.view(view.info(tensor).shape), tensor_of(view.array(tensor)))


def test_the_bert_file_has_the_folders_names_and_its_pooling():
    config, view = open_hf("all-MiniLM-L6-v2-Q4_K_M.gguf")
    assert config["pooling"] == {"kind": "mean", "normalize": True}
    assert (config["type_vocab_size"], config["layer_norm_eps"]) == (2, 1e-12)
    assert "encoder.layer.5.attention.output.LayerNorm.bias" in view.names()
    assert view.info("embeddings.word_embeddings.weight").shape == (30522, 384)


# --- names ------------------------------------------------------------------------------------------

ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
YOUNGER = {"cohere2moe", "dflash", "eagle3", "gemma4-assistant", "hy-v3", "hy_v3", "mellum"}  # than the gguf-py at hand


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in YOUNGER - ARCHITECTURES.keys()])
def test_names_are_those_that_the_converter_reads(architecture):
    """gguf-py maps checkpoint names to GGUF ones; ours must be the inverse wherever both know a tensor."""
    known = "glm-dsa" if architecture == "deepseek32" else architecture  # which gguf-py does not have yet
    to_gguf = gguf.get_tensor_name_map(ARCHITECTURES[known], 3)
    templates = [gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[ARCHITECTURES[known]]]
    ours = [name for name in templates if name.removeprefix("blk.{bid}.") in FAMILIES[architecture].names]
    assert len(ours) >= 9
    # The converter splits, merges or renames them.
    split = ("_exps", "_shexp") if architecture in ("granitemoe", "granitehybrid", "nemotron_h_moe") else ()
    split += ("ffn_gate", "ffn_up", "ffn_down") if architecture == "granitehybrid" else ()
    split += ("time_mix_lerp_fused",) if architecture == "rwkv7" else ()
    for name in (template.format(bid=2) for template in ours if not template.endswith(split or "?")):
        found = hf_name(architecture, f"{name}.weight").replace(".*", "")  # merged, as the converter calls it
        found = found.replace("dt_bias", "dt_proj_bias")
        found = re.sub(r"(mlp|ffn)\.experts\.([wv]\d)", r"\1.experts.mlp.\2", found)
        if architecture == "bitnet":  # the table has the names of an older checkpoint
            found = found.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
        if architecture == "rwkv7":
            found = rwkv7_name(found)
        if architecture == "lfm2moe" and ".experts." in found:  # the converter's name of a merged tensor
            found = found.removeprefix("model.")
        if architecture == "step35":
            found = found.replace("moe.experts.", "moe.").replace("router_bias", "router_bias.bias")
        if found.endswith("expert_bias"):
            found, name = f"{found}.bias", f"{name}.bias"
        found = re.sub(r"^(\d)_Dense/linear", r"dense_\1", found)
        if architecture == "modern-bert":
            found = found.removeprefix("model.").replace("classifier", "classifier.out_proj")
        if found.endswith("_bias") and not found.endswith("sink_bias"):  # the converter's own change
            found, name = f"{found.removesuffix('_bias')}.bias", f"{name}.bias"
        suffixes = ("",) if found.endswith(("sinks", "sink_bias")) else (".weight", ".bias")
        assert to_gguf.get_name(found, try_suffixes=suffixes) in (f"{name}.weight", f"{name}.bias", name)


def test_tensors_without_weights_have_no_name():
    assert hf_name("llama", "rope_freqs.weight") is None
    assert hf_name("llama", "blk.0.attn_rot_embd.weight") is None
    assert hf_name("phi3", "rope_factors_long.weight") is hf_name("phi3", "rope_factors_short.weight") is None


@pytest.mark.parametrize(
    "name",
    ["blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate.3.weight", "blk.0.attn_q.scale", "x", "blk..attn_q.weight", ""],
)
def test_an_unknown_tensor_is_refused_by_name(name):
    with pytest.raises(ModelFileError, match="unknown tensor"):
        hf_name("llama", name)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (4, 8), (3, 6)])
def test_rotating_pairs_and_rotating_halves_agree_through_the_order(heads, width):
    rows = heads * width
    angles = torch.rand(width // 2, generator=torch.Generator().manual_seed(0)).repeat(heads)
    pairs = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    x, y = pairs[0::2], pairs[1::2]
    rotated = torch.stack([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], 1).flatten()
    order = halves_from_pairs(rows, heads)
    a, b = pairs[order].view(heads, 2, -1).unbind(1)
    cos, sin = angles.cos().view(heads, -1), angles.sin().view(heads, -1)
    halves = torch.stack([a * cos - b * sin, a * sin + b * cos], 1).flatten()
    assert torch.equal(rotated[order], halves)


def test_transposed_weights_are_given_back_as_the_checkpoint_holds_them():
    source = DummySource({"blk.0.attn_qkv.weight": (96, 32), "blk.0.attn_qkv.bias": (96,)})
    view = HFView(source, {}, "gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    assert view.info(name).shape == (32, 96)
    assert torch.equal(tensor_of(view.array(name)), tensor_of(source.array("blk.0.attn_qkv.weight")).T)
    assert tensor_of(view.array("transformer.h.0.attn.c_attn.bias")).shape == (96,)


def test_each_expert_is_a_view_of_the_stack():
    source = GGUFStack(np.arange(4 * 2 * 8, dtype=np.float32).reshape(4, 2, 8))
    view = HFView(source, {}, "qwen3moe")
    assert list(view.names()) == [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)]
    for e, name in enumerate(view.names()):
        assert view.info(name).shape == (2, 8) and view.info(name).nbytes == 64
        assert np.array_equal(view.array(name), source.stack[e])
        assert np.array_equal(view.raw(name).view(np.float32), source.stack[e])
        view.drop(name)
        assert source.dropped == (["blk.1.ffn_up_exps.weight"] if e == 3 else [])


@pytest.mark.parametrize("shape", [(8, 8), (2000, 1, 1), (2, 2, 2, 2)])
def test_a_malformed_stack_of_experts_is_refused(shape):
    with pytest.raises(ModelFileError, match="stack"):
        HFView(DummySource({"blk.0.ffn_up_exps.weight": shape}), {}, "qwen3moe")


def test_the_offset_of_gemma_norms_is_removed():
    source = DummySource({"blk.0.attn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32)})
    view = HFView(source, {}, "gemma2")
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(tensor_of(view.array(name)), tensor_of(source.array("blk.0.attn_norm.weight")) - 1)
    query = tensor_of(view.array("model.layers.0.self_attn.q_proj.weight"))
    assert torch.equal(query, tensor_of(source.array("blk.0.attn_q.weight")))


def test_rows_that_the_heads_cannot_share_are_refused():
    view = HFView(DummySource({"blk.0.attn_q.weight": (30, 8)}), {"num_attention_heads": 4}, "llama")
    with pytest.raises(ModelFileError, match="4 heads"):
        tensor_of(view.array("model.layers.0.self_attn.q_proj.weight"))


class GGUFStack:
    """A source of one stack of experts' matrices."""

    def __init__(self, stack: np.ndarray):
        self.stack, self.dropped = stack, []
        self.drop, self.close = self.dropped.append, list

    def names(self):
        return ["blk.1.ffn_up_exps.weight"]

    def info(self, name):
        return TensorInfo(name, self.stack.shape, "F32", self.stack.nbytes, need())

    def raw(self, name):
        return self.stack.reshape(-1, self.stack.shape[-1]).view(np.uint8)

    def array(self, name, index=None):
        return self.stack if index is None else self.stack[index]
