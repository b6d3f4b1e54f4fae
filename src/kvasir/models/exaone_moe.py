"""EXAONE MoE (K-EXAONE): an EXAONE 4 with norms before attention and the MLP, and experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import read_sizes
from kvasir.models.exaone4 import read_exaone_windows
from kvasir.models.glm4_moe import Glm4Moe, Glm4MoeConfig, read_deepseek_experts
from kvasir.models.glm4_moe_lite import read_sparse_layers

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# Names of fields that other decoders have, too
_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "first_last_k_dense_replace": "first_k_dense_replace",  # in the first published configs
}


@dataclass(frozen=True, slots=True)
class ExaoneMoeConfig(Glm4MoeConfig):
    """The sizes and settings of an EXAONE MoE."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ExaoneMoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **_renamed(config), **config})
        for name in (*_NAMES, "mtp_share_layers", "mtp_loss_scaling_factor", "num_nextn_predict_layers"):
            f.get(name)  # the modules for multi-token prediction are not loaded
        sizes = read_sizes(f, kv_heads=32)
        layers = sizes["num_layers"]
        windows = read_exaone_windows(f, layers, absent=4096 if "sliding_window" not in config else 0)
        experts = read_deepseek_experts(f, layers)
        experts["sparse"] = read_sparse_layers(f, layers) or _moe_layers(f, layers) or experts["sparse"]
        f.finish()
        return cls(**sizes, **experts, **windows, head_norm=True)


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {new: config[old] for old, new in _NAMES.items() if config.get(old) is not None}


def _moe_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from `is_moe_layer`; empty if the field is absent."""
    given = f.get("is_moe_layer")
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) != layers or not all(value in (False, True) for value in given):
        raise ModelFileError(f"{f.where}: is_moe_layer is {given!r:.80}", f"expected a list of {layers} flags")
    return tuple(map(bool, given))


class ExaoneMoe(Glm4Moe):
    """A GLM-4.5 with head norms, and windows in the layers that rotate."""

    Config = ExaoneMoeConfig

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Glm4Moe.names`, with the place of the selection bias."""
        mlp = "model.layers.*.mlp"
        return {**super().names(), "layers.*.mlp.selection": (mlp, f"{mlp}.gate")}

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the modules for multi-token prediction."""
        return (*super().ignored, r"mtp\..*")
