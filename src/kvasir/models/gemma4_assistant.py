"""The assistants of Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4): small heads that draft for one of its
models. Their layers have no keys and values: they read those of the target, of its last layer of the same kind.

    embed(token), row of the target --pre_projection--> x_TD --layers, norm--> logits of all ids
                                                                            --post_projection--> the next row

All ids of a draft are computed at the position of the first, for there is nothing in the cache after it. A row's query
is rotated as at the position of the token that it embeds, one after the last key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import Shared
from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.draft import side_by_side
from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head, Plain
from kvasir.layers.module import Entry, Module
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import RopeAhead
from kvasir.layers.sharing_attention import SharingAttention
from kvasir.models.config import MAX_WIDTH, Fields, inner_object
from kvasir.models.drafting import TARGET
from kvasir.models.gemma4_config import Gemma4TextConfig
from kvasir.models.gemma4_text import Gemma4Layer, Gemma4Text

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an assistant."""
    return config.get("model_type") in _TYPES


@dataclass(frozen=True, slots=True)
class Gemma4AssistantConfig(Gemma4TextConfig):
    """The sizes and settings of its layers. target_width: of the target's rows."""

    target_width: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4AssistantConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        f.choice("model_type", _TYPES)
        text = inner_object(config, "text_config")
        f.get("text_config")
        for name in ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"):
            f.get(name)  # of clusters of ids: see `ignored` of the class
        f.expect("tie_word_embeddings", True)
        inner = Fields(text, f"{f.where}: text_config")
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            inner.expect(name, 0)
        for name in ("enable_moe_block", "use_double_wide_mlp"):
            inner.expect(name, False)
        layers = inner.get("num_hidden_layers")
        shared = inner.get("num_kv_shared_layers")
        if shared not in (None, 0, layers):
            raise UnsupportedModel(
                f"{inner.where}: num_kv_shared_layers is {quoted(shared)} of {quoted(layers)}",
                "all layers of an assistant read the keys and values of its target",
            )
        width = f.integer("backbone_hidden_size", 1, MAX_WIDTH, 1536)
        f.finish()
        none = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 1}
        kind = "gemma4_unified_text" if config["model_type"] == _TYPES[1] else "gemma4_text"
        read = Gemma4TextConfig.from_hf({"model_type": kind, **text, "tie_word_embeddings": True, **none})
        return cls(**{field.name: getattr(read, field.name) for field in fields(read)}, target_width=width)


