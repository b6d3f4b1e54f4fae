"""DFlash drafters against a drafter in plain torch: over hidden rows in chunks, then a block."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.models.dflash import tap_names
from kvasir.models.dflash_config import DFlashConfig
from kvasir.models.registry import model_class_for
from kvasir.runner.load_head import LoadedHead, is_head, load_head
from kvasir.weights.find import find_model
from tests.layers.parts import batch_of
from tests.models import dflash_heads as plain
from tests.models.dflash_heads import VARIANTS, config_of, settings, tensors_of, write
from tests.models.driver import make_cache, piece
from tests.models.eagle3_heads import Tensors
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids
from tests.models.test_eagle3 import fast, target
from tests.models.test_hostile_heads import VALUES, places

CONTEXT, GUESSES = 37, 5


def opened(folder: Path, config: dict[str, Any], tensors: Tensors) -> LoadedHead:
    return load_head(find_model(write(folder, config, tensors)), target())


def target_rows(s: dict[str, Any]) -> Tensor:
    return torch.randn((CONTEXT, len(s["ids"]) * s["target"]), generator=torch.Generator().manual_seed(5)) * 2


def ids_of(s: dict[str, Any]) -> list[int]:
    return [random_ids(1, s["vocab"], seed=4)[0], *(s["mask"],) * GUESSES]


def expected(s: dict[str, Any], tensors: Tensors) -> Tensor:
    table = tensors["embed_tokens.weight"] if s["embed"] else target().embed.weight
    lm_head = tensors["lm_head.weight"] if s["head"] else target().head.weight.squeeze(0)
    return plain.block(s, tensors, target_rows(s), table[ids_of(s)], lm_head)


@torch.inference_mode()
def drafted(head: Any, s: dict[str, Any], chunks: Sequence[int] = ()) -> Tensor:
    """The engine's logits of the block, after the context's rows in chunks and an earlier block."""
    cache = make_cache(head, fill=float("nan"))
    blocks, taps, start = np.arange(1, 9, dtype=np.int32), target_rows(s), 0
    for size in (*chunks, CONTEXT - sum(chunks)):
        batch = batch_of([piece(cache, [0] * size, start, blocks)], cache)
        padded = torch.zeros((len(batch.tokens_T), taps.shape[1]))
        padded[:size] = taps[start : start + size]
        head.keep(padded, batch)
        start += size
        if start < CONTEXT:  # its keys and values do not stay
            batch = batch_of([piece(cache, ids_of(s), start, blocks)], cache)
            head.forward(batch.tokens_T, None, batch)
    batch = batch_of([piece(cache, ids_of(s), CONTEXT, blocks, causal=head.causal)], cache)
    hidden, carried = head.forward(batch.tokens_T, None, batch)
    assert carried is None
    return head.logits(hidden[: len(ids_of(s))])


@pytest.mark.parametrize("variant", fast(VARIANTS, *VARIANTS.keys() - {"bonus", "dspark gated"}))
def test_a_drafter_computes_what_plain_torch_does(tmp_path, variant):
    s = settings(variant)
    tensors = tensors_of(s)
    loaded = opened(tmp_path, config_of(s, variant), tensors)
    head, logits = loaded.model, expected(s, tensors)
    assert head.taps == tuple(f"layers.{i}" for i in s["ids"]) and head.width == 0
    assert 1 < logits.abs().max() < 100, "the weights' scale hides errors"
    whole = drafted(head, s)
    assert distance(whole, logits) < TOLERANCE
    assert torch.equal(whole, drafted(head, s, chunks=(1, 17, 2)))
    assert loaded.num_parameters == sum(t.numel() for name, t in tensors.items() if name not in plain.UNREAD)
    own, ids = head.target_ids, plain.target_ids(tensors)
    assert (None if own is None else own.tolist()) == (None if ids is None else ids.tolist())
    if s["markov"]:
        hidden, before = torch.randn(4, s["width"], generator=torch.Generator().manual_seed(2)), [3, 8, 3, 90]
        added, sure = plain.corrections(s, tensors, hidden, before)
        for ours, theirs in zip(corrected(head, hidden, before), (added, sure), strict=True):
            assert distance(ours, theirs) < TOLERANCE


@torch.inference_mode()
def corrected(head: Any, hidden: Tensor, before: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What the engine's Markov head adds to the logits of ids, one after another, and how sure it is of each."""
    markov, found, sure = head.markov, [], []
    cache, state = make_cache(head), torch.zeros(markov.state_width)
    for row, token in zip(hidden, before, strict=True):
        batch = batch_of([piece(cache, [token], 0, np.arange(1, 9, dtype=np.int32))], cache)
        rows = torch.zeros(len(batch.tokens_T), markov.width + markov.state_width)
        rows[0] = torch.cat([row, state])
        latent, left = head.correct(batch.tokens_T, rows, batch)
        found.append(head.corrections(latent)[0])
        if left is not None:
            state = left[0, : markov.state_width]
        sure.append(left[0, -1].sigmoid() if markov.sure and left is not None else torch.tensor(1.0))
    return torch.stack(found), torch.stack(sure)


