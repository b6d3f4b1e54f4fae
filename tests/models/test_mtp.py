"""Heads for multi-token prediction. transformers does not load them, but a head's block is a model of one layer: with
the rows that the head's matrix makes, under the head's norm, transformers' model is the oracle."""

from __future__ import annotations

from functools import cache
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
from tests.models.oracle import TOLERANCE, DictSource, distance, dummy, random_ids, randomized, state_of

LENGTH = 60  # beyond the window of mimo-v2-flash
FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
# Kind -> changes of its config that leave the one layer of a head.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "deepseek-v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "deepseek-v32": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm-moe-dsa": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "indexer_types": ["full"]},
    "glm4-moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4-moe-lite": {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "mimo-v2-flash": {
        "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"],
    },
    "qwen3-5": FULL,
    "qwen3-5-moe": FULL,
    "qwen3-next": FULL,
}  # fmt: skip
FAST = ("llama", "deepseek-v3", "qwen3-5", "mimo-v2-flash")
EACH = [pytest.param(kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS]
COUNT = {"qwen3-5": "mtp_num_hidden_layers", "qwen3-5-moe": "mtp_num_hidden_layers", "qwen3-next": ""}
WHOLE = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # joint, embed norm, hidden norm, last norm
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def reference(transformers: Any, config: dict[str, Any], seed: int) -> Any:
    kind = config.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **config)
    return randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


