"""Mixtral (arXiv:2401.04088): Mistral whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.moe import EXPERT_ACTIVATIONS, MoE, Routing, SharedMoE
from kvasir.models.config import MAX_EXPERTS, MAX_POSITIONS, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}

_ONE = Routing(1)


@dataclass(frozen=True, slots=True)
class MixtralConfig(DecoderConfig):
    """The sizes and settings of a Mixtral.

    expert_inner, shared_inner: the inner width of an expert, and of the shared expert, 0 for none. routing: how a token
    chooses its experts. sparse: per layer, whether it has experts instead of a dense MLP.
    """

    num_experts: int = 0
    routing: Routing = _ONE
    expert_inner: int = 0
    shared_inner: int = 0
    sparse: tuple[bool, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MixtralConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f)
        layers = sizes["num_layers"]
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        num_experts, top_k = read_experts(f, num_experts=8, top_k=2)
        f.finish()
        return cls(
            **sizes,
            windows=(window,) * layers,
            num_experts=num_experts,
            routing=Routing(top_k),
            expert_inner=sizes["inner"],
            sparse=(True,) * layers,
        )


def read_experts(f: Fields, *, num_experts: int, top_k: int) -> tuple[int, int]:
    """The number of experts and the number of experts per token; the arguments are the family's defaults."""
    for training in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        f.get(training)
    old = f.integer("num_experts", 1, MAX_EXPERTS, num_experts)
    num_experts = f.integer("num_local_experts", 1, MAX_EXPERTS, old)
    top_k = f.integer("num_experts_per_tok", 1, MAX_EXPERTS, top_k)
    if top_k > num_experts:
        raise ModelFileError(f"{f.where}: num_experts_per_tok is {top_k}", f"there are {num_experts} experts")
    f.choice("hidden_act", EXPERT_ACTIVATIONS, "silu")
    return num_experts, top_k


class Mixtral(Llama):
    """A Llama whose sparse layers have a mixture of experts instead of an MLP. selection: the name of the vector that
    `MoE` adds for the choice. shared_gate: whether the shared expert has a gate."""

    Config = MixtralConfig
    config: MixtralConfig
    selection: ClassVar[str] = ""
    shared_gate: ClassVar[bool] = False

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MoE:
        if not c.sparse[layer]:
            return GatedMLP(c.width, c.inner, c.act, c.mlp_bias)
        sizes = c.width, c.expert_inner, c.num_experts, c.routing
        if not c.shared_inner:
            return MoE(*sizes, act=c.act, selection=self.selection)
        return SharedMoE(*sizes, c.shared_inner, gated=self.shared_gate, act=c.act, selection=self.selection)

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the router and the experts."""
        moe = "model.layers.*.block_sparse_moe."
        return {
            **super().names(),
            "layers.*.mlp.router": moe + "gate",
            "layers.*.mlp.experts.*.gate_up.gate": moe + "experts.*.w1",
            "layers.*.mlp.experts.*.gate_up.up": moe + "experts.*.w3",
            "layers.*.mlp.experts.*.down": moe + "experts.*.w2",
        }


def expert_names(mlp: str, shared: str = "") -> dict[str, str]:
    """Name table entries of experts with `gate_proj`, `up_proj` and `down_proj`, and of a shared expert named
    `shared`. mlp: the prefix of a layer's MLP."""
    parts = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    found = {f"layers.*.mlp.experts.*.{ours}": f"{mlp}experts.*.{theirs}" for ours, theirs in parts.items()}
    if shared:
        found |= {f"layers.*.mlp.shared.{ours}": f"{mlp}{shared}.{theirs}" for ours, theirs in parts.items()}
    return found
