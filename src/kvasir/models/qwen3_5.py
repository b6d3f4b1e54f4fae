"""Qwen3.5: Gated DeltaNet layers and gated attention, as in Qwen3-Next, with projections of their own for the parts;
with MLPs, or in every layer a mixture of experts with a shared expert. Of the multimodal models, the text part:
the whole model without images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.module import Entry
from kvasir.layers.moe import Routing
from kvasir.models.config import MAX_LAYERS, MAX_WIDTH, Fields, inner_object
from kvasir.models.decoder import read_sizes, within
from kvasir.models.mixtral import read_experts
from kvasir.models.qwen3_next import Qwen3Next, Qwen3NextConfig, read_delta

_DEFAULTS = {"intermediate_size": 12288}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


@dataclass(frozen=True, slots=True)
class Qwen35TextConfig(Qwen3NextConfig):
    """The sizes and settings of a Qwen3.5."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen35TextConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config, "rope_parameters": _rope(config)})
        sizes = read_sizes(f, kv_heads=4, head_dim=256, partial=True)
        layers, bias = sizes["num_layers"], f.flag("attention_bias", False)
        f.expect("attn_output_gate", True)
        f.expect("mlp_only_layers", [])
        f.expect("mamba_ssm_dtype", "float32")  # of the states
        drafting = f.integer("mtp_num_hidden_layers", 0, MAX_LAYERS, 0)
        f.flag("mtp_use_dedicated_embeddings", False)  # they only draft, with the decoder's own
        settings = {
            "windows": (0,) * layers,
            **cls._read_experts(f, layers),
            **read_delta(f, layers),
            "drafting": drafting,
        }
        f.finish()
        return cls(**sizes, **settings, qkv_bias=bias, out_bias=bias, head_norm=True)

    @classmethod
    def _read_experts(cls, f: Fields, layers: int) -> dict[str, Any]:
        return {"sparse": (False,) * layers, "num_experts": 1, "expert_inner": 1}  # there are none


class Qwen35MoeTextConfig(Qwen35TextConfig):
    """The sizes and settings of a Qwen3.5 with experts."""

    @classmethod
    def _read_experts(cls, f: Fields, layers: int) -> dict[str, Any]:
        f.expect("norm_topk_prob", True)
        num_experts, top_k = read_experts(f, num_experts=256, top_k=8)
        return {
            "sparse": (True,) * layers,
            "num_experts": num_experts,
            "routing": Routing(top_k),
            "expert_inner": f.integer("moe_intermediate_size", 1, MAX_WIDTH, 512),
            "shared_inner": f.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
        }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` without the sections of M-RoPE: without images all sections have the token's position."""
    given = inner_object(config, "rope_parameters")
    sections = given.get("mrope_section", [])
    if not isinstance(sections, list) or not all(type(size) is int and size >= 0 for size in sections):
        raise ModelFileError(f"config.json: mrope_section is {sections!r:.80}", "expected a list of sizes")
    if given.get("mrope_interleaved", True) is not True:
        raise UnsupportedModel("config.json: mrope_interleaved is not true", "this model's code supports only true")
    plain = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {**_ROPE, **plain}


class Qwen35Text(Qwen3Next):
    """A Qwen3-Next under the tensor names of Qwen3.5."""

    Config = Qwen35TextConfig

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Qwen3Next.names`, with the projections of Gated DeltaNet layers."""
        delta = "model.layers.*.linear_attn."
        return {
            **super().names(),
            **{f"layers.*.attn.inputs.{part}": take for part, take in self._inputs(delta).items()},
            "layers.*.attn.gates.b": delta + "in_proj_b",
            "layers.*.attn.gates.a": delta + "in_proj_a",
        }


class Qwen35MoeText(Qwen35Text):
    """A `Qwen35Text` with experts."""

    Config = Qwen35MoeTextConfig


class Qwen35Config(Qwen35TextConfig):
    """The config of the text model; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen35TextConfig:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        return Qwen35TextConfig.from_hf(_text_config(config))


class Qwen35MoeConfig(Qwen35MoeTextConfig):
    """The config of the text model with experts; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen35TextConfig:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        return Qwen35MoeTextConfig.from_hf(_text_config(config))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    f = Fields(config)
    text, tied = f.get("text_config"), f.flag("tie_word_embeddings", False)
    if not isinstance(text, Mapping):
        raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
    f.finish()
    return {"tie_word_embeddings": tied, **text}


class Qwen35(Qwen35Text):
    """`Qwen35Text` under the tensor names of the multimodal checkpoint."""

    Config = Qwen35Config

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the image tower."""
        return (*super().ignored, r"model\.visual\..*")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Qwen35Text.names`, whose modules lie beside the image tower."""
        return {path: within(entry, "model.", "model.language_model.") for path, entry in super().names().items()}


class Qwen35Moe(Qwen35):
    """A `Qwen35` with experts."""

    Config = Qwen35MoeConfig
