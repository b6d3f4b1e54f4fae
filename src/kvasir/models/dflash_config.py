"""The configs of DFlash drafters (arXiv:2602.06036) and of DSpark's.

    layout        recognised by                        the layers' fields           the block's
    z-lab         DFlashDraftModel                     Qwen3's, at the top          at the top or in dflash_config
    DeepSpec      Qwen3DSparkModel                     Qwen3's, at the top          at the top
    speculators   speculators_model_type               in transformer_layer_config  at the top
    GGUF          dflash (`kvasir.models.gguf_dflash`) at the top                   at the top

Sources: `dflash/model.py` of z-lab/dflash, `qwen3_dflash.py` of vLLM, `deepspec/modeling/dspark` of
deepseek-ai/DeepSpec, and `speculators/models/dflash` and `dspark` of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.markov import KINDS
from kvasir.models.config import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    inner_object,
    read_layer_windows,
    read_sliding_layers,
)
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.eagle3_config import MAX_TAPS, TENSORS, HeadTensors, with_defaults
from kvasir.models.registry import DFLASH

MAX_BLOCK = 256  # rows of a block
_NO_TABLES = HeadTensors(embed=False, head=False)  # a drafter that shares the target's
_OTHER_BLOCKS = ("DFlash2DraftModel", "Gemma4DSparkModel", "DSparkDraftModel")
# What a drafter from speculators leaves out, by its type.
_SPECULATORS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 8, "draft_vocab_size": 32000},
    "dspark": {
        "block_size": 8, "draft_vocab_size": 32000, "sample_from_anchor": True, "markov_rank": 256,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a DFlash drafter. Raises UnsupportedModel for other drafters of blocks."""
    kind, names = config.get("speculators_model_type"), config.get("architectures")
    if isinstance(kind, str) and kind in _SPECULATORS:
        return True
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if other := [name for name in names if name in _OTHER_BLOCKS]:
        raise UnsupportedModel(
            f"config.json names {other[0]}, another drafter of blocks", f"supported: {', '.join(DFLASH)}"
        )
    return any(name in DFLASH for name in names)