@pytest.mark.parametrize("variant", ["qwen3", "top", "sliding", "both ways", "mixed", "anchored", "dspark"])
def test_a_gguf_file_gives_the_same_bits(tmp_path, variant):
    s = settings(variant, embed_scale=1.0, factor=1.0)
    tensors = tensors_of(s)
    files = find_model(plain.write_gguf(tmp_path / "drafter.gguf", s, tensors))
    loaded, other = load_head(files, target()), opened(tmp_path / "folder", config_of(s, variant), tensors)
    assert is_head(files) and loaded.model.taps == other.model.taps
    assert torch.equal(drafted(loaded.model, s), drafted(other.model, s))
    model: Any = loaded.model
    assert model.anchored == s["anchored"] and loaded.num_parameters == other.num_parameters
    if s["markov"]:
        given = torch.randn(3, s["width"], generator=torch.Generator().manual_seed(2)), [3, 8, 90]
        for ours, theirs in zip(corrected(loaded.model, *given), corrected(other.model, *given), strict=True):
            assert torch.equal(ours, theirs)


def test_a_gguf_file_of_another_drafter_is_refused(tmp_path):
    s = settings("qwen3")
    for name, shape in (("context_norm", (64,)), ("selector_hidden", (8, 64))):
        tensors = {**tensors_of(s), f"{name}.weight": torch.zeros(shape)}
        with pytest.raises(UnsupportedModel, match=name):
            load_head(find_model(plain.write_gguf(tmp_path / f"{name}.gguf", s, tensors)), target())