class Gemma4Assistant(Module):
    """A `DraftModel` (kvasir.models.drafting) with a checkpoint of its own, for a Gemma 4."""

    Config = Gemma4AssistantConfig
    prefix = "model."
    # The clusters of ids only make another engine compute fewer logits.
    ignored: Iterable[str] = (r"masked_embedding\..*", r"lm_head\.weight", r".*\.rotary_emb\..*inv_freq")
    taps: tuple[str, ...] = ("last",)
    ahead = 1
    advances = False
    depth, chained = 1, True
    target_ids: np.ndarray | None = None
    draft_ids: np.ndarray | None = None

    def __init__(self, config: Gemma4AssistantConfig, target: Any):
        """Raises UnsupportedModel for a target that is no Gemma 4, ModelFileError for one that it was not made for."""
        if not isinstance(target, Gemma4Text):
            raise UnsupportedModel(
                f"an assistant of Gemma 4 cannot draft for {type(target).__name__}", "it reads the cache of a Gemma 4"
            )
        self.config = c = config
        self._target = (target,)  # in a tuple: its modules are not the assistant's
        _check_target(c, target.config)
        self.width = c.target_width
        self.before, self.after = Plain(2 * self.width, c.width), Plain(c.width, self.width)
        self.owners = tuple(_owner(target.config, bool(window)) for window in c.windows)
        ropes = {
            True: RopeAhead(c.local_dim, c.local_theta, c.local_scaling),
            False: RopeAhead(c.rotary_dim, c.rope_theta, c.rope_scaling),
        }
        self.layers = [Gemma4Layer(i, self._attention(i, ropes), c, RMSNorm) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.width, c.norm_eps)
        self.embed = VocabularyEmbedding(c.vocab_size, c.width)
        self.head = Head(c.width, c.vocab_size, tied=self.embed)

    def _attention(self, layer: int, ropes: Mapping[bool, RopeAhead]) -> SharingAttention:
        c, target, owner = self.config, self._target[0].config, self.owners[layer]
        sizes = {"heads of width": c.head_dims[layer], "key-value heads": c.kv_heads_of[layer]}
        for (what, own), theirs in zip(
            sizes.items(), (target.head_dims[owner], target.kv_heads_of[owner]), strict=True
        ):
            if own != theirs:
                raise ModelFileError(
                    f"config.json: layer {layer} reads {what} {own}, but layer {owner} of the target has {theirs}",
                    "use an assistant that was made for this model",
                )
        return SharingAttention(
            layer, c.width, c.heads, c.kv_heads_of[layer], c.head_dims[layer], eps=c.norm_eps, owner=owner, whole=True,
            rope=ropes[bool(c.windows[layer])], bias=c.qkv_bias, out_bias=c.out_bias,
        )  # fmt: skip

    @property
    def context_length(self) -> int:
        """The target's."""
        return self._target[0].config.context_length

    def cache_spec(self) -> tuple[Shared, ...]:
        """The caches that its layers read."""
        return tuple(Shared(owner, TARGET) for owner in self.owners)

    def join(self, taps_TX: Tensor) -> Tensor:
        """The target's hidden rows as they are."""
        return taps_TX

    def forward(self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0) -> tuple[Tensor, Tensor]:
        """As `DraftModel.forward`."""
        assert rows_TD is not None
        target = self._target[0]
        embedded_TD = target.embed(tokens_T) * target.embed_scale
        x_TD = self.before(side_by_side(embedded_TD, rows_TD, self.width), batch)
        for block in self.layers:
            x_TD = block(x_TD, batch)
        normed_TD = self.norm(x_TD)
        return normed_TD, self.after(normed_TD, batch)

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """As `DraftModel.logits`, of all ids and without the target's soft cap."""
        return self.head(hidden_RD)

    def parts(self) -> tuple[Any, ...]:
        """The assistant without its target."""
        return (self,)

    def names(self) -> Mapping[str, Entry]:
        """As `Decoder.names`."""
        layer = "model.layers.*."
        names = {
            "attn_norm": "input_layernorm",
            "attn.qkv": "self_attn.q_proj",
            "attn.q_norm": "self_attn.q_norm",
            "attn.out": "self_attn.o_proj",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp.gate_up.gate": "mlp.gate_proj",
            "mlp.gate_up.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
        return {
            "before": "pre_projection",
            "after": "post_projection",
            "embed": ("model.embed_tokens", "lm_head"),
            "norm": "model.norm",
            "layers.*.factor": "model.layers.*",
            **{f"layers.*.{path}": layer + name for path, name in names.items()},
        }


def _owner(target: Gemma4TextConfig, window: bool) -> int:
    """The target's last layer of a kind that has keys and values of its own."""
    found = [i for i, owner in enumerate(target.owners) if owner is None and bool(target.windows[i]) == window]
    if not found:
        kind = "a window" if window else "full attention"
        raise ModelFileError(
            f"config.json: the assistant has a layer with {kind}, and its target has none",
            "use an assistant that was made for this model",
        )
    return found[-1]


def _check_target(c: Gemma4AssistantConfig, target: Gemma4TextConfig) -> None:
    windows = {window for window in c.windows if window}
    for name, given, expected in (
        ("backbone_hidden_size", c.target_width, target.width),
        ("vocab_size", c.vocab_size, target.vocab_size),
        ("sliding_window", max(windows, default=0), max(target.windows) if windows else 0),
    ):
        if given != expected:
            raise ModelFileError(
                f"config.json: {name} is {given}, but the target has {expected}",
                "use an assistant that was made for this model",
            )