@dataclass(frozen=True, slots=True)
class DFlashConfig(DecoderConfig):
    """The sizes and settings of a drafter. `vocab_size` is the target's.

    target_width: of the target's rows, 0 if it is the drafter's. layer_ids: the target's layers after which rows are
    read. target_layers: how many the target has, 0 if that is not stated. block: rows of a block, the one that it
    follows included. mask: the id that stands for those to be guessed. causal: whether a row of a block sees the
    earlier ones only. mixed: whether it does in layers with a window, and sees the whole block in the others. anchored:
    whether the row of a block's first id gives the next id, and that of each mask the one after; else the row of a mask
    gives the id in its place. final_cap: of the logits, 0 for none. markov_rank, markov_kind, confidence,
    confidence_pairs: as of a `layers.markov.MarkovHead`; a rank of 0 for none. draft_vocab: number of logits.
    """

    target_width: int = 0
    layer_ids: tuple[int, ...] = ()
    target_layers: int = 0
    block: int = 16
    mask: int = 0
    causal: bool = False
    mixed: bool = False
    anchored: bool = False
    final_cap: float = 0.0
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    confidence_pairs: bool = False
    draft_vocab: int = 0
    tensors: HeadTensors = field(default=_NO_TABLES, compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Reads a `config.json`, with the entry TENSORS of `eagle3_config`. Raises ModelFileError for bad values,
        UnsupportedModel for features without code."""
        if not is_dflash(config):
            raise UnsupportedModel(
                f"config.json names {quoted(config.get('architectures'))}, which is not a DFlash drafter",
                f"supported: {', '.join(DFLASH)}",
            )
        tensors = config.get(TENSORS)
        plain = {name: value for name, value in config.items() if name != TENSORS}
        settings = _speculators(plain) if "speculators_model_type" in plain else _plain(plain)
        if any(0 < window < settings["block"] for window in settings["windows"]):
            raise UnsupportedModel(
                f"config.json: sliding_window is less than block_size, {settings['block']}",
                "supported: windows that hold a block",
            )
        if settings["mask"] >= settings["vocab_size"]:
            raise ModelFileError(
                f"config.json: mask_token_id is {settings['mask']}", f"expected an id below {settings['vocab_size']}"
            )
        return cls(**settings, tensors=tensors if isinstance(tensors, HeadTensors) else _NO_TABLES)


@dataclass(frozen=True, slots=True)
class _Settings:
    """Fields that are in `dflash_config` or at the top."""

    outer: Fields
    inner: Fields

    def of(self, name: str) -> Fields:
        """Where the field is."""
        value = self.outer.get(name)
        return self.outer if self.inner.get(name) is None and value is not None else self.inner

    def finish(self) -> None:
        self.outer.finish()
        self.inner.finish()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    dspark = "Qwen3DSparkModel" in config["architectures"]
    f = Fields({"sample_from_anchor": True, **config} if dspark else config)
    own = _Settings(f, Fields(inner_object(config, "dflash_config"), f"{f.where}: dflash_config"))
    f.get("dflash_config")
    for name, value in (
        ("use_swa", False),
        ("attention_sink_bias", False),
        ("add_swa_attention_sink_bias", False),
        ("use_aux_hidden_state", True),
        ("is_neox_style", True),
    ):
        own.of(name).expect(name, value)
    settings = _layers(f)
    settings |= _block(own, settings) | _causal(own, settings["windows"]) | {
        "layer_ids": _layer_ids(own.of("target_layer_ids"), "target_layer_ids"),
        "target_layers": own.of("num_target_layers").integer("num_target_layers", 1, MAX_LAYERS, 0),
        "embed_scale": own.of("input_embedding_scale").number("input_embedding_scale", -1e6, 1e6, 1.0),
        "logit_scale": own.of("output_multiplier").number("output_multiplier", -1e6, 1e6, 1.0),
        "final_cap": own.of("final_logit_softcapping").number("final_logit_softcapping", 0.0, 1e6, 0.0),
    }  # fmt: skip
    own.finish()
    return settings


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = Fields(config).choice("speculators_model_type", tuple(_SPECULATORS))
    outer = Fields({**_SPECULATORS[kind], **config})
    outer.expect("projector_type", "dflash")
    outer.expect("shift_label", False)
    unused = "tie_word_embeddings", "confidence_head_alpha", "emb_dim", "gru_hidden_dim"  # in training, or with domino
    for name in ("transformer_layer_config", *unused):
        outer.get(name)
    inner = _transformer(outer)
    settings = _layers(inner)
    causal = _causal(_Settings(inner, Fields({})), settings["windows"])
    if outer.flag("sliding_window_non_causal", False):
        causal = {}
    elif causal["causal"] and not all(settings["windows"]):
        raise UnsupportedModel(
            f"{inner.where}: layer_types has sliding_attention, but use_sliding_window is false",
            "sliding layers must have a window",
        )
    settings |= _block(_Settings(outer, Fields({})), settings) | causal
    before = _layer_ids(outer, "aux_hidden_state_layer_ids")
    if 0 in before:
        raise UnsupportedModel(
            f"{outer.where}: aux_hidden_state_layer_ids is {list(before)}: the rows before layer 0",
            "supported: rows after one of the target's layers",
        )
    outer.finish()
    inner.finish()
    return settings | {"layer_ids": tuple(i - 1 for i in before)}


def _transformer(outer: Fields) -> Fields:
    """The fields of the layers in the layout of speculators. Those of windows may be at the top."""
    given = dict(inner_object(outer.values, "transformer_layer_config"))
    for name in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
        if (value := outer.get(name)) is not None:
            given[name] = value
    rope = given.get("rope_parameters")
    if isinstance(rope, Mapping):  # the parts of a position, of which a text has only one
        given["rope_parameters"] = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    return Fields(with_defaults(given, "qwen3"), f"{outer.where}: transformer_layer_config")


def _layers(f: Fields) -> dict[str, Any]:
    """The fields of the decoder layers, which are Qwen3's."""
    f.choice("model_type", ("qwen3",), "qwen3")
    sizes = read_sizes(f, kv_heads=32, head_dim=128, both_ways=True)
    if not sizes["norm_eps"]:
        raise ModelFileError(f"{f.where}: rms_norm_eps is 0", "expected a number above 0")
    bias = f.flag("attention_bias", False)
    windows = read_layer_windows(f, sizes["num_layers"])
    return sizes | {"windows": windows, "head_norm": True, "qkv_bias": bias, "out_bias": bias}


def _block(own: _Settings, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the block and of the heads over it. sizes: those of the layers."""
    own.of("num_anchors").get("num_anchors")  # of blocks in training
    rank = own.of("markov_rank").integer("markov_rank", 0, sizes["width"], 0)
    kind = own.of("markov_head_type").choice("markov_head_type", KINDS, KINDS[0])
    confidence = own.of("enable_confidence_head").flag("enable_confidence_head", False)
    pairs = own.of("confidence_head_with_markov").flag("confidence_head_with_markov", False)
    if confidence and not rank:
        raise UnsupportedModel(
            f"{own.outer.where}: enable_confidence_head without a Markov head", "supported: both, or none"
        )
    return {
        "target_width": own.of("target_hidden_size").integer("target_hidden_size", 1, MAX_WIDTH, 0),
        "block": own.of("block_size").integer("block_size", 2, MAX_BLOCK, 16),
        "mask": own.of("mask_token_id").integer("mask_token_id", 0, MAX_VOCAB),
        "anchored": own.of("sample_from_anchor").flag("sample_from_anchor", False),
        "draft_vocab": own.of("draft_vocab_size").integer("draft_vocab_size", 1, MAX_VOCAB, sizes["vocab_size"]),
        "markov_rank": rank,
        "markov_kind": kind,
        "confidence": confidence,
        "confidence_pairs": pairs,
    }


def _layer_ids(f: Fields, name: str) -> tuple[int, ...]:
    ids = f.get(name)
    if (
        not isinstance(ids, list)
        or not 0 < len(ids) <= MAX_TAPS
        or any(type(i) is not int or not 0 <= i < MAX_LAYERS for i in ids)
    ):
        raise ModelFileError(
            f"{f.where}: {name} is {quoted(ids)}", f"expected 1 to {MAX_TAPS} numbers of the target's layers"
        )
    if len(set(ids)) < len(ids):
        raise ModelFileError(f"{f.where}: {name} is {quoted(ids)}", "expected a layer only once")
    return tuple(ids)


def _causal(own: _Settings, windows: tuple[int, ...]) -> dict[str, bool]:
    """Whether the layers are causal. Without a field, those of the type sliding_attention are, and no others."""
    f = own.outer
    for place, name in ((f, "is_causal"), (own.inner, "is_causal"), (own.inner, "causal")):
        if place.get(name) is not None:
            return {"causal": place.flag(name)}
    sliding = read_sliding_layers(f, len(windows)) or (False,)
    mixed = any(sliding) != all(sliding)
    if mixed and sliding != tuple(map(bool, windows)):
        raise UnsupportedModel(
            f"{f.where}: layer_types has sliding and full attention, but use_sliding_window is false",
            "without is_causal, sliding layers must have a window",
        )
    return {"causal": all(sliding), "mixed": mixed}
