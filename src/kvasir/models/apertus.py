"""Apertus (arXiv:2509.14233): a Llama with head norms and MLPs without a gate, whose activation xIELU has trained
parameters in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.mlp import MLP
from kvasir.layers.module import Entry
from kvasir.layers.xielu import Xielu
from kvasir.models.config import Fields, is_number
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 12000000.0}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, slots=True)
class ApertusConfig(DecoderConfig):
    """The sizes and settings of an Apertus. xielu: per layer the parameters alpha_p, alpha_n, beta and eps; empty if
    they are tensors of the checkpoint."""

    xielu: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ApertusConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        given = dict(config)
        if (act := given.pop("hidden_act", "xielu")) != "xielu":
            raise UnsupportedModel(f"config.json: hidden_act is {act!r}", "supported: xielu")
        if not (given.get("rope_parameters") or given.get("rope_scaling") or given.get("rope_theta")):
            given["rope_parameters"] = _ROPE
        f = Fields({**_DEFAULTS, **given})
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        f.expect("qk_norm", True)
        f.expect("post_norm", False)
        f.expect("mlp_bias", False)
        xielu = _read_xielu(f, sizes["num_layers"])
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, head_norm=True, xielu=xielu)


def _read_xielu(f: Fields, layers: int) -> tuple[tuple[float, ...], ...]:
    """From `xielu`, a list for each parameter, as GGUF files have them."""
    lists = f.get("xielu")
    if lists is None:
        return ()
    sound = isinstance(lists, list) and len(lists) == 4
    if not sound or any(not isinstance(x, list) or len(x) != layers or not all(map(is_number, x)) for x in lists):
        raise ModelFileError(f"{f.where}: xielu", f"expected four lists of {layers} numbers")
    return tuple(zip(*lists, strict=True))


class Apertus(Llama):
    """A Llama with head norms and xIELU."""

    Config = ApertusConfig

    def _mlp(self, layer: int, c: Any) -> MLP:
        mlp = MLP(c.width, c.inner, bias=False)
        mlp.act = Xielu(c.xielu[layer] if c.xielu else ())
        return mlp

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the names of this family."""
        layer = "model.layers.*."
        return {
            **super().names(),
            "layers.*.attn_norm": (layer + "attention_layernorm", layer + "input_layernorm"),
            "layers.*.mlp_norm": (layer + "feedforward_layernorm", layer + "post_attention_layernorm"),
            "layers.*.mlp.up": layer + "mlp.up_proj",
            "layers.*.mlp.act": layer + "mlp.act_fn",
        }
