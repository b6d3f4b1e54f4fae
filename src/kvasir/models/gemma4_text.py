"""Gemma 4, text (https://ai.google.dev/gemma/docs/core/model_card_4): Gemma 3 with normalised values, heads of another
size in full-attention layers, per-layer embeddings, layers that read the keys and values of earlier ones, and, in one
size, experts beside each dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvasir.layers.beside import DenseAndExperts, ScaledMoE
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry, Scalar
from kvasir.layers.moe import Routing
from kvasir.layers.per_layer import PerLayerEmbedding, PerLayerGate
from kvasir.layers.rope import Rope
from kvasir.layers.sharing_attention import SharingAttention
from kvasir.layers.softcap import SoftCap
from kvasir.models.decoder import Decoder
from kvasir.models.gemma2 import root_of_width
from kvasir.models.gemma4_config import Gemma4TextConfig, unread_keys

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class Gemma4Layer(DecoderLayer):
    """A block with norms before and after attention and the MLP, then the layer's own vector, if there is one, then a
    factor of the whole. Experts have norms of their own."""

    def __init__(self, layer: int, attn: SharingAttention, c: Gemma4TextConfig, norm: type):
        dense = GatedMLP(c.width, c.inners[layer], c.act)
        mlp, before = dense, norm(c.width, c.norm_eps)
        if c.num_experts:
            moe = ScaledMoE(c.width, c.expert_inner, c.num_experts, Routing(c.top_k), c.act, c.norm_eps)
            mlp, before = DenseAndExperts(dense, moe, c.width, c.norm_eps), None
        names = ("attn_norm", "attn_post_norm", "mlp_post_norm")
        norms = {name: norm(c.width, c.norm_eps) for name in names}
        super().__init__(attn=attn, mlp=mlp, mlp_norm=before, **norms)
        size = c.per_layer_width
        self.per_layer = PerLayerGate(c.width, size, c.act, c.norm_eps) if size else None
        self.factor = Scalar("layer_scalar")

    def __call__(self, x_TD: Tensor, batch: Batch, vector_Td: Tensor | None = None) -> Tensor:
        x_TD = super().__call__(x_TD, batch)
        if self.per_layer is not None and vector_Td is not None:
            x_TD = x_TD + self.per_layer(x_TD, vector_Td, batch)
        return x_TD * self.factor.value


class Gemma4Text(Decoder):
    """A decoder with two kinds of attention layers, which differ in their windows, heads and rotary embeddings."""

    Config = Gemma4TextConfig
    config: Gemma4TextConfig
    layers: list[Gemma4Layer]  # type: ignore[assignment]

    def __init__(self, config: Gemma4TextConfig):
        super().__init__(config)
        c = config
        self.local_rope = Rope(c.local_dim, c.local_theta, c.local_scaling)
        self.softcap = SoftCap(c.final_softcap)
        self.per_layer = None
        if c.per_layer_width:
            every = c.per_layer_vocab >= c.vocab_size
            sizes = c.per_layer_vocab, c.width, c.num_layers, c.per_layer_width
            self.per_layer = PerLayerEmbedding(*sizes, c.norm_eps, every_token=every)
        self.layers = [Gemma4Layer(i, self._attention(i, c), c, self.Norm) for i in range(c.num_layers)]

    def _attention(self, layer: int, c: Gemma4TextConfig) -> SharingAttention:
        return SharingAttention(
            layer,
            c.width,
            c.heads,
            c.kv_heads_of[layer],
            c.head_dims[layer],
            eps=c.norm_eps,
            owner=c.owners[layer],
            keys_as_values=c.keys_as_values and not c.windows[layer],
            whole=any(owner is not None for owner in c.owners),
            rope=self.local_rope if c.windows[layer] else self.rope,
            head_norm=self.Norm,
            bias=c.qkv_bias,
            out_bias=c.out_bias,
        )

    @property
    def embed_scale(self) -> float:
        """The square root of the width, rounded to the embedding table's dtype, as in training."""
        return root_of_width(self.embed, self.config.width)

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        x_TD = self.embed(tokens_T) * self.embed_scale
        vectors = None
        if self.per_layer is not None:
            scale = root_of_width(self.per_layer.embed, self.per_layer.size)
            vectors = self.per_layer(tokens_T, x_TD, scale, batch)
        for i, layer in enumerate(self.layers):
            vector_Td = None if self.per_layer is None or vectors is None else self.per_layer.of(i, vectors)
            x_TD = layer(x_TD, batch, vector_Td)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows, soft-capped."""
        return self.softcap(super().logits(hidden_RD))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including the keys and values of layers that read those of others."""
        return (*super().ignored, *unread_keys(self.config.owners))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the parts of Gemma 4."""
        layer, attn, mlp = "model.layers.*.", "layers.*.attn.", "layers.*.mlp."
        return {
            **super().names(),
            f"{attn}qkv": layer + "self_attn.q_proj",  # of a layer without keys and values
            "layers.*.attn_post_norm": layer + "post_attention_layernorm",
            "layers.*.mlp_norm": layer + "pre_feedforward_layernorm",
            "layers.*.mlp_post_norm": layer + "post_feedforward_layernorm",
            f"{mlp}dense_norm": layer + "pre_feedforward_layernorm",
            f"{mlp}dense.gate_up.gate": layer + "mlp.gate_proj",
            f"{mlp}dense.gate_up.up": layer + "mlp.up_proj",
            f"{mlp}dense.down": layer + "mlp.down_proj",
            f"{mlp}dense_post_norm": layer + "post_feedforward_layernorm_1",
            f"{mlp}moe.norm": layer + "pre_feedforward_layernorm_2",
            f"{mlp}moe_post_norm": layer + "post_feedforward_layernorm_2",
            f"{mlp}moe.router": layer + "router.proj",
            f"{mlp}moe.router_norm": layer + "router",
            f"{mlp}moe.scales": layer + "router",
            f"{mlp}moe.experts.*.gate_up.gate": layer + "experts.*.gate_proj",
            f"{mlp}moe.experts.*.gate_up.up": layer + "experts.*.up_proj",
            f"{mlp}moe.experts.*.down": layer + "experts.*.down_proj",
            "layers.*.per_layer.gate": layer + "per_layer_input_gate",
            "layers.*.per_layer.project": layer + "per_layer_projection",
            "layers.*.per_layer.norm": layer + "post_per_layer_input_norm",
            "layers.*.factor": "model.layers.*",
            "per_layer.embed": "model.embed_tokens_per_layer",
            "per_layer.project": "model.per_layer_model_projection",
            "per_layer.norm": "model.per_layer_projection_norm",
        }
