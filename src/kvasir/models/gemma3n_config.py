"""Reads the config of Gemma 3n, text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.altup import deviations_of
from kvasir.layers.rope import RopeScaling
from kvasir.models.config import MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields, is_number, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.gemma3_text import split_rope
from kvasir.models.gemma4_config import read_owners
from kvasir.models.rope import read_rope

# Published configs omit fields that equal these.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1e6,
}
_INNER, _SPARSITY, _SPARSE_LAYERS, _PATTERN = 16384, 0.95, 10, 5
_MAX_STREAMS, _MAX_DEVIATIONS = 16, 64.0


@dataclass(frozen=True, slots=True)
class Gemma3nTextConfig(DecoderConfig):
    """`rope_theta` and `rope_scaling` are those of full-attention layers, local_theta and local_scaling those of layers
    with a window.

    inners: per layer. owners: per layer, the layer whose keys and values it reads, or None. deviations: per layer, by
    how many standard deviations a gate must exceed the mean of its row, None for no cut. per_layer_vocab,
    per_layer_width: of the table of per-layer embeddings, and of one layer's vector. streams, active, scaled, rank: of
    `AltUp` and `Laurel`.
    """

    final_softcap: float = 0.0
    local_theta: float = 1e4
    local_scaling: RopeScaling = field(default_factory=RopeScaling)
    inners: tuple[int, ...] = ()
    owners: tuple[int | None, ...] = ()
    deviations: tuple[float | None, ...] = ()
    per_layer_vocab: int = 0
    per_layer_width: int = 0
    streams: int = 1
    active: int = 0
    scaled: bool = True
    rank: int = 0

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence; `max_position_embeddings` already includes any scaling."""
        return self.max_position

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3nTextConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        inners = config.get("intermediate_size")
        least = min(inners) if isinstance(inners, list) and all(type(n) is int for n in inners) and inners else inners
        f = Fields({**_DEFAULTS, **full, "intermediate_size": _INNER if least is None else least})
        sizes = read_sizes(f, act="hidden_activation")
        layers = sizes["num_layers"]
        for unread in (
            "hidden_act",
            "query_pre_attn_scalar",
            "altup_coef_clip",
            "altup_lr_multiplier",
        ):  # training only, or unused
            f.get(unread)
        f.expect("use_bidirectional_attention", False)
        slides = read_sliding_layers(f, layers) or tuple((i + 1) % _PATTERN != 0 for i in range(layers))
        window = f.integer("sliding_window", 1, MAX_POSITIONS)
        local["rope_theta"] = f.number("rope_local_base_freq", 1.0, 1e12, 1e4)
        theta, scaling = read_rope(Fields(local), sizes["max_position"])
        streams = f.integer("altup_num_inputs", 1, _MAX_STREAMS, 4)
        bias = f.flag("attention_bias", False)
        settings = {
            "windows": tuple(window if sliding else 0 for sliding in slides),
            "qkv_bias": bias,
            "out_bias": bias,
            "final_softcap": f.number("final_logit_softcapping", 1e-3, 1e6, 0.0),
            "local_theta": theta,
            "local_scaling": scaling,
            "inners": tuple(inners) if isinstance(inners, list) else (sizes["inner"],) * layers,
            "owners": read_owners(f, slides, default=15),
            "deviations": _read_deviations(f, layers),
            "per_layer_vocab": f.integer("vocab_size_per_layer_input", 1, MAX_VOCAB),
            "per_layer_width": f.integer("hidden_size_per_layer_input", 1, MAX_WIDTH),
            "streams": streams,
            "active": f.integer("altup_active_idx", 0, streams - 1, 0),
            "scaled": f.flag("altup_correct_scale", True),
            "rank": f.integer("laurel_rank", 1, MAX_WIDTH, 64),
        }
        f.finish()
        _check_inners(f, settings["inners"], layers)
        return cls(**sizes, **settings)


def _check_inners(f: Fields, inners: tuple[int, ...], layers: int) -> None:
    if len(inners) != layers or not all(1 <= inner <= MAX_WIDTH for inner in inners):
        raise ModelFileError(
            f"{f.where}: intermediate_size is {list(inners)!r:.80}",
            f"expected a number, or one for each of {layers} layers",
        )


def _read_deviations(f: Fields, layers: int) -> tuple[float | None, ...]:
    """From the shares of the gates that the cut makes 0, `activation_sparsity_pattern`, 0 for no cut; from a GGUF file
    the standard deviations themselves, `activation_sparsity_scale`, with null for no cut."""
    given, scales = f.get("activation_sparsity_pattern"), f.get("activation_sparsity_scale")
    if scales is not None:
        if not isinstance(scales, list) or len(scales) != layers:
            raise ModelFileError(f"{f.where}: activation_sparsity_scale is {scales!r:.80}", _each(layers))
        if not all(s is None or (is_number(s) and abs(s) <= _MAX_DEVIATIONS) for s in scales):
            raise ModelFileError(f"{f.where}: activation_sparsity_scale is {scales!r:.80}", _each(layers))
        return tuple(None if s is None else float(s) for s in scales)
    if given is None:
        cut = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        given = [_SPARSITY] * cut + [0.0] * (layers - cut)
    shares = given if isinstance(given, list) else [given] * layers
    if len(shares) != layers or not all(is_number(s) and 0.0 <= s < 1.0 for s in shares):
        raise ModelFileError(f"{f.where}: activation_sparsity_pattern is {given!r:.80}", f"{_each(layers)} in [0, 1)")
    return tuple(deviations_of(share) if share else None for share in shares)


def _each(layers: int) -> str:
    return f"expected a number for each of {layers} layers"
