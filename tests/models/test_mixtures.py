"""Models with experts, and Phi-3's fused matrices: their configs and how their checkpoints are taken apart."""

import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.moe import MoE
from kvasir.layers.tensors import TensorPlace, tensor_of
from kvasir.models.registry import model_class_for
from kvasir.weights.load import fill
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import DictSource, dummy, dummy_source, random_ids


def read(name: str, **changes):
    config = {**config_of(name), **changes}
    return model_class_for(config).Config.from_hf(config)


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    kind = model_class_for(config_of(name))
    source = dummy_source(kind(kind.Config.from_hf(config_of(name))))
    return {tensor: tensor_of(source.array(tensor)) for tensor in source.names()}


def filled(name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32):
    kind = model_class_for(config_of(name))
    model = kind(kind.Config.from_hf(config_of(name)))
    fill(model, DictSource(tensors), TensorPlace(dtype))
    return model


def test_both_spellings_of_the_number_of_experts():
    assert read("mixtral").num_experts == 5
    assert read("qwen3-moe").num_experts == 6 and read("qwen3-moe", num_experts=None).num_experts == 128
    assert read("qwen3-moe", num_local_experts=4, num_experts=None) == read("qwen3-moe", num_experts=4)


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [(1, [], "1111"), (2, [], "0101"), (2, [3], "0100"), (1, [0, 9], "0111"), (3, None, "0010")],
)
def test_which_layers_have_experts(step, dense, sparse):
    config = read("qwen3-moe", num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=dense)
    assert "".join(str(int(s)) for s in config.sparse) == sparse
    kind = model_class_for(config_of("qwen3-moe"))
    kinds = [type(layer.mlp) for layer in kind(config).layers]
    assert kinds == [MoE if s == "1" else GatedMLP for s in sparse]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", {"num_experts_per_tok": 6}),
        ("mixtral", {"num_local_experts": 10**6}),
        ("mixtral", {"num_experts_per_tok": 0}),
        ("qwen3-moe", {"mlp_only_layers": "0"}),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}),
        ("qwen3-moe", {"decoder_sparse_step": 0}),
        ("qwen3-moe", {"moe_intermediate_size": 0}),
        ("qwen3-moe", {"norm_topk_prob": 1}),
        ("phi3", {"partial_rotary_factor": 1.5}),
        ("phi3", {"partial_rotary_factor": 0.05}),
        ("phi3-longrope", {"partial_rotary_factor": 0.75}),
    ],
)
def test_impossible_mixture_configs_are_refused(name, change):
    with pytest.raises(ModelFileError):
        read(name, **change)


@pytest.mark.parametrize("field", ["shared_expert_intermediate_size", "n_group", "scoring_func", "moe_layer_freq"])
def test_other_mixtures_fields_are_refused_where_they_speak_of_experts(field):
    if field in ("n_group", "scoring_func"):
        field = f"router_{field}"
    with pytest.raises(UnsupportedModel, match=field):
        read("qwen3-moe", **{field: 2})


def test_a_missing_expert_is_named_and_one_too_many_is_refused():
    tensors = tensors_of("mixtral")
    name = "model.layers.2.block_sparse_moe.experts.4.w2.weight"
    with pytest.raises(ModelFileError, match=r"layers\.2\..*experts\.4\.w2"):
        filled("mixtral", {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ModelFileError, match=r"experts\.5"):
        filled("mixtral", {**tensors, name.replace("4", "5"): tensors[name]})


def test_each_expert_gets_its_own_matrices():
    tensors = tensors_of("qwen3-moe")
    model = filled("qwen3-moe", tensors)
    for layer in range(3):
        for e, expert in enumerate(model.layers[layer].mlp.experts):
            stored = f"model.layers.{layer}.mlp.experts.{e}."
            assert torch.equal(expert.gate_up.weights["gate"][0], tensors[stored + "gate_proj.weight"])
            assert torch.equal(expert.gate_up.weights["up"][0], tensors[stored + "up_proj.weight"])
            assert expert.down.weights["weight"].transpose(0, 1).flatten(1).equal(tensors[stored + "down_proj.weight"])


def test_routers_of_a_bfloat16_model_keep_the_checkpoints_float32():
    tensors = tensors_of("mixtral")
    router = filled("mixtral", tensors, torch.bfloat16).layers[1].mlp.router
    assert torch.equal(router.weights["weight"][0], tensors["model.layers.1.block_sparse_moe.gate.weight"])


def test_phi3s_fused_matrices_are_split_into_views():
    tensors = tensors_of("phi3")
    qkv = filled("phi3", tensors).layers[0].attn.qkv
    fused = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    assert fused.shape == (64 + 2 * 32, 64)
    assert torch.equal(torch.cat([qkv.weights[part][0] for part in "qkv"]), fused)
    assert qkv.weights["q"].data_ptr() == fused.data_ptr()


def test_longrope_reaches_the_context_of_the_long_factors():
    assert read("phi3-longrope").context_length == 512
    assert read("phi3-longrope", max_position_embeddings=32).context_length == 32
    assert read("phi3").context_length == 256


def test_gemmas_embedding_is_scaled_by_a_number_of_the_tables_type():
    config = {**config_of("gemma2"), "hidden_size": 48, "num_attention_heads": 4}
    exact, rounded = dummy(config), dummy(config, torch.bfloat16)
    assert exact.embed_scale == float(torch.tensor(48.0).sqrt())
    assert rounded.embed_scale == 6.9375  # 6.9282 in bfloat16
    assert torch.isfinite(logits_of(rounded, random_ids(20, 96), dtype=torch.bfloat16)).all()
