"""Models of Mamba layers alone: Mamba (arXiv:2312.00752), Falcon Mamba (arXiv:2410.05355) and Mamba 2
(arXiv:2405.21060). They have no context length; ours is llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.module import Entry, Take
from kvasir.layers.ssm import Mamba1
from kvasir.models.config import MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.state_spaces import MAX_DIM, Mamba2Settings, mamba2_names, read_act, read_scan, read_taps

CONTEXT = 1 << 20
_MAMBA = {"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "tie_word_embeddings": True}
_MAMBA2 = {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768}
# What read_sizes asks for, of parts that these models do not have.
_ABSENT = {"num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1, "num_key_value_heads": 1}
# Initial values, kernels of others, precision of others
_UNUSED = """
    chunk_size head_dim intermediate_size num_heads rescale_prenorm_residual residual_in_fp32 time_step_floor
    time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale use_associative_scan use_mambapy
    use_falcon_mambapy
    """.split()


@dataclass(frozen=True, slots=True)
class Mamba1Settings:
    """The sizes and settings of a Mamba; as in `layers.ssm.Mamba1`. eps: of the norms within, None for none."""

    inner: int
    dim: int
    rank: int
    taps: int
    act: str = "silu"
    conv_bias: bool = True
    bias: bool = False
    eps: float | None = None
    norm_weights: bool = True

    def layer(self, layer: int, width: int) -> Mamba1:
        """A layer with these settings."""
        return Mamba1(
            layer,
            width,
            self.inner,
            self.dim,
            self.rank,
            self.taps,
            act=self.act,
            conv_bias=self.conv_bias,
            bias=self.bias,
            eps=self.eps,
            norm_weights=self.norm_weights,
        )


@dataclass(frozen=True, slots=True)
class MambaConfig(DecoderConfig):
    """The sizes and settings of a model of Mamba layers."""

    mamba: Mamba1Settings | Mamba2Settings | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MambaConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_MAMBA, **config})
        sizes = _sizes(f)
        mamba = read_mamba1(
            f, inner=f.integer("intermediate_size", 1, MAX_WIDTH, f.integer("expand", 1, 64, 2) * sizes["width"]),
            dim="state_size", rank="time_step_rank",
            width=sizes["width"], taps="conv_kernel", conv_bias="use_conv_bias", bias="use_bias",
            eps=f.number("mixer_rms_eps", 0.0, 1.0, 1e-6) if config.get("model_type") == "falcon_mamba" else None,
            norm_weights=False,
        )  # fmt: skip
        return cls(**sizes, mamba=mamba, windows=(0,) * _finished(f, sizes))


def _sizes(f: Fields) -> dict[str, Any]:
    whole = {"max_position_embeddings": CONTEXT, "layer_norm_epsilon": 1e-5, **f.values}
    inner = Fields({**whole, **_ABSENT, "rms_norm_eps": whole["layer_norm_epsilon"]}, f.where)
    sizes = read_sizes(inner)
    f.read |= inner.read | {"layer_norm_epsilon"}
    return sizes


def _finished(f: Fields, sizes: Mapping[str, Any]) -> int:
    """The number of layers, after all fields were read."""
    for name in _UNUSED:
        f.get(name)
    f.finish()
    return sizes["num_layers"]


def read_mamba1(
    f: Fields,
    *,
    inner: int,
    width: int,
    dim: str,
    rank: str,
    taps: str,
    conv_bias: str,
    bias: str,
    eps: float | None,
    norm_weights: bool = True,
) -> Mamba1Settings:
    """inner: channels. width: of the model. The others are names of fields, or as in `Mamba1Settings`."""
    automatic = f.get(rank) in (None, "auto")
    return Mamba1Settings(
        inner,
        f.integer(dim, 1, MAX_DIM, 16),
        -(-width // 16) if automatic else f.integer(rank, 1, MAX_WIDTH),
        read_taps(f, taps),
        read_act(f, "hidden_act"),
        f.flag(conv_bias, True),
        f.flag(bias, False),
        eps,
        norm_weights,
    )


@dataclass(frozen=True, slots=True)
class Mamba2Config(MambaConfig):
    """The sizes and settings of a model of Mamba 2 layers."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mamba2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_MAMBA2, **config})
        sizes = _sizes(f)
        f.get("norm_before_gate")  # published as true, where the norm follows the gate
        f.expect("rms_norm", True)
        inner = f.integer("expand", 1, 64, 2) * sizes["width"]
        names = ("num_heads", "n_groups", "state_size")
        mamba = Mamba2Settings(
            read_scan(f, inner=inner, names=names, defaults=(128, 8, 128), head_dim="head_dim"),
            read_taps(f, "conv_kernel"),
            read_act(f, "hidden_act"),
            conv_bias=f.flag("use_conv_bias", True),
            bias=f.flag("use_bias", False),
        )
        return cls(**sizes, mamba=mamba, windows=(0,) * _finished(f, sizes))


class MambaModel(Llama):
    """A decoder whose blocks only have a mixer. Mamba and Falcon Mamba."""

    Config = MambaConfig
    config: MambaConfig
    prefix = "backbone."

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        return DecoderLayer(self._norm(), self._mixer(layer, c), None, None)

    def _mixer(self, layer: int, c: Any) -> Mixer:
        return c.mamba.layer(layer, c.width)

    def names(self) -> Mapping[str, Entry]:
        """The name table, of a Mamba."""
        return {**self._outer_names(), **mamba1_names("backbone.layers.*.mixer", self.config.mamba)}

    def _outer_names(self) -> dict[str, Entry]:
        embed = "backbone.embeddings"
        return {
            "embed": (embed, "lm_head") if self.config.tied else embed,
            "norm": "backbone.norm_f",
            "head": "lm_head",
            "layers.*.attn_norm": "backbone.layers.*.norm",
            **self.pooler.names(),
        }


def mamba1_names(mixer: str, settings: Any) -> dict[str, Entry]:
    """Name table entries of the Mamba in "layers.*.attn". mixer: its name in the checkpoint."""
    c, ours = settings, "layers.*.attn"
    ends = (0, c.rank, c.rank + c.dim, c.rank + 2 * c.dim)
    steps = {
        f"{ours}.steps.{part}": Take(mixer + ".x_proj", (ends[i], ends[i + 1]))
        for i, part in enumerate(("dt", "b", "c"))
    }
    return {
        f"{ours}.inputs.x": Take(mixer + ".in_proj", (0, c.inner)),
        f"{ours}.inputs.z": Take(mixer + ".in_proj", (c.inner, 2 * c.inner)),
        ours: mixer,
        f"{ours}.conv": mixer + ".conv1d",
        **steps,
        **{f"{ours}.norms.{i}": f"{mixer}.{part}_layernorm" for i, part in enumerate(("dt", "b", "c"))},
        f"{ours}.dt": mixer + ".dt_proj",
        f"{ours}.dt_proj": mixer + ".dt_proj",  # the bias, which the scan adds
        f"{ours}.out": mixer + ".out_proj",
    }


class Mamba2Model(MambaModel):
    """A decoder whose blocks only have a Mamba 2."""

    Config = Mamba2Config

    def _mixer(self, layer: int, c: Any) -> Mixer:
        return c.mamba.layer(layer, c.width, c.norm_eps)

    def names(self) -> Mapping[str, Entry]:
        """The name table."""
        layer, settings = "backbone.layers.*.", self.config.mamba
        assert isinstance(settings, Mamba2Settings)
        return {
            **self._outer_names(),
            **mamba2_names(layer, "layers.*.attn", settings, "mixer"),
            "layers.*.attn.out": layer + "mixer.out_proj",
        }
