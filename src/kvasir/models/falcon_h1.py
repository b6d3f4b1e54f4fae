"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 in parallel in every block, with multipliers throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Module
from kvasir.layers.ssm import Mamba2, scaled
from kvasir.models.config import MAX_WIDTH, Fields, is_number
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.state_spaces import Mamba2Settings, mamba2_names, read_mamba2

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
_MULTIPLIERS = ("attention_in", "attention_out", "ssm_in", "ssm_out", "key")


@dataclass(frozen=True, slots=True)
class FalconH1Config(DecoderConfig):
    """The sizes and settings of a Falcon-H1.

    mamba: of its Mamba 2. inputs, outputs: factors of what attention and Mamba 2 read and write. mlp_scales: of the
    gate and of the result of an MLP.
    """

    mamba: Mamba2Settings | None = None
    inputs: tuple[float, float] = (1.0, 1.0)
    outputs: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> FalconH1Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=8)
        bias, mlp_bias = f.flag("attention_bias", False), f.flag("mlp_bias", False)
        factor = {name: _number(f, name + "_multiplier") for name in _MULTIPLIERS}
        mamba = _read_mamba(f, sizes["width"])
        settings = {
            "inputs": (factor["attention_in"], factor["ssm_in"]),
            "outputs": (factor["attention_out"], factor["ssm_out"]),
            "mlp_scales": _read_numbers(f, "mlp_multipliers", 2),
            "embed_scale": _number(f, "embedding_multiplier"),
            "logit_scale": _number(f, "lm_head_multiplier"),
            "attn_scale": factor["key"] * sizes["head_dim"] ** -0.5,
        }
        f.expect("mamba_use_mlp", True)
        for unused in ("num_logits_to_keep", "mlp_expansion_factor"):  # the latter follows from the sizes
            f.get(unused)
        f.finish()
        return cls(
            **sizes,
            **settings,
            mamba=mamba,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=mlp_bias,
            windows=(0,) * sizes["num_layers"],
        )


def _number(f: Fields, name: str) -> float:
    return f.number(name, -1e6, 1e6, 1.0)


def _read_mamba(f: Fields, width: int) -> Mamba2Settings:
    inner = f.integer("mamba_d_ssm", 1, MAX_WIDTH, 1024 if "mamba_d_ssm" not in f.values else 0)
    found = replace(
        read_mamba2(f, width, inner=inner),
        out_bias=f.flag("projectors_bias", False),
        norm_first=f.flag("mamba_norm_before_gate", True),
        normalised=f.flag("mamba_rms_norm", False),
    )
    z, x, b, c, dt = _read_numbers(f, "ssm_multipliers", 5)
    return replace(found, scales=(z, x, b, c, dt))


def _read_numbers(f: Fields, name: str, count: int) -> tuple[float, ...]:
    given = f.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list | tuple) or len(given) != count or not all(map(is_number, given)):
        raise ModelFileError(f"{f.where}: {name} is {given!r:.80}", f"expected {count} numbers")
    return tuple(map(float, given))


class ParallelMixer(Module):
    """x: float32 [T, D] -> [T, D]: the sum of attention and Mamba 2. inputs, outputs: factors of each."""

    def __init__(self, attention: Attention, mamba: Mamba2, inputs: tuple[float, float], outputs: tuple[float, float]):
        self.attention, self.mamba, self.inputs, self.outputs = attention, mamba, inputs, outputs

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        mixers = zip((self.attention, self.mamba), self.inputs, self.outputs, strict=True)
        attended_TD, scanned_TD = (scaled(mixer(scaled(x_TD, i), batch), o) for mixer, i, o in mixers)
        return scanned_TD + attended_TD


class ScaledMLP(GatedMLP):
    """A gated MLP. scales: of its gate and of its result."""

    scales = (1.0, 1.0)

    def __call__(self, x_TD: Tensor, batch: Batch) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, batch)
        return scaled(self.down(self.act(scaled(gate_TI, self.scales[0])) * up_TI, batch), self.scales[1])


class FalconH1(Llama):
    """A Llama with a Mamba 2 beside attention."""

    Config = FalconH1Config
    config: FalconH1Config

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        options = self._attention_options(layer, c)
        attention = Attention(layer, c.width, c.heads, c.kv_heads, c.head_dim, **options)
        mamba = c.mamba.layer(c.num_layers + layer, c.width, c.norm_eps)
        mlp = ScaledMLP(c.width, c.inner, c.act, c.mlp_bias)
        mlp.scales = c.mlp_scales
        mixer: Any = ParallelMixer(attention, mamba, c.inputs, c.outputs)
        return DecoderLayer(self._norm(), mixer, self._norm(), mlp)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """Two caches per layer: those of attention, in the order of the layers, then those of Mamba 2."""
        mixers: list[Any] = [layer.attn for layer in self.layers]
        return (*(m.attention.cache() for m in mixers), *(m.mamba.cache() for m in mixers))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the Mamba 2."""
        layer = "model.layers.*."
        attention = {
            path.replace(".attn.", ".attn.attention."): name
            for path, name in super().names().items()
            if ".attn." in path
        }
        return {
            **super().names(),
            **attention,
            "norm": "model.final_layernorm",
            "layers.*.mlp_norm": layer + "pre_ff_layernorm",
            **{f"layers.*.mlp.gate_up.{part}": f"{layer}feed_forward.{part}_proj" for part in ("gate", "up")},
            "layers.*.mlp.down": layer + "feed_forward.down_proj",
            **mamba2_names(layer, "layers.*.attn.mamba", self.config.mamba, "mamba"),
            "layers.*.attn.mamba.out": layer + "mamba.out_proj",
        }
