"""Mistral 4: the latent attention of DeepSeek-V2 with queries that grow with their position, as those of Ministral 3,
and mixtures with a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.layers.rope import Rope, still
from kvasir.models.config import MAX_POSITIONS, Fields, inner_object
from kvasir.models.deepseek_v2 import LatentConfig, LatentDecoder, latent_fields, read_latent
from kvasir.models.glm4_moe import read_deepseek_experts
from kvasir.models.mistral import IMAGE_TENSORS, OF_IMAGES, within

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_OWN = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
_DEFAULTS = {
    "vocab_size": 131072, "max_position_embeddings": 1048576, "kv_lora_rank": 256, "q_lora_rank": 1024,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mistral4Config(LatentConfig):
    """The sizes and settings of a Mistral 4. growth: of the queries, as in `Rope`."""

    growth: tuple[float, int] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        config = _text(config)
        given = Fields(inner_object(config, "rope_parameters") or _YARN, "config.json: rope_parameters")
        rope = {key: value for key, value in given.values.items() if key not in _OWN}
        f = latent_fields({**config, "rope_parameters": rope}, _DEFAULTS)
        sizes = read_latent(f)
        turning, plain = sizes["head_dim"], sizes["plain_dim"]
        share = given.number("partial_rotary_factor", 0.0, 1.0, turning / (turning + plain))
        if int((turning + plain) * share) != turning or plain % 2:
            raise ModelFileError(f"{given.where}: partial_rotary_factor is {share:g}",
                                 f"{turning} of {turning + plain} dimensions rotate")  # fmt: skip
        beta = given.number("llama_4_scaling_beta", 0.0, 1e3, 0.0)
        length = given.integer("original_max_position_embeddings", 1, MAX_POSITIONS, sizes["max_position"])
        f.expect("n_group", 1)  # the choice of groups differs from those of DeepSeek
        experts = read_deepseek_experts(f, sizes["num_layers"], scores="softmax")
        interleaved = f.flag("rope_interleave", True)
        f.finish()
        growth = (beta, length) if beta else None
        return cls(**sizes, **experts, interleaved=interleaved, growth=growth)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model: the config itself, or its `text_config` without the image parts."""
    text = config.get("text_config")
    if text is None:
        return config
    f = Fields(config)
    tied = f.flag("tie_word_embeddings", False)
    for image in ("text_config", *OF_IMAGES):
        f.get(image)
    f.finish()
    if not isinstance(text, Mapping):
        raise ModelFileError(f"{f.where}: text_config is not an object", "expected that of the text model")
    return {"tie_word_embeddings": tied, **text}


class Mistral4(LatentDecoder):
    """A decoder with latent attention and queries that grow with their position."""

    Config = Mistral4Config
    selection: ClassVar[str] = ""

    def __init__(self, config: Mistral4Config):
        self.query_rope = Rope(config.rotary_dim, config.rope_theta, config.rope_scaling, config.growth)
        self.query_growth = still(config.plain_dim, config.growth) if config.growth else None
        super().__init__(config)

    def _latent_options(self, layer: int, c: Any) -> dict[str, Any]:
        more = {"query_rope": self.query_rope, "query_growth": self.query_growth} if c.growth else {}
        return {**super()._latent_options(layer, c), **more}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the image tower."""
        return (*super().ignored, IMAGE_TENSORS)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `LatentDecoder.names`, whose modules may lie beside the image tower."""
        return {path: within(entry) for path, entry in super().names().items()}
