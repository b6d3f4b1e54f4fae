"""Heads for multi-token prediction against `mtp_oracle`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.tensors import TensorPlace
from kvasir.models.gguf_view import HFView
from kvasir.models.mtp import MultiTokenHead
from kvasir.models.registry import model_class_for
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.load import fill
from kvasir.weights.local import find_local
from tests.layers.parts import batch_of
from tests.models.driver import make_cache, piece
from tests.models.families import config_of
from tests.models.mtp_oracle import KINDS, QWEN, WHOLE, Oracle
from tests.models.oracle import TOLERANCE, DictSource, distance, dummy, random_ids

RAISED = ("qwen3-5", "step3p5")
LENGTH = 60  # beyond the window of mimo-v2-flash
FAST = ("llama", "deepseek-v3", "qwen3-5", "mimo-v2-flash")
EACH = [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS]


@cache
def made(
    transformers: Any, kind: str, layers: int = 1
) -> tuple[Any, MultiTokenHead, dict[str, Tensor], Tensor, Tensor]:
    """Our decoder and its head, the checkpoint, the logits [T, V] expected of its last layer and ids [T + layers]."""
    oracle, ids = Oracle.of(transformers, kind, layers), torch.tensor(random_ids(LENGTH + layers, 96))
    hidden = oracle.hidden(ids[:LENGTH])
    for layer in range(layers):
        expected, hidden = oracle.predict(oracle.rows(ids[1 + layer :][:LENGTH], hidden, layer), layer)
    state, config = oracle.state, oracle.config
    model = model_class_for(config)(model_class_for(config).Config.from_hf(config))
    fill(model, DictSource(state), TensorPlace())
    return model, head_of(model, DictSource(state)), state, expected, ids


def head_of(model: Any, source: Any) -> MultiTokenHead:
    head = MultiTokenHead(model)
    fill(head, source, TensorPlace())
    return head


@torch.inference_mode()
def draft(model: Any, head: MultiTokenHead, ids: Tensor, chunks: tuple[int, ...] = ()) -> Tensor:
    """The logits of the head's last layer for all ids but the last, one for each layer. They are computed in chunks of
    the given sizes, the rest in one; each layer reads the rows of the one before."""
    cache, length = make_cache(head, fill=float("nan")), len(ids) - head.count
    blocks, found, start = np.arange(1, 9, dtype=np.int32), [], 0
    for size in (*chunks, length):
        part = ids[start : min(start + size, length)].tolist()
        if not part:
            break
        batch, tap = batch_of([piece(cache, part, start, blocks)], cache), head.drafting.tap
        batch = replace(batch, wanted=frozenset({tap}))
        last = model.forward(batch.tokens_T, batch)
        carried: Any = batch.hidden.get(tap, last)
        for layer in range(head.count):
            after = torch.zeros_like(batch.tokens_T)
            after[: len(part)] = ids[start + 1 + layer :][: len(part)]
            rows, carried = head.draft(model, layer, after, carried, batch)
            assert carried.shape == rows.shape
        found.append(head.logits(model, layer, rows[: len(part)]))
        start += len(part)
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EACH)
def test_a_head_predicts_what_transformers_blocks_compute(transformers, kind):
    model, head, _, expected, ids = made(transformers, kind)
    assert 1 < expected.abs().max() < 100, "the weights' scale hides errors"
    whole = draft(model, head, ids)
    assert distance(whole, expected) < TOLERANCE
    assert torch.equal(whole, draft(model, head, ids, chunks=(1, 17, 2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", pytest.param("deepseek-v3", marks=pytest.mark.slow), "qwen3-5", "step3p5"])
def test_each_layer_predicts_what_transformers_blocks_compute(transformers, kind):
    model, head, _, expected, ids = made(transformers, kind, 3)
    assert head.count == 3
    assert distance(draft(model, head, ids), expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "architecture", "count"),
    [("glm4-moe", "glm4moe", 2), ("qwen3-5", "qwen35", 1), ("mimo-v2-flash", "mimo2", 3), ("step3p5", "step35", 3)],
)
def test_a_gguf_file_has_the_head_in_its_last_layers(transformers, kind, architecture, count):
    """As llama.cpp's converters write it: numbered after the decoder's layers, some norms with 1 added."""
    gguf = pytest.importorskip("gguf", reason="gguf has the names")
    model, _, state, _, ids = made(transformers, kind, count)
    layers, numbers = model.config.num_layers, {arch: n for n, arch in gguf.MODEL_ARCH_NAMES.items()}
    maps = [gguf.get_tensor_name_map(numbers[arch], layers + count) for arch in (architecture, "glm4moe")]
    own: dict[str, str] = dict(zip(QWEN, (f"model.layers.{layers}.{name}" for name in WHOLE), strict=True))
    usual = {
        ".final_layernorm": ".shared_head.norm", ".pre_mlp_layernorm": ".post_attention_layernorm",
        ".transformer.": ".", "shared_head.output": "shared_head.head",
    }  # fmt: skip
    file: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        drafting = re.match(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?|model\.layers\.(\d+)\.", name)
        if drafting is None or int(drafting[2] or layers) < layers:
            continue
        module, _, suffix = name.rpartition(".")
        number = int(drafting[2] or layers + int(drafting[1] or 0))
        name = own.get(module) or f"model.layers.{number}.{module[drafting.end() :]}"
        name = f"{reduce(lambda found, part: found.replace(part, usual[part]), usual, name)}.{suffix}"
        if "norm" in name and kind in RAISED:
            tensor = tensor + 1.0
        name += ".weight" if name.endswith("attention_sink_bias") else ""
        stack, _, expert = name.partition(".experts.")
        if expert:
            experts.setdefault(f"{stack}.experts.{expert.partition('.')[2]}", []).append(tensor)
        else:
            file[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    file |= {name: torch.stack(parts) for name, parts in experts.items()}
    stored = {}
    for name, tensor in file.items():  # this gguf has names of a head only for some architectures
        found = [found for names in maps if (found := names.get_name(name, (".weight", ".bias")))]
        stored[found[0]] = tensor
    config = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    view = HFView(_Stacks(stored), config, architecture)
    head = head_of(model, view)
    from_file, expected = draft(model, head, ids), draft(model, made(transformers, kind, count)[1], ids)
    if kind in RAISED:  # w + 1 - 1 is not w
        assert distance(from_file, expected) < TOLERANCE
    else:
        assert torch.equal(from_file, expected)


class _Stacks(DictSource):
    def array(self, name: str, index: int | None = None) -> np.ndarray:
        whole = super().array(name)
        return whole if index is None else whole[index]


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_loaded_with_its_head(transformers, tmp_path):
    kind = "glm4-moe"
    model, head, _, _, ids = made(transformers, kind)
    Oracle.of(transformers, kind).save(tmp_path)
    files = find_local(tmp_path)
    plain, loaded = load_model(files), load_model(files, options=LoadOptions(mtp=True))
    assert plain.mtp is None and loaded.mtp is not None
    assert loaded.held > plain.held and loaded.num_parameters > plain.num_parameters
    assert torch.equal(draft(loaded.model, loaded.mtp, ids), draft(model, head, ids))
    packed = load_model(files, options=LoadOptions(executor="program", mtp=True))
    assert packed.mtp is not None and sum(packed.formats.values()) > 0


@pytest.mark.filterwarnings("ignore")
def test_the_published_config_of_mimo_does_not_count_the_layers(transformers, tmp_path):
    kind = "mimo-v2-flash"
    model, head, _, _, ids = made(transformers, kind, 3)
    Oracle.of(transformers, kind, 3).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("num_nextn_predict_layers") == 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(find_local(tmp_path), "float32", options=LoadOptions(mtp=True))
    assert loaded.mtp is not None
    assert torch.equal(draft(loaded.model, loaded.mtp, ids), draft(model, head, ids))


def test_a_model_without_a_head_is_refused_by_name(transformers):
    with pytest.raises(UnsupportedModel, match="Llama has no layers for multi-token prediction"):
        MultiTokenHead(dummy(config_of("llama")))


@pytest.mark.filterwarnings("ignore")
def test_a_missing_part_is_named(transformers):
    model, _, state, _, _ = made(transformers, "qwen3-5")
    del (state := dict(state))["mtp.fc.weight"]
    with pytest.raises(ModelFileError, match=r"mtp\.fc\.weight"):
        head_of(model, DictSource(state))
