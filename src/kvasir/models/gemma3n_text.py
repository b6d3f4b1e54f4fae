"""Gemma 3n, text (https://ai.google.dev/gemma/docs/gemma-3n): several streams of hidden rows, per-layer embeddings,
layers that read the keys and values of earlier ones, and MLPs with sparse gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvasir.layers.altup import AltUp, CutMLP, Laurel, Streams
from kvasir.layers.block import DecoderLayer
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.module import Entry
from kvasir.layers.norm import RMSNorm
from kvasir.layers.per_layer import PerLayerEmbedding, PerLayerGate
from kvasir.layers.rope import Rope
from kvasir.layers.sharing_attention import SharingAttention
from kvasir.layers.softcap import SoftCap
from kvasir.models.decoder import Decoder
from kvasir.models.gemma2 import root_of_width
from kvasir.models.gemma3n_config import Gemma3nTextConfig
from kvasir.models.gemma4_config import unread_keys

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

# letters: T token rows, D model width, N width of all streams, d width of a layer's vector


class Gemma3nLayer(DecoderLayer):
    """A block that computes one of several streams, x: float32 [T, N] -> [T, N]."""

    attn_norm: RMSNorm
    attn_post_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp_post_norm: RMSNorm

    def __init__(self, layer: int, attn: SharingAttention, c: Gemma3nTextConfig):
        cut, inner = c.deviations[layer], c.inners[layer]
        mlp = GatedMLP(c.width, inner, c.act) if cut is None else CutMLP(c.width, inner, c.act, cut)
        before, after, before_mlp, after_mlp = (RMSNorm(c.width, c.norm_eps) for _ in range(4))
        super().__init__(before, attn, before_mlp, mlp, attn_post_norm=after, mlp_post_norm=after_mlp)
        self.altup = AltUp(c.width, c.streams, c.active, c.norm_eps, scaled=c.scaled)
        self.laurel = Laurel(c.width, c.rank, c.norm_eps)
        self.per_layer = PerLayerGate(c.width, c.per_layer_width, c.act, c.norm_eps)

    def of_streams(self, x_TN: Tensor, vector_Td: Tensor, batch: Batch) -> Tensor:
        """vector: the layer's own, float32 [T, d]."""
        attn, mlp = self.attn, self.mlp
        assert attn is not None and mlp is not None
        predicted_TN = self.altup.predict(x_TN, batch)
        active_TD = self.altup.active_stream(predicted_TN)
        read_TD = self.attn_norm(active_TD)
        beside_TD = self.laurel(read_TD, batch)
        mixed_TD = active_TD + self.attn_post_norm(attn(read_TD, batch)) + beside_TD
        mixed_TD = mixed_TD * math.sqrt(0.5)
        computed_TD = mixed_TD + self.mlp_post_norm(mlp(self.mlp_norm(mixed_TD), batch))
        corrected_TN = self.altup.correct(predicted_TN, computed_TD, batch)
        added_TD = self.per_layer(self.altup.scaled_stream(corrected_TN), vector_Td, batch)
        return self.altup.add(corrected_TN, added_TD)


class Gemma3nText(Decoder):
    """A decoder of several streams, which begin as projections of the embedded token and end as their mean."""

    Config = Gemma3nTextConfig
    config: Gemma3nTextConfig
    layers: list[Gemma3nLayer]  # type: ignore[assignment]

    def __init__(self, config: Gemma3nTextConfig):
        super().__init__(config)
        c = config
        self.local_rope = Rope(c.rotary_dim, c.local_theta, c.local_scaling)
        self.softcap = SoftCap(c.final_softcap)
        every, sizes = c.per_layer_vocab >= c.vocab_size, (c.per_layer_vocab, c.width, c.num_layers, c.per_layer_width)
        self.per_layer = PerLayerEmbedding(*sizes, c.norm_eps, every_token=every)
        self.streams = Streams(c.width, c.streams)
        self.layers = [Gemma3nLayer(i, self._attention(i, c), c) for i in range(c.num_layers)]

    def _attention(self, layer: int, c: Gemma3nTextConfig) -> SharingAttention:
        return SharingAttention(
            layer,
            c.width,
            c.heads,
            c.kv_heads,
            c.head_dim,
            eps=c.norm_eps,
            owner=c.owners[layer],
            whole=any(owner is not None for owner in c.owners),
            rope=self.local_rope if c.windows[layer] else self.rope,
            bias=c.qkv_bias,
            out_bias=c.out_bias,
        )

    @property
    def embed_scale(self) -> float:
        """The square root of the width, rounded to the embedding table's dtype, as in training."""
        return root_of_width(self.embed, self.config.width)

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        embedded_TD = self.embed(tokens_T) * self.embed_scale
        scale = root_of_width(self.per_layer.embed, self.per_layer.size)
        vectors = self.per_layer(tokens_T, embedded_TD, scale, batch)
        x_TN = self.streams.begin(embedded_TD, batch)
        for i, layer in enumerate(self.layers):
            x_TN = layer.of_streams(x_TN, self.per_layer.of(i, vectors), batch)
            batch.after_layer(i, x_TN)
        return self.norm(self.streams.end(x_TN, batch))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 [R, vocabulary] logits of the selected hidden rows, soft-capped."""
        return self.softcap(super().logits(hidden_RD))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including the keys and values of layers that read those of others."""
        return (*super().ignored, *unread_keys(self.config.owners))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the parts of Gemma 3n."""
        layer, altup = "model.layers.*.", "layers.*.altup."
        return {
            **super().names(),
            "layers.*.attn.qkv": layer + "self_attn.q_proj",  # of a layer without keys and values
            "layers.*.attn_post_norm": layer + "post_attention_layernorm",
            "layers.*.mlp_norm": layer + "pre_feedforward_layernorm",
            "layers.*.mlp_post_norm": layer + "post_feedforward_layernorm",
            f"{altup}router_norm": layer + "altup.router_norm",
            f"{altup}router": layer + "altup.modality_router",
            f"{altup}prediction": layer + "altup.prediction_coefs",
            f"{altup}correction": layer + "altup.correction_coefs",
            f"{altup}scale": layer + "altup",
            "layers.*.laurel.left": layer + "laurel.linear_left",
            "layers.*.laurel.right": layer + "laurel.linear_right",
            "layers.*.laurel.norm": layer + "laurel.post_laurel_norm",
            "layers.*.per_layer.gate": layer + "per_layer_input_gate",
            "layers.*.per_layer.project": layer + "per_layer_projection",
            "layers.*.per_layer.norm": layer + "post_per_layer_input_norm",
            "per_layer.embed": "model.embed_tokens_per_layer",
            "per_layer.project": "model.per_layer_model_projection",
            "per_layer.norm": "model.per_layer_projection_norm",
            **{f"streams.inputs.{i}": f"model.altup_projections.{i}" for i in range(self.config.streams - 1)},
            **{f"streams.outputs.{i}": f"model.altup_unembed_projections.{i}" for i in range(self.config.streams - 1)},
        }
