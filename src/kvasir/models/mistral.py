"""Mistral (arXiv:2310.06825): Llama whose layers may all have a sliding window; Ministral 3, whose queries grow with
their position; and the text part of the multimodal Mistral 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.module import Entry, Take
from kvasir.layers.rope import Rope
from kvasir.models.config import MAX_POSITIONS, Fields, inner_object, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OF_IMAGES = ("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer")
IMAGE_TENSORS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_COPY = "max_position_embeddings"  # of the field beside the rope's
_DEFAULT_WINDOW = 4096  # if the field is absent; null means no window


@dataclass(frozen=True, slots=True)
class MistralConfig(DecoderConfig):
    """The sizes and settings of a Mistral; all layers have the same window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MistralConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=8, both_ways=True)
        absent = 0 if "sliding_window" in config else _DEFAULT_WINDOW
        window = f.integer("sliding_window", 1, MAX_POSITIONS, absent)
        f.finish()
        return cls(**sizes, windows=(window,) * sizes["num_layers"])


class Mistral(Llama):
    """A Llama with the windows of its config."""

    Config = MistralConfig


@dataclass(frozen=True, slots=True)
class MinistralConfig(MistralConfig):
    """The sizes and settings of a Ministral, whose layers may have a window or not."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MinistralConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=8)
        absent, layers = 0 if "sliding_window" in config else _DEFAULT_WINDOW, sizes["num_layers"]
        window = f.integer("sliding_window", 1, MAX_POSITIONS, absent)
        slides = read_sliding_layers(f, layers) or (True,) * layers
        f.finish()
        return cls(**sizes, windows=tuple(window if sliding else 0 for sliding in slides))


class Ministral(Mistral):
    """A Mistral with the windows of its layers."""

    Config = MinistralConfig


@dataclass(frozen=True, slots=True)
class Ministral3Config(MistralConfig):
    """The sizes and settings of a Ministral 3. growth: of the queries, as in `Rope`."""

    growth: tuple[float, int] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ministral3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        given = Fields(inner_object(config, name) or _YARN, f"config.json: {name}")
        beta = given.number("llama_4_scaling_beta", 0.0, 1e3, 0.0)
        rope = {key: value for key, value in given.values.items() if key not in ("llama_4_scaling_beta", _COPY)}
        f = Fields({**_DEFAULTS, **config, name: rope})
        sizes = read_sizes(f, kv_heads=8, head_dim=128)
        layers, window = sizes["num_layers"], f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        f.finish()
        length = given.integer("original_max_position_embeddings", 1, MAX_POSITIONS, sizes["max_position"])
        return cls(**sizes, windows=(window,) * layers, growth=(beta, length) if beta else None)


class Ministral3(Mistral):
    """A Mistral whose queries grow with their position."""

    Config = Ministral3Config

    def __init__(self, config: Ministral3Config):
        self.query_rope = Rope(config.rotary_dim, config.rope_theta, config.rope_scaling, config.growth)
        super().__init__(config)

    def _attention_options(self, layer: int, c: Ministral3Config) -> dict[str, Any]:
        more = {"query_rope": self.query_rope} if c.growth else {}
        return {**super()._attention_options(layer, c), **more}


class Mistral3Config(Ministral3Config):
    """The config of the text model; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ministral3Config:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        f = Fields(config)
        text, tied = f.get("text_config"), f.flag("tie_word_embeddings", False)
        if not isinstance(text, Mapping):
            raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
        if (kind := text.get("model_type", "mistral")) not in ("mistral", "ministral3"):
            raise UnsupportedModel(f"{f.where}: a text model of type {quoted(kind)}", "supported: mistral, ministral3")
        for image in OF_IMAGES:
            f.get(image)
        f.finish()
        plain = {} if kind == "ministral3" or text.get("rope_parameters") else {"rope_parameters": _plain(text)}
        return Ministral3Config.from_hf({"tie_word_embeddings": tied, **text, **plain})


def _plain(text: Mapping[str, Any]) -> dict[str, Any]:
    return text.get("rope_scaling") or {"rope_type": "default", "rope_theta": text.get("rope_theta", 10000.0)}


class Mistral3(Ministral3):
    """`Ministral3`, or a Mistral, under the tensor names of the multimodal checkpoint."""

    Config = Mistral3Config

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the image tower."""
        return (*super().ignored, IMAGE_TENSORS)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, whose modules lie beside the image tower."""
        return {path: within(entry) for path, entry in super().names().items()}


def within(entry: Entry) -> Entry:
    """The entry, and the same under the names of a language model beside an image tower."""
    places = entry if isinstance(entry, tuple) else (entry,)
    prefixes = ("model.language_model.", "language_model.model.", "language_model.")
    return (*places, *(_beside(place, prefix) for prefix in prefixes for place in places))


def _beside(place: str | Take, prefix: str) -> str | Take:
    if isinstance(place, Take):
        return replace(place, name=prefix + place.name.removeprefix("model."))
    return prefix + place.removeprefix("model.")