# A change of the config that leaves the tensors' shapes.
CHANGES: dict[str, dict[str, Any]] = {
    "rms_norm_eps": {"rms_norm_eps": 0.5},
    "rope_theta": {"rope_theta": 3.0},
    "hidden_act": {"hidden_act": "gelu"},
    "is_causal": {"is_causal": True},
    "window": {
        "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8, "is_causal": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("field", fast(CHANGES, "is_causal", "window"))
def test_each_field_counts(tmp_path, field):
    s = settings("qwen3")
    tensors, config = tensors_of(s), config_of(s)
    before = drafted(opened(tmp_path / "before", config, tensors).model, s)
    after = drafted(opened(tmp_path / "after", config | CHANGES[field], tensors).model, s)
    assert distance(before, after) > SENSITIVITY


BAD, NO = ModelFileError, UnsupportedModel
OWN = {"block_size": 8, "mask_token_id": 95, "target_layer_ids": [1, 2, 4]}


def own(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**OWN, **changes}}


SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
# Case -> changes of the config, and the error.
CONFIGS: dict[str, tuple[dict[str, Any], type[KvasirError], str]] = {
    "a newer kind": ({"architectures": ["DFlash2DraftModel"]}, NO, "DFlash2DraftModel"),
    "a newer kind of speculators": ({"speculators_model_type": "dflash2"}, NO, "speculators_model_type"),
    "another DSpark": ({"architectures": ["Gemma4DSparkModel"]}, NO, "Gemma4DSparkModel"),
    "no drafter": ({"architectures": ["Qwen3Model"]}, NO, "not a head"),
    "another layer": ({"model_type": "llama"}, NO, "model_type is 'llama'"),
    "no ids": (own(target_layer_ids=None), BAD, "target_layer_ids is None"),
    "ids as text": (own(target_layer_ids="1"), BAD, "target_layer_ids"),
    "an id twice": (own(target_layer_ids=[1, 1]), BAD, "only once"),
    "a layer too high": (own(target_layer_ids=[1, 6]), BAD, "the target has 6"),
    "the last layer": (own(target_layer_ids=[1, 5]), NO, "the last of 6 layers"),
    "other layers": ({"num_target_layers": 5}, BAD, "of 5, and the target has 6"),
    "a block of one": (own(block_size=1), BAD, "block_size"),
    "a long block": (own(block_size=10**9), BAD, "block_size"),
    "no mask": (own(mask_token_id=None), BAD, "mask_token_id is missing"),
    "a mask beyond": (own(mask_token_id=96), BAD, "expected an id below 96"),
    "from the anchor": (own(sample_from_anchor=1), BAD, "sample_from_anchor"),
    "a Markov head of another kind": (own(markov_rank=8, markov_head_type="lstm"), NO, "markov_head_type"),
    "a wide Markov head": (own(markov_rank=65), BAD, "markov_rank"),
    "confidence alone": (own(enable_confidence_head=True), NO, "enable_confidence_head"),
    "no Markov tensors": (own(markov_rank=8), BAD, "markov_w1"),
    "sinks": (own(attention_sink_bias=True), NO, "attention_sink_bias"),
    "a draft vocabulary": ({"draft_vocab_size": 40}, BAD, "the checkpoint has no d2t"),
    "a large draft vocabulary": ({"draft_vocab_size": 97}, BAD, "draft_vocab_size is 97"),
    "unknown part": (own(conv_kernel_size=2), NO, "conv_kernel_size"),
    "unknown field": ({"head_gate": True}, NO, "head_gate"),
    "a narrow window": ({**SLIDING, "sliding_window": 7}, NO, "hold a block"),
    "mixed layers": ({"layer_types": ["sliding_attention", "full_attention"]}, NO, "use_sliding_window is false"),
    "another target": ({"vocab_size": 97}, BAD, "vocab_size is 97, but the target's"),
    "another width": ({"target_hidden_size": 32}, BAD, "target_hidden_size is 32"),
    "eps": ({"rms_norm_eps": 0}, BAD, "rms_norm_eps"),
    "deep": ({"num_hidden_layers": 3, "layer_types": None}, BAD, r"layers\.2\."),
}


def layer(**changes: Any) -> dict[str, Any]:
    return {
        "transformer_layer_config": config_of(settings("speculators"), "speculators")["transformer_layer_config"]
        | changes
    }


# Of the layout of speculators.
SPECULATORS: dict[str, tuple[dict[str, Any], type[KvasirError], str]] = {
    "no ids": ({"aux_hidden_state_layer_ids": None}, BAD, "aux_hidden_state_layer_ids is None"),
    "ids as text": ({"aux_hidden_state_layer_ids": "1"}, BAD, "aux_hidden_state_layer_ids"),
    "the embeddings": ({"aux_hidden_state_layer_ids": [0, 1, 2]}, NO, "the rows before layer 0"),
    "the last layer": ({"aux_hidden_state_layer_ids": [1, 2, 6]}, NO, "the last of 6 layers"),
    "a layer too high": ({"aux_hidden_state_layer_ids": [1, 2, 7]}, BAD, "the target has 6"),
    "no mask": ({"mask_token_id": None}, BAD, "mask_token_id is missing"),
    "no layer": ({"transformer_layer_config": 3}, BAD, "transformer_layer_config"),
    "an unknown field of the layer": (layer(head_gate=True), NO, "transformer_layer_config: .* head_gate"),
    "an unknown field": ({"conv_kernel_size": 2}, NO, "conv_kernel_size"),
    "Domino": ({"projector_type": "domino"}, NO, "projector_type"),
    "shifted": ({"shift_label": True}, NO, "shift_label"),
    "a partial rotation": (layer(rope_parameters={"partial_rotary_factor": 0.5}), NO, "partial_rotary_factor"),
    "no window": (layer(layer_types=["sliding_attention"] * 2, use_sliding_window=False), NO, "must have a window"),
    "a narrow window": ({"sliding_window": 7}, NO, "hold a block"),
    "another vocabulary": ({"draft_vocab_size": None}, BAD, "draft_vocab_size"),
    "another type of layer": (layer(model_type="llama"), NO, "model_type is 'llama'"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECULATORS)
def test_a_bad_config_of_speculators_is_refused_by_name(tmp_path, case):
    changes, error, match = SPECULATORS[case]
    s = settings("speculators")
    with pytest.raises(error, match=match) as caught:
        opened(tmp_path, config_of(s, "speculators") | changes, tensors_of(s))
    assert caught.value.hint


def test_windows_in_the_layout_of_speculators_may_be_at_the_top():
    config = config_of(settings("speculators"), "speculators")
    inner = dict(config["transformer_layer_config"])
    moved = {name: inner.pop(name) for name in ("layer_types", "use_sliding_window", "sliding_window")}
    config["transformer_layer_config"] = inner | {"sliding_window": None}
    assert DFlashConfig.from_hf({**config, **moved}).windows == (12, 0)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_is_refused_by_name(tmp_path, case):
    changes, error, match = CONFIGS[case]
    s = settings("qwen3")
    with pytest.raises(error, match=match) as caught:
        opened(tmp_path, config_of(s) | changes, tensors_of(s))
    assert caught.value.hint


@pytest.mark.parametrize("variant", ["qwen3", "speculators"])
def test_no_value_of_a_field_breaks_the_reader(variant):
    """The config is read, or refused with an error for users."""
    config = config_of(settings(variant), variant)
    for place in places(config):
        for value in VALUES:
            changed = deepcopy(config)
            (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
            try:
                tap_names(DFlashConfig.from_hf(changed), 6)
            except KvasirError as error:
                assert 0 < len(str(error)) < 2500


def test_unknown_tensors_and_tables_of_another_kind_are_refused(tmp_path):
    s = settings("qwen3")
    config, tensors = config_of(s), tensors_of(s)
    for name in ("markov_w1.weight", "mask_embedding", "d2t", "confidence_head.proj.weight"):
        extra = torch.zeros(40, dtype=torch.int64) if name == "d2t" else torch.zeros(96)
        with pytest.raises(KvasirError, match=name):
            opened(tmp_path, config, {**tensors, name: extra})


def test_a_drafter_is_no_model(tmp_path):
    config = config_of(settings("qwen3"))
    with pytest.raises(UnsupportedModel, match="dflash=PATH"):
        model_class_for(config)
    assert is_head(find_model(write(tmp_path, config, tensors_of(settings("qwen3")))))
