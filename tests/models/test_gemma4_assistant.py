"""Assistants of Gemma 4 against transformers, with the target's keys and values in the engine's cache."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.layers.kv_cache import KVCache
from kvasir.models.drafting import DRAFT, TARGET, joint_layout
from kvasir.models.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from kvasir.runner.load_head import load_head
from kvasir.weights.find import find_model
from tests.layers.parts import batch_of
from tests.models.driver import piece
from tests.models.families import config_of
from tests.models.family_parts import GEMMA4, SIZES
from tests.models.oracle import (
    SENSITIVITY,
    TOLERANCE,
    distance,
    dummy,
    dummy_source,
    ours,
    random_ids,
    randomized,
    state_of,
)
from tests.models.state_spaces import ABSENT
from tests.models.test_eagle3 import fast
from tests.models.test_hostile_heads import VALUES
from tests.runner.made import files_of

LENGTH = 41
WINDOW = 24
# Targets with shared keys and values, and with keys as values -> the layers that assistants read.
OWNERS = {"gemma4": (2, 3), "gemma4-moe": (1, 2)}


def text_of(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The text config of an assistant: smaller than its target's, with the same heads of keys and values."""
    heads = {name: target[name] for name in ("attention_k_eq_v", "num_global_key_value_heads") if name in target}
    text = {
        **SIZES, **GEMMA4, **heads, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **changes,
    }  # fmt: skip
    return {name: value for name, value in text.items() if value is not ABSENT}


def assistant_config(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 64,
        "use_ordered_embeddings": False, "num_centroids": 8, "centroid_intermediate_top_k": 4,
        "tie_word_embeddings": True, "text_config": text_of(config_of(kind), **changes),
    }  # fmt: skip


@cache
def made(transformers: Any, kind: str) -> tuple[Any, Any, Any]:
    """transformers' target and assistant, and our target."""
    config = config_of(kind)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    target = randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 0)
    for layer in OWNERS[kind]:  # which this transformers forgets if no other layers of the target read them
        target.model.layers[layer].self_attn.store_full_length_kv = True
    whole = assistant_config(kind)
    whole = transformers.AutoConfig.for_model(whole.pop("model_type"), **whole)
    whole._attn_implementation = "eager"
    with pytest.MonkeyPatch.context() as patch:
        # This transformers refuses a config all of whose layers share, which its assistant asks for.
        patch.setattr(type(whole.text_config), "kv_sharing_modes", ["reuse"] * 4)
        assistant = randomized(transformers.AutoModelForCausalLM.from_config(whole, attn_implementation="eager"), 1)
    return target, assistant, ours(target.config.to_dict(), state_of(target))


def saved(folder: Path, assistant: Any, config: dict[str, Any], **more: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in assistant.state_dict().items() if name != "lm_head.weight"}
    save_file({**tensors, **more}, folder / "model.safetensors")
    return folder


