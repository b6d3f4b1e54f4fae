"""The configs of EAGLE-3 heads (arXiv:2503.01840) in every published layout.

    layout         architectures                                       the layer's fields
    SpecForge      LlamaForCausalLMEagle3                              at the top
    vLLM           Eagle3LlamaForCausalLM                              at the top
    the authors'   LlamaForCausalLM with a draft_vocab_size            at the top
    NVIDIA         LlamaForCausalLMEagle3, and an object eagle_config  at the top
    speculators    Eagle3Speculator, Eagle3DraftModel                  in transformer_layer_config
    GGUF           eagle3 (`kvasir.models.gguf_eagle3`)                at the top

Sources: the classes of these names in vLLM (`llama_eagle3.py`), SGLang, speculators and SpecForge, ModelOpt's
`hf_spec_export.py`, and llama.cpp's `conversion/llama.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.models.config import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, inner_object, read_layer_windows
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.registry import EAGLE3

*ARCHITECTURES, GGUF_TYPE = EAGLE3  # the last is the model_type of a GGUF file's config
MAX_TAPS = 16  # rows of the target that are joined
TENSORS = "head_tensors"  # the entry that `read_tensors` adds to a head's config
# What speculators leaves out of transformer_layer_config: the defaults of transformers' classes.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "vocab_size": 32000, "num_hidden_layers": 32,
    },
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "max_position_embeddings": 32768,
        "vocab_size": 151936, "num_hidden_layers": 32,
    },
}  # fmt: skip


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 head. Raises UnsupportedModel for a head that drafts several ids at
    once."""
    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if config.get("speculators_model_type") == "peagle" or any("peagle" in name.lower() for name in names):
        raise parallel("config.json")
    if any(name in ARCHITECTURES for name in names) or config.get("model_type") == GGUF_TYPE:
        return True
    return "LlamaForCausalLM" in names and config.get("draft_vocab_size") is not None


def parallel(where: str) -> UnsupportedModel:
    """The error for a head that drafts several ids at once."""
    return UnsupportedModel(f"{where}: a head with parallel drafting (P-EAGLE)", "use an EAGLE-3 head without it")


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """What a head's config takes from its tensors. target_ids: the target's id of each of its logits, int64; None if
    there is no table. embed, head: whether it has tables of its own."""

    target_ids: np.ndarray | None = None
    embed: bool = True
    head: bool = True


@dataclass(frozen=True, slots=True)
class Eagle3Config(DecoderConfig):
    """The sizes and settings of a head. `vocab_size` is the target's, `num_layers` its own.

    target_width: of the target's rows, 0 if it is the head's. layer_ids: the target's layers whose rows it reads, empty
    for the default; before: whether id i means the rows before layer i, else those after it. taps: the number of
    rows that are joined. draft_vocab: number of logits. adds_normed: whether the layer adds to the rows under their
    norm. joint_norm, chunk_norms: whether the joined rows have a norm over all of them, and one for each of the
    target's rows. carries_normed: whether the next position reads the rows after the last norm.
    """

    target_width: int = 0
    layer_ids: tuple[int, ...] = ()
    before: bool = False
    taps: int = 3
    draft_vocab: int = 0
    tensors: HeadTensors = field(default=HeadTensors(), compare=False)
    adds_normed: bool = False
    joint_norm: bool = False
    chunk_norms: bool = False
    carries_normed: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Reads a `config.json` in any layout, with the entry TENSORS. Raises ModelFileError for bad values,
        UnsupportedModel for features without code."""
        if not is_eagle3(config):
            raise UnsupportedModel(
                f"config.json names {quoted(config.get('architectures'))}, which is not an EAGLE-3 head",
                f"supported: {', '.join(ARCHITECTURES)}",
            )
        tensors = config.get(TENSORS)
        plain = {name: value for name, value in config.items() if name != TENSORS}
        nested = "transformer_layer_config" in plain or "speculators_model_type" in plain
        settings = _speculators(plain) if nested else _plain(plain)
        return cls(**settings, tensors=tensors if isinstance(tensors, HeadTensors) else HeadTensors())


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    outer = Fields(config)
    outer.choice("speculators_model_type", ("eagle3",), "eagle3")
    given = inner_object(config, "transformer_layer_config")
    inner = Fields(with_defaults(given, "llama"), f"{outer.where}: transformer_layer_config")
    for name in ("transformer_layer_config", "embed_requires_grad", "tie_word_embeddings"):
        outer.get(name)
    settings = _layer(inner) | _common(outer) | {
        "draft_vocab": outer.integer("draft_vocab_size", 1, MAX_VOCAB, 32000),
        "adds_normed": outer.flag("norm_before_residual"),
        "joint_norm": outer.flag("norm_before_fc", False),
        "before": True,
    }  # fmt: skip
    outer.finish()
    inner.finish()
    return settings


def with_defaults(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A transformer_layer_config with the fields that speculators leaves out. kind: its type if it states none."""
    kind = config.get("model_type", kind)
    return {**(_LEFT_OUT.get(kind, {}) if isinstance(kind, str) else {}), **config}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    f = Fields(config)
    eagle = Fields(inner_object(config, "eagle_config"), f"{f.where}: eagle_config")
    f.get("eagle_config")
    for name, value in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
        ("next_layer_regular", True),
        ("parallel_draft_step", 1),
    ):
        eagle.expect(name, value)
    eagle.get("parallel_draft_heads_num_layers")  # of none with one step
    f.expect("bias", False)
    settings = _layer(f) | _common(f, eagle)
    settings |= {
        "draft_vocab": f.integer("draft_vocab_size", 1, MAX_VOCAB, settings["vocab_size"]),
        "adds_normed": f.flag("norm_before_residual", False),
        "joint_norm": eagle.flag("norm_before_fc", f.flag("norm_before_fc", False)),
        "before": config.get("model_type") == GGUF_TYPE,
    }
    f.finish()
    eagle.finish()
    return settings


