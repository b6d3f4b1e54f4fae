"""Qwen3-Next: its config, what its layers remember, its checkpoint, and the executor that runs it."""

from __future__ import annotations

import pytest
import torch

from kvasir.cli.model_facts import read_needs
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import GatedAttention
from kvasir.layers.gated_delta import GatedDelta
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.moe import Routing, SharedMoE
from kvasir.layers.tensors import TensorPlace, tensor_of
from kvasir.models.registry import model_class_for
from kvasir.ops.gated_delta import Heads
from kvasir.runner import eager_selftest as selftest
from kvasir.weights.find import find_model
from kvasir.weights.load import fill
from tests.engine.cores import core_of, random_model
from tests.models.driver import logits_of, make_cache
from tests.models.families import config_of
from tests.models.oracle import DictSource, dummy, dummy_source, random_ids


def read(**changes):
    config = {**config_of("qwen3-next"), **changes}
    return model_class_for(config).Config.from_hf(config)


def test_defaults_are_those_of_transformers(transformers):
    given = {"model_type", "vocab_size", "hidden_size", "num_attention_heads"}
    config = {name: value for name, value in config_of("qwen3-next").items() if name in given}
    config |= {"max_position_embeddings": 64, "num_hidden_layers": 8}
    ours = model_class_for(config).Config.from_hf(config)
    theirs = transformers.Qwen3NextConfig()
    assert ours.delta == Heads(
        theirs.linear_num_key_heads, theirs.linear_num_value_heads, theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
    )  # fmt: skip
    for name, field in (
        ("head_dim", "head_dim"),
        ("kv_heads", "num_key_value_heads"),
        ("taps", "linear_conv_kernel_dim"),
        ("num_experts", "num_experts"),
        ("expert_inner", "moe_intermediate_size"),
        ("shared_inner", "shared_expert_intermediate_size"),
        ("inner", "intermediate_size"),
    ):
        assert getattr(ours, name) == getattr(theirs, field), name
    assert ours.routing == Routing(theirs.num_experts_per_tok, normalise=theirs.norm_topk_prob)
    assert ours.rotary_dim == 64 and ours.recurrent == (True, True, True, False) * 2 and all(ours.sparse)


def test_which_layers_are_recurrent():
    def recurrent(**changes):
        return "".join("a1"[r] for r in read(num_hidden_layers=4, **changes).recurrent)

    assert recurrent(layer_types=["full_attention", "linear_attention"] * 2) == "a1a1"
    assert recurrent(layer_types=None) == "111a"
    assert recurrent(layer_types=None, full_attention_interval=2) == "1a1a"
    assert recurrent(layer_types=None, full_attention_interval=1) == "aaaa"


@pytest.mark.parametrize(
    "change",
    [
        {"linear_num_value_heads": 3},
        {"linear_conv_kernel_dim": 9},
        {"linear_key_head_dim": 0},
        {"layer_types": ["full_attention"]},
        {"layer_types": "linear_attention"},
        {"num_experts_per_tok": 7},
        {"full_attention_interval": 0},
    ],
)
def test_sizes_that_do_not_fit_are_refused(change):
    with pytest.raises(ModelFileError, match=r"linear|layer_types|experts|interval"):
        read(**change)


@pytest.mark.parametrize("kind", ["sliding_attention", 3])
def test_other_layers_are_refused(kind):
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read(layer_types=["full_attention", "linear_attention", kind, "linear_attention"])


def test_each_layer_has_its_kind_and_cache():
    model = dummy(config_of("qwen3-next"))
    mixers = [type(layer.attn) for layer in model.layers]
    assert mixers == [GatedDelta, GatedAttention, GatedDelta, GatedDelta]
    assert [type(layer.mlp) for layer in model.layers] == [SharedMoE, SharedMoE, GatedMLP, SharedMoE]
    groups = make_cache(model, block_size=32).groups
    assert [(g.kind.name, g.layers, g.kind.reach) for g in groups] == [("state", (0, 2, 3), 2), ("full", (1,), 0)]
    assert groups[0].bytes_per_block == 3 * 4 * (4 * 20 * 12 + (3 + 32) * (2 * 2 * 12 + 4 * 20 + 2 * 4))


def test_the_head_that_drafts_is_left_out():
    kind = model_class_for(config_of("qwen3-next"))
    config = kind.Config.from_hf(config_of("qwen3-next"))
    source = dummy_source(kind(config))
    tensors = {name: tensor_of(source.array(name)) for name in source.names()}
    fill(kind(config), DictSource({**tensors, "mtp.layers.0.mlp.gate.weight": torch.ones(2, 2)}), TensorPlace())
    with pytest.raises(ModelFileError, match=r"mtp2"):
        fill(kind(config), DictSource({**tensors, "mtp2.weight": torch.ones(2, 2)}), TensorPlace())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_grade_sees_both_kinds_of_layers(dtype, monkeypatch):
    model = dummy(config_of("qwen3-next"), dtype)
    cache = make_cache(model, dtype=dtype, fill=7.0)
    seen = []
    for kind in (GatedDelta, GatedAttention):
        monkeypatch.setattr(
            kind, "__call__", lambda self, *args, call=kind.__call__: seen.append(type(self)) or call(self, *args)
        )
    assert selftest.run(model, cache) in ("exact", "close")
    assert set(seen) == {GatedDelta, GatedAttention}
    assert all((tensor == 7).all() for tensor in cache.tensors)


def test_states_that_depend_on_the_chunk_are_noticed(monkeypatch):
    model = dummy(config_of("qwen3-next"))
    assert selftest.run(model, make_cache(model)) == "exact"
    honest = GatedDelta.__call__

    def hasty(self, x_TD, batch):
        return honest(self, x_TD, batch) * (1 + 1e-6 * len(x_TD))

    monkeypatch.setattr(GatedDelta, "__call__", hasty)
    assert selftest.run(model, make_cache(model)) == "close"


def test_it_runs_as_a_program(tmp_path):
    folder = random_model("qwen3-next", tmp_path)
    core = core_of(folder, executor="auto", threads=1)
    assert core.info.executor == "program" and not any("note" in line for line in core.summary), core.summary
    needs = read_needs(find_model(folder), 256)
    assert needs.executor == "program" and not needs.reason
    states = 2 * 2 * 4 * (4 * 12 * 16 + (3 + 64) * (2 * 2 * 16 + 4 * 12 + 2 * 4))  # two blocks in two layers
    assert [m.kv_context for m in needs.memory] == [256 * 2 * 2 * 16 * size + states for size in (2, 4)]


def test_the_memory_reaches_back_over_many_blocks():
    """The first token moves the last row, through recurrent layers alone."""
    config = {**config_of("qwen3-next"), "layer_types": ["linear_attention"] * 4}
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    source = dummy_source(model)
    tensors = {name: tensor_of(source.array(name)) for name in source.names()}
    tensors |= {name: tensor - 4.0 for name, tensor in tensors.items() if name.endswith("A_log")}  # slow decay
    fill(model, DictSource(tensors), TensorPlace())
    ids = random_ids(100, 96)
    other = [(ids[0] + 1) % 96, *ids[1:]]
    moved = (logits_of(model, ids, block_size=8)[-1] - logits_of(model, other, block_size=8)[-1]).abs().max()
    assert moved > 1e-3
