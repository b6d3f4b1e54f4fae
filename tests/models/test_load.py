"""Filling a model: what is missing, left over or of another shape is named, and nothing is copied needlessly."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel
from kvasir.layers.module import Take
from kvasir.layers.tensors import tensor_of
from kvasir.models.llama import Llama
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from kvasir.weights.load import choose_dtype
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import DictSource, dummy, ours, random_ids

CONFIG = config_of("llama")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    from tests.models.oracle import dummy_source

    source = dummy_source(Llama(Llama.Config.from_hf(CONFIG)))
    return {name: tensor_of(source.array(name)) for name in source.names()}


def test_a_missing_tensor_is_named(state):
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        ours(CONFIG, state)


def test_an_unused_tensor_is_named(state):
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(ModelFileError, match=r"does not use.*model\.layers\.0\.self_attn\.q_proj\.bias"):
        ours(CONFIG, state)


def test_tensors_of_an_extra_layer_are_counted(state):
    with pytest.raises(ModelFileError, match=r"does not use.* 4 more"):
        ours(CONFIG | {"num_hidden_layers": 2}, state)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(state):
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        ours(CONFIG, state | {"model.norm.weight": torch.zeros(63)})
    with pytest.raises(ModelFileError, match=r"up_proj.*\[112, 64\]"):
        ours(CONFIG, {n: t.T if "up_proj" in n else t for n, t in state.items()})


def test_buffers_are_ignored_and_the_prefix_may_be_missing(state):
    ids = random_ids(20, 96)
    logits = logits_of(ours(CONFIG, state), ids)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert torch.equal(logits_of(ours(CONFIG, state | extra), ids), logits)
    bare = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    assert torch.equal(logits_of(ours(CONFIG, bare), ids), logits)


def test_a_tied_head_in_either_place(state):
    ids, config = random_ids(20, 96), CONFIG | {"tie_word_embeddings": True}
    table = state["model.embed_tokens.weight"]
    without = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    logits = logits_of(ours(config, without), ids)
    assert torch.equal(logits_of(ours(config, without | {"lm_head.weight": table}), ids), logits)
    del without["model.embed_tokens.weight"]
    assert torch.equal(logits_of(ours(config, without | {"lm_head.weight": table}), ids), logits)
    untied = logits_of(ours(CONFIG, state | {"lm_head.weight": table}), ids)
    assert torch.equal(untied, logits)


def test_a_folder_is_loaded_without_copies(state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    steps: list[tuple[int, int]] = []
    loaded = load_model(find_model(tmp_path), progress=lambda done, total: steps.append((done, total)))
    assert loaded.architecture == "Llama" and loaded.dtype == "float32"
    assert loaded.num_parameters == sum(tensor.numel() for tensor in state.values())
    assert steps[-1] == (sum(t.nbytes for t in state.values()),) * 2
    assert sorted(steps) == steps
    ids = random_ids(20, 96)
    assert torch.equal(logits_of(loaded.model, ids), logits_of(ours(CONFIG, state), ids))
    qkv = loaded.model.layers[0].attn.qkv.weights
    places = [tensor.data_ptr() for tensor in (*qkv.values(), loaded.model.embed.weight)]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert max(places) - min(places) < size, "all are views of one mapped file"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"a": torch.float32, "b": torch.float32}, "float32"),
        ({"a": torch.bfloat16, "b": torch.float32}, "bfloat16"),
        ({"a": torch.float16}, "bfloat16"),
    ],
)
def test_dtype_auto(stored, expected):
    class Source(DictSource):
        def info(self, name):
            from dataclasses import replace

            names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
            return replace(super().info(name), dtype=names[stored[name]])

    source = Source({name: torch.zeros(2, 2, dtype=dtype) for name, dtype in stored.items()})
    assert choose_dtype("auto", source) == expected
    assert choose_dtype("float32", source) == "float32"


def test_dtypes_that_are_refused():
    with pytest.raises(ConfigError, match="'int3'"):
        choose_dtype("int3", DictSource({}))
    with pytest.raises(ConfigError, match="use --dtype bfloat16"):
        choose_dtype("float16", DictSource({}))


def test_rows_of_a_transposed_tensor():
    stored = torch.arange(12.0).view(3, 4)
    take = Take("c_attn", rows=(1, 3), transposed=True)
    assert take.shape((3, 4)) == (2, 3)
    assert torch.equal(take.of(stored), stored.T[1:3])
    assert torch.equal(take.of(torch.arange(4.0)), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError):
        take.shape((3, 2))


def test_random_weights_are_the_same_for_the_same_seed():
    ids = random_ids(10, 96)
    first, second, other = (logits_of(dummy(CONFIG, seed=seed), ids) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("executor", ["eager", "auto"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize(("dtype", "stored"), [(torch.int16, "I16"), (torch.int32, "I32"), (torch.bool, "BOOL")])
def test_integers_are_no_weights(state, tmp_path, executor, name, dtype, stored):
    """Converted to floats they would give another model's answers."""
    save_file(state | {name: state[name].to(dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnsupportedModel, match=rf"'{re.escape(name)}'.* {stored}\b"):
        load_model(find_model(tmp_path), options=LoadOptions(executor))
