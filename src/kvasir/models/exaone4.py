"""EXAONE 4 (arXiv:2507.11407): norms after attention and the MLP only, normalised heads, and in the sizes with
sliding windows no rotary embedding in the other layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.olmo2 import POST_NORMS

_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclass(frozen=True, slots=True)
class Exaone4Config(DecoderConfig):
    """The sizes and settings of an EXAONE 4."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Exaone4Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=32)
        windows = read_exaone_windows(f, sizes["num_layers"], absent=0 if "sliding_window" in config else 4096)
        f.finish()
        return cls(**sizes, **windows, head_norm=True)


def read_exaone_windows(f: Fields, layers: int, absent: int) -> dict[str, Any]:
    """The layers' windows, and which layers rotate: with windows, only those that have one. As keyword arguments of
    `DecoderConfig`. absent: the window if the config states none."""
    window = f.integer("sliding_window", 1, MAX_POSITIONS, absent)
    slides = _read_slides(f, layers) if window else (False,) * layers
    for name in ("sliding_window_pattern", "layer_types"):
        f.get(name)  # not used without a window
    windows = tuple(window if sliding else 0 for sliding in slides)
    return {"windows": windows, "rotates": tuple(slides) if window else ()}


def _read_slides(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have a window, from `layer_types` or from a pattern: a text such as "LLLG", or its length."""
    slides, pattern = read_sliding_layers(f, layers), f.get("sliding_window_pattern")
    if slides is not None:
        return slides
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise ModelFileError(
                f"{f.where}: sliding_window_pattern is {pattern!r:.80}", 'expected text such as "LLLG"'
            )
        return tuple(pattern[i % len(pattern)] == "L" and i != layers - 1 for i in range(layers))
    every = f.integer("sliding_window_pattern", 1, MAX_LAYERS, 4)
    return tuple((i + 1) % every != 0 for i in range(layers))


class Exaone4(Llama):
    """A Llama that normalises what attention and the MLP add, not what they read."""

    Config = Exaone4Config
    norms: ClassVar[tuple[str, ...]] = ("attn_post_norm", "mlp_post_norm")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the norms after attention and the MLP."""
        return {**super().names(), **POST_NORMS}
