"""The settings of Mamba layers, as the configs of several families name them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.module import Take
from kvasir.layers.ssm import Mamba2, ScanSizes
from kvasir.models.config import MAX_HEADS, Fields, is_number

_MAX_TAPS = 8  # a cache block has at least as many tokens
MAX_DIM = 256
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")  # those that are one op
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


@dataclass(frozen=True, slots=True)
class Mamba2Settings:
    """The sizes and settings of a Mamba 2; as in `layers.ssm.Mamba2`."""

    sizes: ScanSizes
    taps: int
    act: str = "silu"
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    norm_groups: int | None = None
    norm_first: bool = False
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    normalised: bool = True

    def layer(self, layer: int, width: int, eps: float) -> Mamba2:
        """A layer with these settings. eps: of its norm."""
        return Mamba2(
            layer,
            width,
            self.sizes,
            self.taps,
            eps=eps if self.normalised else None,
            act=self.act,
            conv_bias=self.conv_bias,
            bias=self.bias,
            out_bias=self.out_bias,
            norm_groups=self.norm_groups,
            norm_first=self.norm_first,
            scales=self.scales,
        )


def read_scan(
    f: Fields,
    *,
    inner: int,
    names: Sequence[str],
    defaults: Sequence[int],
    head_dim: str,
    limit: str = "time_step_limit",
) -> ScanSizes:
    """The sizes of a scan. inner: channels. names, defaults: the fields of the heads, the groups and the numbers of
    state per channel. head_dim: the field of a head's channels, absent or "auto" if they follow from the others."""
    heads_name, groups_name, dim_name = names
    heads = f.integer(heads_name, 1, MAX_HEADS, defaults[0])
    groups = f.integer(groups_name, 1, MAX_HEADS, defaults[1])
    dim = f.integer(dim_name, 1, MAX_DIM, defaults[2])
    given = f.get(head_dim)
    width = inner // heads if given in (None, "auto") else f.integer(head_dim, 1, MAX_DIM)
    if heads * width != inner or width > MAX_DIM:
        raise ModelFileError(f"{f.where}: {heads_name} is {heads}", f"{inner} channels need that many heads of {width}")
    if heads % groups:
        raise ModelFileError(f"{f.where}: {groups_name} is {groups}", f"{heads} heads cannot share them")
    low, high = read_limits(f, limit)
    return ScanSizes(heads, groups, dim, width, low=low, high=high)


def read_limits(f: Fields, name: str) -> tuple[float, float]:
    """The limits of the steps, (0, inf) without any. Infinity is a number in some files, a string or an object in
    others."""
    value = f.get(name)
    if value is None:
        return 0.0, math.inf
    if isinstance(value, list | tuple) and len(value) == 2:
        low, high = map(_number, value)
        if 0 <= low <= high:
            return low, high
    raise ModelFileError(f"{f.where}: {name} is {str(value)[:80]}", "expected two ascending numbers, at least 0")


def _number(value: Any) -> float:
    """NaN for anything else."""
    if isinstance(value, Mapping):
        return math.inf if value.get("__float__") == "Infinity" else math.nan
    return math.inf if value in (math.inf, "Infinity") else float(value) if is_number(value) else math.nan


def read_mamba2(f: Fields, width: int, *, act: str = "hidden_act", inner: int = 0) -> Mamba2Settings:
    """From the fields that begin with `mamba_`. width: of the model. inner: channels, by default `mamba_expand` times
    the width."""
    expand = f.integer("mamba_expand", 1, 64, 2)
    f.get("mamba_chunk_size")  # how others cut the sequence: only their rounding depends on it
    names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state")
    inner = inner or width * expand
    return Mamba2Settings(
        read_scan(f, inner=inner, names=names, defaults=(128, 1, 256), head_dim="mamba_d_head"),
        read_taps(f, "mamba_d_conv"),
        read_act(f, act),
        conv_bias=f.flag("mamba_conv_bias", True),
        bias=f.flag("mamba_proj_bias", False),
    )


def read_taps(f: Fields, name: str) -> int:
    """The length of a convolution, in tokens."""
    return f.integer(name, 1, _MAX_TAPS, 4)


def read_act(f: Fields, name: str) -> str:
    """The activation after a convolution."""
    return f.choice(name, _ACTIVATIONS, "silu")


def read_mamba_layers(f: Fields, layers: int, default: str = "mamba") -> tuple[bool, ...]:
    """Which layers are recurrent, from `layer_types` or `layers_block_type`."""
    kinds = f.get("layer_types")
    other = f.get("layers_block_type")
    kinds = other if kinds is None else kinds
    if kinds is None:
        return (default == "mamba",) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(f"{f.where}: layer_types is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise UnsupportedModel(f"{f.where}: layer_types names {kind!r:.80}", f"supported: {', '.join(KINDS)}")
    return tuple(KINDS[kind] == "mamba" for kind in kinds)


def mamba2_names(layer: str, ours: str, settings: Mamba2Settings | None, theirs: str) -> dict[str, Any]:
    """Name table entries of a Mamba 2. layer: the prefix of a layer in the checkpoint. ours, theirs: of the mixer.
    Without the settings of one, nothing."""
    if settings is None:
        return {}
    s = settings.sizes
    ends = (0, s.inner, s.inner + s.channels, s.inner + s.channels + s.heads)
    parts = zip(("z", "x", "dt"), pairwise(ends), strict=True)
    mixer = layer + theirs
    return {
        **{f"{ours}.inputs.{part}": Take(mixer + ".in_proj", rows) for part, rows in parts},
        ours: mixer,
        f"{ours}.conv": mixer + ".conv1d",
        f"{ours}.norm": mixer + ".norm",
    }
