"""Heads whose config or tensors are wrong or hostile: each is refused with what is wrong, by name."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.models.eagle3 import tap_names
from kvasir.models.eagle3_config import Eagle3Config
from kvasir.models.registry import model_class_for
from kvasir.runner.load_head import is_head, load_head
from kvasir.weights.find import find_model
from tests.models.eagle3_heads import Tensors, config_of, settings, tensors_of, write
from tests.models.test_eagle3 import base_folder, fast, target

BAD, NO = ModelFileError, UnsupportedModel
# What JSON can hold.
VALUES = (
    *(
        None,
        True,
        False,
        "",
        "x" * 5000,
        0,
        -1,
        1,
        2**31,
        10**300,
        0.0,
        -1.5,
        1e-40,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *([], [[]], [1, -1], ["a", 2], [2**80] * 3, {}, {"a": 1}, {"rope_type": []}, {"rope_theta": "x"}),
)
AUX = "eagle_aux_hidden_state_layer_ids"
# Case -> the layout, changes of the config, and the error.
CONFIGS: dict[str, tuple[str, dict[str, Any], type[KvasirError], str]] = {
    "parallel by name": ("specforge", {"architectures": ["PEagleDraftModel"]}, NO, "P-EAGLE"),
    "parallel by type": ("speculators", {"speculators_model_type": "peagle"}, NO, "P-EAGLE"),
    "parallel by field": ("specforge", {"parallel_drafting": True}, NO, "P-EAGLE"),
    "another speculator": ("speculators", {"speculators_model_type": "medusa"}, NO, "medusa"),
    "no head": ("specforge", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, NO, "not a head"),
    "experts": ("specforge", {"model_type": "qwen3_moe"}, NO, "model_type is 'qwen3_moe'"),
    "latent attention": ("specforge", {"model_type": "kimi_k2"}, NO, "model_type is 'kimi_k2'"),
    "the last rows only": ("nvidia", {"eagle_config": {"use_aux_hidden_state": False}}, NO, "use_aux_hidden_state"),
    "several steps": ("nvidia", {"eagle_config": {"parallel_draft_step": 2}}, NO, "parallel_draft_step"),
    "unknown part": ("nvidia", {"eagle_config": {"attention_sinks": 4}}, NO, "attention_sinks"),
    "unknown field": ("specforge", {"head_gate": True}, NO, "head_gate"),
    "a bias of fc": ("specforge", {"bias": True}, NO, "bias is True"),
    "no object": ("nvidia", {"eagle_config": [1, 2]}, BAD, "eagle_config"),
    "no layer": ("speculators", {"transformer_layer_config": "llama"}, BAD, "transformer_layer_config"),
    "a type as type": ("speculators", {"transformer_layer_config": {"model_type": ["llama"]}}, BAD, "model_type"),
    "residual not stated": ("speculators", {"norm_before_residual": None}, BAD, "norm_before_residual is missing"),
    "ids as text": ("specforge", {AUX: "1,2,3"}, BAD, AUX),
    "a flag as id": ("specforge", {AUX: [True, 2, 3]}, BAD, AUX),
    "many ids": ("specforge", {AUX: list(range(17))}, BAD, AUX),
    "an id twice": ("specforge", {AUX: [1, 1, 3]}, BAD, "only once"),
    "a huge id": ("specforge", {AUX: [1, 2, 10**30]}, BAD, AUX),
    "an id too high": ("specforge", {AUX: [1, 3, 7]}, BAD, "which has 6"),
    "the embedded ids": ("speculators", {AUX: [0, 3, 5]}, NO, "before layer 0"),
    "other counts": ("specforge", {"num_aux_hidden_states": 2}, BAD, "num_aux_hidden_states is 2"),
    "four by default": ("specforge", {AUX: None, "num_aux_hidden_states": 4}, BAD, "name them"),
    "another target": ("specforge", {"vocab_size": 97}, BAD, "vocab_size is 97, but the target's vocab_size is 96"),
    "another width": ("vllm", {"target_hidden_size": 32}, BAD, "target_hidden_size is 32"),
    "its own width": ("vllm", {"target_hidden_size": None}, BAD, "hidden_size is 48"),
    "more drafts than ids": ("specforge", {"draft_vocab_size": 97}, BAD, "draft_vocab_size is 97"),
    "another table": ("specforge", {"draft_vocab_size": 39}, BAD, "d2t has 40 ids"),
    "drafts as text": ("specforge", {"draft_vocab_size": "40"}, BAD, "draft_vocab_size"),
    "eps": ("specforge", {"rms_norm_eps": 0}, BAD, "rms_norm_eps"),
    "scale": ("specforge", {"logit_scale": 1e300}, BAD, "logit_scale"),
    "huge": ("specforge", {"hidden_size": 2**40}, BAD, "hidden_size"),
    "wide": ("specforge", {"intermediate_size": 2**18}, BAD, "shape"),
    "deep": ("specforge", {"num_hidden_layers": 1000}, BAD, r"layers\.1\."),
}


def opened(folder: Any, layout: str, config: dict[str, Any], tensors: Tensors) -> Any:
    return load_head(find_model(write(folder, layout, config, tensors)), target())


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_is_refused_by_name(tmp_path, case):
    layout, changes, error, match = CONFIGS[case]
    s = settings(layout)
    config = config_of(layout, s, [2, 3, 5] if layout == "speculators" else [1, 3, 4])
    with pytest.raises(error, match=match) as caught:
        opened(tmp_path, layout, config | changes, tensors_of(s))
    assert caught.value.hint


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The fields of a config and of the objects in it."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict) and name != "speculators_config":
            yield from ((name, inner) for inner in value)


@pytest.mark.parametrize("layout", fast(("specforge", "nvidia", "speculators", "eagle-3.1"), "nvidia"))
def test_no_value_of_a_field_breaks_the_reader(layout):
    """The config is read, or refused with an error for users."""
    config = config_of(layout, settings(layout), [2, 3, 5]) | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for place in places(config):
        for value in VALUES:
            changed = deepcopy(config)
            (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
            try:
                read = Eagle3Config.from_hf(changed)
                tap_names(read, 6)
            except KvasirError as error:
                assert 0 < len(str(error)) < 2500


def ids(*values: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([*values, *[0] * (40 - len(values))], dtype=kind)


# Case -> changes of the tensors (None removes one), and the error.
TABLES: dict[str, tuple[dict[str, Any], type[KvasirError], str]] = {
    "floats": ({"d2t": torch.zeros(40)}, BAD, "d2t is F32"),
    "bytes": ({"d2t": ids(kind=torch.int8)}, BAD, "d2t is I8"),
    "flags": ({"d2t": torch.zeros(40, dtype=torch.bool)}, BAD, "d2t is BOOL"),
    "a matrix": ({"d2t": ids().view(2, 20)}, BAD, r"shape \[2, 20\]"),
    "a number": ({"d2t": torch.tensor(3)}, BAD, r"shape \[\]"),
    "nothing": ({"d2t": torch.zeros(0, dtype=torch.int64)}, BAD, r"shape \[0\]"),
    "too short": ({"d2t": torch.zeros(39, dtype=torch.int64)}, BAD, "39 ids, but draft_vocab_size is 40"),
    "below": ({"d2t": ids(-1)}, BAD, "id -1, outside"),
    "beyond": ({"d2t": ids(96)}, BAD, "id 96, outside"),
    "far": ({"d2t": ids(2**62, -(2**63))}, BAD, "numbers from"),
    "twice": ({"d2t": ids(1)}, BAD, "an id twice"),
    "no table": ({"d2t": None}, BAD, "has no d2t"),
    "no logits": ({"lm_head.weight": None}, BAD, "no tensor lm_head"),
    "parallel": ({"mask_hidden": torch.zeros(1, 192)}, NO, "P-EAGLE"),
    "more": ({"midlayer.gate.weight": torch.zeros(3)}, BAD, "midlayer.gate"),
    "other shape": ({"fc.weight": torch.zeros(64, 128)}, BAD, r"fc.weight has shape \[64, 128\]"),
    "no norm": ({"layers.0.hidden_norm.weight": None}, BAD, "hidden_norm"),
    "integers": ({"fc.weight": torch.zeros(64, 192, dtype=torch.int8)}, NO, "fc.weight"),
}


@pytest.mark.parametrize("case", TABLES)
def test_bad_tensors_are_refused_by_name(tmp_path, case):
    changes, error, match = TABLES[case]
    s = settings("specforge")
    tensors = {name: t for name, t in {**tensors_of(s), **changes}.items() if t is not None}
    with pytest.raises(error, match=match) as caught:
        opened(tmp_path, "specforge", config_of("specforge", s, [1, 3, 4]), tensors)
    assert caught.value.hint


def test_an_int32_table_and_one_of_all_ids_are_read(tmp_path):
    s = settings("specforge")
    table = tensors_of(s)["d2t"]
    head = opened(tmp_path, "specforge", config_of("specforge", s, [1, 3, 4]), tensors_of(s) | {"d2t": table.int()})
    assert head.model.target_ids.tolist() == (table + torch.arange(40)).tolist()
    s = settings("specforge", draft=96)
    for table, expected in ((torch.zeros(96), None), (95 - 2 * torch.arange(96), list(range(95, -1, -1)))):
        config = config_of("specforge", s, [1, 3, 4])
        head = opened(tmp_path, "specforge", config, tensors_of(s) | {"d2t": table.long()}).model
        assert (head.target_ids if expected is None else head.target_ids.tolist()) == expected


def test_a_width_of_its_own_needs_an_embedding_of_its_own(tmp_path):
    s = settings("vllm", embed=False)
    with pytest.raises(ModelFileError, match=r"no tensor embed_tokens\.weight, and the target's is for rows of 64"):
        opened(tmp_path, "vllm", config_of("vllm", s, [1, 3, 4]), tensors_of(s))


def test_tied_logits_need_an_embedding_of_its_own(tmp_path):
    s = settings("specforge", draft=96, head=False)
    config = config_of("specforge", s, [1, 3, 4]) | {"tie_word_embeddings": True}
    with pytest.raises(UnsupportedModel, match="cannot lend it"):
        opened(tmp_path, "specforge", config, tensors_of(s))
    tensors = tensors_of(s | {"embed": True})
    head = opened(tmp_path, "specforge", config, tensors).model
    rows = torch.randn(32, 64)
    assert torch.allclose(head.logits(rows), rows @ tensors["embed_tokens.weight"].T, atol=1e-4)


@pytest.mark.parametrize("layout", ["specforge", "authors", "speculators", "gguf"])
def test_a_head_is_told_from_a_model(tmp_path, layout):
    s = settings(layout)
    assert is_head(find_model(write(tmp_path / "head", layout, config_of(layout, s, [2, 3, 5]), tensors_of(s))))
    assert not is_head(find_model(base_folder(tmp_path)))


@pytest.mark.parametrize("layout", ["specforge", "speculators", "vllm", "assistant"])
def test_a_head_is_no_model(layout):
    config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
    with pytest.raises(UnsupportedModel, match="head that drafts for another model"):
        model_class_for(config if layout == "assistant" else config_of(layout, settings(layout)))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("target_layers", [3, 3, 3], "eagle_aux_hidden_state_layer_ids"),
        ("target_layers", [9, 2, 3], "which has 6"),
        ("block_count", 3, r"layers\.1\."),
        ("vocab_size", 95, "vocab_size"),
    ],
)
def test_a_bad_gguf_file_is_refused_by_name(tmp_path, key, value, match, monkeypatch):
    from tests.models.gguf_files import gguf

    s = settings("gguf")
    config = config_of("gguf", s, [2, 4, 6])
    if key == "target_layers":
        config["eagle_aux_hidden_state_layer_ids"] = value
    elif key == "vocab_size":
        config[key] = value
    else:
        monkeypatch.setattr(
            gguf.GGUFWriter, "add_block_count", lambda self, _: self.add_uint32("eagle3.block_count", value)
        )
    with pytest.raises(ModelFileError, match=match):
        opened(tmp_path, "gguf", config, tensors_of(s))