def _common(f: Fields, eagle: Fields | None = None) -> dict[str, Any]:
    ids = _layer_ids(f)
    if eagle is not None:
        ids = _layer_ids(eagle) or ids
    taps = f.integer("num_aux_hidden_states", 1, MAX_TAPS, len(ids) or 3)
    if ids and taps != len(ids):
        raise ModelFileError(
            f"{f.where}: num_aux_hidden_states is {taps}, eagle_aux_hidden_state_layer_ids has {len(ids)} ids",
            "expected as many ids",
        )
    if not ids and taps != 3:
        raise ModelFileError(
            f"{f.where}: num_aux_hidden_states is {taps} without eagle_aux_hidden_state_layer_ids",
            "only the layers of 3 states have a default; name them in the config",
        )
    if f.flag("parallel_drafting", False):
        raise parallel(f.where)
    return {
        "layer_ids": ids,
        "taps": taps,
        "target_width": f.integer("target_hidden_size", 1, MAX_WIDTH, 0),
        "chunk_norms": f.flag("fc_norm", f.flag("use_aux_norm", False)),
        "carries_normed": f.flag("norm_output", False),
        "logit_scale": f.number("logit_scale", -1e6, 1e6, 1.0),
    }


def _layer_ids(f: Fields) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    ids = f.get(name)
    if ids is None or ids == []:
        return ()
    if (
        not isinstance(ids, list)
        or len(ids) > MAX_TAPS
        or any(type(i) is not int or not 0 <= i <= MAX_LAYERS for i in ids)
    ):
        raise ModelFileError(f"{f.where}: {name} is {quoted(ids)}", f"expected at most {MAX_TAPS} numbers of layers")
    if len(set(ids)) < len(ids):
        raise ModelFileError(f"{f.where}: {name} is {quoted(ids)}", "expected a layer only once")
    return tuple(ids)


def _layer(f: Fields) -> dict[str, Any]:
    """The fields of the decoder layers: those of a Llama or of a Qwen3, which normalises q and k by head."""
    kind = f.choice("model_type", ("llama", "qwen3", GGUF_TYPE), "llama")
    head_norm = kind == "qwen3"
    sizes = read_sizes(f, kv_heads=32 if head_norm else 0, head_dim=128 if head_norm else 0)
    if not sizes["norm_eps"]:
        raise ModelFileError(f"{f.where}: rms_norm_eps is 0", "expected a number above 0")
    bias = f.flag("attention_bias", False)
    return sizes | {
        "windows": read_layer_windows(f, sizes["num_layers"]),
        "head_norm": head_norm,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": f.flag("mlp_bias", False),
    }