def both(transformers: Any, folder: Path) -> tuple[Path, Path]:
    """The checkpoints of a target and of its assistant."""
    target, assistant, _ = made(transformers, "gemma4")
    (folder / "config.json").write_text(json.dumps(target.config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}))
    tensors = {name: tensor.contiguous() for name, tensor in state_of(target).items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    return folder, saved(folder / "head", assistant, assistant_config("gemma4"))


def dummies(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of a target and of its assistant with random weights, made without transformers."""
    files_of(folder, "gemma4")
    config = assistant_config("gemma4")
    head = Gemma4Assistant(Gemma4AssistantConfig.from_hf(config), dummy(config_of("gemma4")))
    source = dummy_source(head, 1)
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.from_numpy(source.array(name)) for name in source.names()}
    save_file(tensors, folder / "head" / "model.safetensors")
    return folder, folder / "head"


@torch.no_grad()
def expected(target: Any, assistant: Any, ids: list[int], drafted: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and carried row of each draft after `ids`, of which the target has computed all but the last."""
    out = target.model(torch.tensor([ids[:-1]]), return_shared_kv_states=True, use_cache=True)
    shared = {kind: out.shared_kv_states[kind] for kind in ("full_attention", "sliding_attention")}
    keys, values = shared["sliding_attention"]
    shared["sliding_attention"] = keys[:, :, -WINDOW:], values[:, :, -WINDOW:]  # what a cache with a window has
    token, hidden, found = ids[-1], out.last_hidden_state[:, -1:], []
    for _ in range(drafted):
        both = torch.cat([target.get_input_embeddings()(torch.tensor([[token]])), hidden], -1)
        position = torch.tensor([[len(ids) - 1]])
        got = assistant(inputs_embeds=both, position_ids=position, shared_kv_states=shared)
        found.append((got.logits[0, 0], got.last_hidden_state[0, 0]))
        token, hidden = int(got.logits[0, 0].argmax()), got.last_hidden_state
    return found


@torch.inference_mode()
def drafted(target: Any, head: Any, ids: list[int], count: int) -> list[tuple[Tensor, Tensor]]:
    """The engine's, all at the position of the last row that the target has computed."""
    layout = joint_layout(target, head)
    cache = KVCache(layout, [9] * len(layout.groups), 16, torch.float32)
    cache.fill_(float("nan"))
    blocks, own = np.arange(1, 9, dtype=np.int32), cache.of(TARGET)
    batch = batch_of([piece(own, ids[:-1], 0, blocks)], own)
    row, token, found = target.forward(batch.tokens_T, batch)[len(ids) - 2], ids[-1], []
    for _ in range(count):
        batch = batch_of([piece(cache.of(DRAFT), [token], len(ids) - 2, blocks)], cache.of(DRAFT))
        rows = torch.zeros((32, head.width))
        rows[0] = row
        normed, carried = head.forward(batch.tokens_T, head.join(rows), batch)
        found.append((head.logits(normed[:1])[0], carried[0]))
        row, token = carried[0], int(found[-1][0].argmax())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", fast(OWNERS, "gemma4"))
def test_an_assistant_drafts_as_in_transformers(transformers, tmp_path, kind):
    """After prompts within the window and beyond it."""
    target, assistant, mine = made(transformers, kind)
    loaded = load_head(find_model(saved(tmp_path / "head", assistant, assistant_config(kind))), mine)
    head = loaded.model
    assert isinstance(head, Gemma4Assistant) and not head.advances
    ids = random_ids(LENGTH, 96, seed=4)
    for length in (2, 17, WINDOW + 1, LENGTH):
        theirs = expected(target, assistant, ids[:length], 3)
        assert 1 < theirs[0][0].abs().max() < 100, "the weights' scale hides errors"
        for (logits, row), (own_logits, own_row) in zip(theirs, drafted(mine, head, ids[:length], 3), strict=True):
            assert distance(own_logits, logits) < TOLERANCE
            assert distance(own_row, row) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
def test_layers_read_the_last_layer_of_their_kind_that_has_keys(transformers, tmp_path):
    for kind, (local, full) in OWNERS.items():
        _, assistant, mine = made(transformers, kind)
        head = load_head(find_model(saved(tmp_path / kind, assistant, assistant_config(kind))), mine).model
        assert isinstance(head, Gemma4Assistant)
        assert tuple(spec.layer for spec in head.cache_spec()) == (local, local, local, full)
        assert {spec.model for spec in head.cache_spec()} == {TARGET}


@pytest.mark.filterwarnings("ignore")
def test_clusters_of_ids_are_not_needed(transformers, tmp_path):
    """All logits are computed, of which the clusters would have a part."""
    _, assistant, mine = made(transformers, "gemma4")
    config = assistant_config("gemma4") | {"use_ordered_embeddings": True}
    more = {
        "masked_embedding.centroids.weight": torch.randn(8, 40),
        "masked_embedding.token_ordering": torch.arange(96),
    }
    plain = load_head(find_model(saved(tmp_path / "a", assistant, assistant_config("gemma4"))), mine).model
    head = load_head(find_model(saved(tmp_path / "b", assistant, config, **more)), mine).model
    ids = random_ids(20, 96, seed=4)
    assert torch.equal(drafted(mine, plain, ids, 1)[0][0], drafted(mine, head, ids, 1)[0][0])


def written(path: Path, assistant: Any) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf", reason="gguf writes the files of these tests")
    text, arch = assistant.config.text_config, "gemma4-assistant"
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": 4, "context_length": 256, "embedding_length": 40, "feed_forward_length": 72,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "rope.dimension_count": 32, "rope.dimension_count_swa": 16, "attention.sliding_window": WINDOW,
        "attention.shared_kv_layers": 4, "nextn_predict_layers": 4, "embedding_length_out": 64,
        "embedding_length_per_layer_input": 0,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, value in (("rope.freq_base", 500.0), ("rope.freq_base_swa", 20.0), ("final_logit_softcapping", 50.0)):
        writer.add_float32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", text.rms_norm_eps)
    writer.add_array(f"{arch}.attention.sliding_window_pattern", [True, True, True, False])
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
        "self_attn.q_norm": "attn_q_norm", "self_attn.o_proj": "attn_output", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "layer_scalar": "layer_output_scale",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | {
        f"{part}_projection": f"nextn.{part}_projection" for part in ("pre", "post")
    }
    for name, tensor in assistant.state_dict().items():
        module = name.removesuffix(".weight")
        if match := re.fullmatch(r"model\.layers\.(\d)\.(.*)", module):
            writer.add_tensor(f"blk.{match[1]}.{names[match[2]]}.weight", tensor.numpy())
        elif module in whole:
            writer.add_tensor(f"{whole[module]}.weight", tensor.numpy())
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_gives_the_bits_of_the_folder(transformers, tmp_path):
    """A file cannot say that the rotary embedding is scaled."""
    _, assistant, mine = made(transformers, "gemma4")
    full = {name: value for name, value in ROPES["full_attention"].items() if name != "factor"}
    config = assistant_config("gemma4", rope_parameters=ROPES | {"full_attention": full})
    folder = load_head(find_model(saved(tmp_path / "head", assistant, config)), mine).model
    file = load_head(find_model(written(tmp_path / "head.gguf", assistant)), mine).model
    ids = random_ids(LENGTH, 96, seed=4)
    for ours_, theirs in zip(drafted(mine, file, ids, 2), drafted(mine, folder, ids, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours_, theirs, strict=True))


ROPES = GEMMA4["rope_parameters"]
CHANGES: dict[str, dict[str, Any]] = {
    "eps": {"rms_norm_eps": 0.5},
    "full theta": {"rope_parameters": ROPES | {"full_attention": ROPES["full_attention"] | {"rope_theta": 9.0}}},
    "local theta": {"rope_parameters": ROPES | {"sliding_attention": ROPES["sliding_attention"] | {"rope_theta": 2.0}}},
    "act": {"hidden_activation": "silu"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", fast(CHANGES, "full theta", "local theta"))
def test_each_field_counts(transformers, tmp_path, field):
    _, assistant, mine = made(transformers, "gemma4")
    ids = random_ids(LENGTH, 96, seed=4)
    found = []
    for i, changes in enumerate(({}, CHANGES[field])):
        config = assistant_config("gemma4", **changes)
        head = load_head(find_model(saved(tmp_path / str(i), assistant, config)), mine).model
        found.append(drafted(mine, head, ids, 1)[0][0])
    assert distance(*found) > SENSITIVITY


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("whole", "text", "error", "match"),
    [
        ({"backbone_hidden_size": 128}, {}, ModelFileError, "backbone_hidden_size is 128, but the target has 64"),
        ({"backbone_hidden_size": None}, {}, ModelFileError, "backbone_hidden_size is 1536"),
        ({"tie_word_embeddings": False}, {}, UnsupportedModel, "tie_word_embeddings"),
        ({"head_gate": 1}, {}, UnsupportedModel, "head_gate"),
        ({"text_config": [1]}, {}, ModelFileError, "text_config"),
        ({}, {"vocab_size": 97}, ModelFileError, "vocab_size is 97"),
        ({}, {"sliding_window": 23}, ModelFileError, "sliding_window is 23"),
        ({}, {"num_kv_shared_layers": 2}, UnsupportedModel, "num_kv_shared_layers is 2 of 4"),
        ({}, {"hidden_size_per_layer_input": 8}, UnsupportedModel, "hidden_size_per_layer_input"),
        ({}, {"enable_moe_block": True}, UnsupportedModel, "enable_moe_block"),
        ({}, {"use_double_wide_mlp": True}, UnsupportedModel, "use_double_wide_mlp"),
        ({}, {"head_dim": 24}, ModelFileError, "layer 0 reads heads of width 24, but layer 2 of the target has 16"),
        ({}, {"num_key_value_heads": 4}, ModelFileError, "key-value heads 4, but layer 2"),
        ({}, {"num_hidden_layers": 5, "layer_types": None, "num_kv_shared_layers": 5}, ModelFileError, r"layers\.3\."),
        ({}, {"intermediate_size": 73}, ModelFileError, "shape"),
    ],
)
def test_a_bad_config_is_refused_by_name(transformers, tmp_path, whole, text, error, match):
    _, assistant, mine = made(transformers, "gemma4")
    config = assistant_config("gemma4", **text) | whole
    with pytest.raises(error, match=match) as caught:
        load_head(find_model(saved(tmp_path, assistant, config)), mine)
    assert caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_only_a_gemma_4_has_an_assistant(transformers, tmp_path):
    _, assistant, _ = made(transformers, "gemma4")
    with pytest.raises(UnsupportedModel, match="cannot draft for Llama"):
        load_head(find_model(saved(tmp_path, assistant, assistant_config("gemma4"))), dummy(config_of("llama")))


def test_no_value_of_a_field_breaks_the_reader():
    config = assistant_config("gemma4")
    places = [(config, name) for name in config if name != "model_type"]
    for part, name in [*places, *((config["text_config"], name) for name in config["text_config"])]:
        for value in VALUES:
            changed = deepcopy(config)
            (changed if part is config else changed["text_config"])[name] = value
            try:
                Gemma4AssistantConfig.from_hf(changed)
            except KvasirError as error:
                assert 0 < len(str(error)) < 2500