def renamed(kind: str, layers: int, state: dict[str, Tensor], parts: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A one-layer model's state, and the head's own parts, as a checkpoint names them."""
    names: tuple[str, ...] = QWEN
    if kind.startswith("qwen"):
        prefix = "mtp.layers.0."
    elif kind == "mimo-v2-flash":
        prefix = "model.mtp.layers.0."
        names = tuple(prefix + name for name in (*WHOLE[:3], "final_layernorm"))
    else:
        prefix = f"model.layers.{layers}."
        names = tuple(prefix + name for name in WHOLE)
    found = {
        prefix + name.removeprefix("model.layers.0."): tensor
        for name, tensor in state.items()
        if name.startswith("model.layers.0.")
    }
    if kind == "mimo-v2-flash":
        found = {name.replace("post_attention", "pre_mlp"): tensor for name, tensor in found.items()}
    return found | {
        f"{name}.weight": part for name, part in zip(names, (*parts, state["model.norm.weight"]), strict=True)
    }


@cache
def made(transformers: Any, kind: str) -> tuple[Any, MultiTokenHead, dict[str, Tensor], Tensor, Tensor]:
    """Our decoder and its head, the checkpoint, the expected logits [T, V] and ids [T + 1]."""
    target = reference(transformers, config_of(kind), 0)
    block = reference(transformers, config_of(kind) | KINDS[kind], 1)
    width, layers = target.config.hidden_size, target.config.num_hidden_layers
    generator = torch.Generator().manual_seed(2)
    joint = torch.randn((width, 2 * width), generator=generator) / width**0.5
    around = 0.0 if kind.startswith("qwen") else 1.0  # which add 1 themselves
    norms = [torch.randn(width, generator=generator) * 0.3 + around for _ in range(2)]
    ids = torch.tensor(random_ids(LENGTH + 1, 96))
    with torch.no_grad():
        hidden = target.model(ids[None, :-1]).last_hidden_state[0]
        embedded = target.get_input_embeddings()(ids[1:])
        both = [rms(rows, target.config.rms_norm_eps) * (norm + 1.0 - around)
                for rows, norm in zip((embedded, hidden), norms, strict=True)]  # fmt: skip
        block.lm_head.weight.copy_(target.lm_head.weight)
        expected = block(inputs_embeds=(torch.cat(both, 1) @ joint.T)[None]).logits[0]
    state = state_of(target) | renamed(kind, layers, state_of(block), (joint, *norms))
    config = target.config.to_dict()
    if name := COUNT.get(kind, "num_nextn_predict_layers"):
        config[name] = 1
    model = model_class_for(config)(model_class_for(config).Config.from_hf(config))
    fill(model, DictSource(state), TensorPlace())
    return model, head_of(model, DictSource(state)), state, expected, ids


def head_of(model: Any, source: Any) -> MultiTokenHead:
    head = MultiTokenHead(model)
    fill(head, source, TensorPlace())
    return head


def rms(rows: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)


@torch.inference_mode()
def draft(model: Any, head: MultiTokenHead, ids: Tensor, chunks: tuple[int, ...] = ()) -> Tensor:
    """The head's logits for each id but the last, computed in chunks of the given sizes, the rest in one."""
    cache = make_cache(head, fill=float("nan"))
    blocks, found, start = np.arange(1, 9, dtype=np.int32), [], 0
    for size in (*chunks, len(ids)):
        part = ids[start : min(start + size, len(ids) - 1)].tolist()
        if not part:
            break
        batch = batch_of([piece(cache, part, start, blocks)], cache)
        hidden = model.forward(batch.tokens_T, batch)
        after = torch.zeros_like(batch.tokens_T)
        after[: len(part)] = ids[start + 1 : start + 1 + len(part)]
        rows, carried = head.draft(model, 0, after, hidden, batch)
        assert carried.shape == rows.shape
        found.append(model.logits(rows[: len(part)]))
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
@pytest.mark.parametrize(("kind", "architecture"), [("glm4-moe", "glm4moe"), ("qwen3-5", "qwen35")])
def test_a_gguf_file_has_the_head_in_its_last_layers(transformers, kind, architecture):
    """As llama.cpp's converters write it: numbered after the decoder's layers, norms of Qwen3.5 with 1 added."""
    gguf = pytest.importorskip("gguf", reason="gguf has the names")
    model, _, state, _, ids = made(transformers, kind)
    layers, numbers = model.config.num_layers, {arch: n for n, arch in gguf.MODEL_ARCH_NAMES.items()}
    maps = [gguf.get_tensor_name_map(numbers[arch], layers + 1) for arch in (architecture, "glm4moe")]
    own: dict[str, str] = dict(zip(QWEN, (f"model.layers.{layers}.{name}" for name in WHOLE), strict=True))
    file: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        if not name.startswith(("mtp.", f"model.layers.{layers}.")):
            continue
        module, _, suffix = name.rpartition(".")
        name = f"{own.get(module, module)}.{suffix}".replace("mtp.layers.0.", f"model.layers.{layers}.")
        if "norm" in name and kind == "qwen3-5":
            tensor = tensor + 1.0
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
    from_file, expected = draft(model, head, ids), draft(model, made(transformers, kind)[1], ids)
    if kind == "qwen3-5":  # w + 1 - 1 is not w
        assert distance(from_file, expected) < TOLERANCE
    else:
        assert torch.equal(from_file, expected)


class _Stacks(DictSource):
    def array(self, name: str, index: int | None = None) -> np.ndarray:
        whole = super().array(name)
        return whole if index is None else whole[index]


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_loaded_with_its_head(transformers, tmp_path):
    import json

    from safetensors.torch import save_file

    kind = "glm4-moe"
    model, head, state, _, ids = made(transformers, kind)
    target = transformers.AutoConfig.for_model(**config_of(kind)).to_dict() | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(target | {"architectures": ["Glm4MoeForCausalLM"]}))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    files = find_local(tmp_path)
    plain, loaded = load_model(files), load_model(files, options=LoadOptions(mtp=True))
    assert plain.mtp is None and loaded.mtp is not None
    assert loaded.held > plain.held and loaded.num_parameters > plain.num_parameters
    assert torch.equal(draft(loaded.model, loaded.mtp, ids), draft(model, head, ids))
    packed = load_model(files, options=LoadOptions(executor="program", mtp=True))
    assert packed.mtp is not None and sum(packed.formats.values()) > 0


def test_a_model_without_a_head_is_refused_by_name(transformers):
    with pytest.raises(UnsupportedModel, match="Llama has no layers for multi-token prediction"):
        MultiTokenHead(dummy(config_of("llama")))


@pytest.mark.filterwarnings("ignore")
def test_a_missing_part_is_named(transformers):
    model, _, state, _, _ = made(transformers, "qwen3-5")
    del (state := dict(state))["mtp.fc.weight"]
    with pytest.raises(ModelFileError, match=r"mtp\.fc\.weight"):
        head_of(model, DictSource(state))
