"""Zamba2 (arXiv:2411.15242): Mamba 2 layers, some of which first add the output of a transformer block that they share
with others; each use of a block has adapters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvasir.caches import CacheKind
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.linear import Plain
from kvasir.layers.module import Entry, Module, Take
from kvasir.layers.shared_block import SharedBlock
from kvasir.layers.ssm import Mamba2
from kvasir.models.config import MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.state_spaces import KINDS, Mamba2Settings, mamba2_names, read_scan, read_taps

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_MAMBA_EPS = 1e-5  # of the norm within a Mamba 2, whatever the config has for the others
_DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 54,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 32000,
}
# Derived from others, training, and kernels of others
_UNUSED = """
    attention_head_dim attention_hidden_size chunk_size ffn_hidden_size hybrid_layer_ids kv_channels mamba_headdim
    num_logits_to_keep num_query_groups time_step_floor time_step_max time_step_min use_mamba_kernels use_mem_eff_path
    """.split()


@dataclass(frozen=True, slots=True)
class Zamba2Config(DecoderConfig):
    """The sizes and settings of a Zamba2.

    mamba: of its Mamba 2. hybrid: the layers with a shared block. blocks: the number of these. rank: of the adapters.
    attn_adapters: whether q, k and v have some.
    """

    mamba: Mamba2Settings | None = None
    hybrid: tuple[int, ...] = ()
    blocks: int = 1
    rank: int = 1
    attn_adapters: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Zamba2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        width, heads = f.integer("hidden_size", 1, MAX_WIDTH), f.integer("num_attention_heads", 1, 1024)
        inner = f.integer("intermediate_size", 1, MAX_WIDTH, 4 * width)
        for name in ("head_dim", "attention_head_dim"):
            f.expect(name, 2 * width // heads)
        f.values = {**f.values, "intermediate_size": inner, "head_dim": 2 * width // heads}
        sizes = read_sizes(f)
        f.expect("use_long_context", False)
        kinds = _read_layers(f, sizes["num_layers"])
        bias = f.flag("add_bias_linear", False)
        mamba = Mamba2Settings(
            read_scan(
                f,
                inner=f.integer("mamba_expand", 1, 64, 2) * width,
                names=("n_mamba_heads", "mamba_ngroups", "mamba_d_state"),
                defaults=(8, 1, 64),
                head_dim="mamba_headdim",
            ),
            read_taps(f, "mamba_d_conv"),
            conv_bias=True,
            bias=bias,
        )
        f.expect("use_conv_bias", True)
        rotates = f.flag("use_mem_rope", False)
        settings = {
            "blocks": f.integer("num_mem_blocks", 1, MAX_LAYERS, 1),
            "rank": f.integer("adapter_rank", 1, MAX_WIDTH, 128),
            "attn_adapters": f.flag("use_shared_attention_adapter", False),
            "attn_scale": (sizes["head_dim"] / 2) ** -0.5,
            "rotates": (rotates,) * len(kinds),
        }
        for name in _UNUSED:
            f.get(name)
        f.finish()
        hybrid = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
        return cls(**sizes, **settings, mamba=mamba, hybrid=hybrid, mlp_bias=bias, windows=(0,) * len(kinds))

    def first_use(self, use: int) -> int:
        """The layer that first uses the block of a use; its name in the checkpoint has the block's weights."""
        return self.hybrid[use % self.blocks]


def _read_layers(f: Fields, layers: int) -> list[str]:
    f.get("layer_types")
    kinds = f.get("layers_block_type")
    if kinds is None:
        hybrid = {*range(6, 43, 6), 47, 51}
        kinds = ["hybrid" if i in hybrid else "mamba" for i in range(54)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFileError(f"{f.where}: layers_block_type is {kinds!r:.80}", f"expected a list of {layers} names")
    for kind in kinds:
        if kind != "hybrid" and (not isinstance(kind, str) or KINDS.get(kind) != "mamba"):
            raise UnsupportedModel(f"{f.where}: layers_block_type names {kind!r:.80}", "supported: mamba, hybrid")
    return kinds


class Zamba2Layer(Module):
    """A Mamba 2 layer. use: of a shared block, whose projected output it adds to its input; -1 for none."""

    def __init__(self, c: Zamba2Config, norm: Any, mamba: Mamba2, use: int):
        self.norm, self.attn, self.use = norm, mamba, use
        self.linear = Plain(c.width, c.width) if use >= 0 else None

    def __call__(self, x_TD: Tensor, shared_TD: Tensor | None, batch: Batch) -> Tensor:
        read_TD = x_TD if shared_TD is None or self.linear is None else x_TD + self.linear(shared_TD, batch)
        return x_TD + self.attn(self.norm(read_TD), batch)


class Zamba2(Llama):
    """A decoder of Mamba 2 layers with shared blocks. blocks: by the layer that first uses them."""

    Config = Zamba2Config
    config: Zamba2Config

    def __init__(self, config: Zamba2Config):
        super().__init__(config)
        c, firsts = config, config.hybrid[: config.blocks]
        self.blocks: list[Any] = [None] * c.num_layers
        for first in firsts:
            uses = {u: self._cache_of(layer) for u, layer in enumerate(c.hybrid) if c.first_use(u) == first}
            self.blocks[first] = SharedBlock(
                c.width,
                c.inner,
                uses,
                (c.heads, c.kv_heads, c.head_dim),
                eps=c.norm_eps,
                act=c.act,
                mlp_bias=c.mlp_bias,
                rank=c.rank,
                attn_adapters=c.attn_adapters,
                rope=self.rope if c.rotates[0] else None,
                scale=c.attn_scale,
            )
            for use, attention in self.blocks[first].attention.items():
                attention.model_layer = c.hybrid[use]

    def _cache_of(self, layer: int) -> int:
        """The first cache of a layer: that of its shared block if it has one, else of its Mamba 2."""
        return layer + sum(hybrid < layer for hybrid in self.config.hybrid)

    def _block(self, layer: int, c: Any) -> Any:
        use = c.hybrid.index(layer) if layer in c.hybrid else -1
        mamba = c.mamba.layer(self._cache_of(layer) + (use >= 0), c.width, _MAMBA_EPS)
        return Zamba2Layer(c, self._norm(), mamba, use)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """Of each layer, the cache of its shared block, if it has one, and of its Mamba 2."""
        found: list[CacheKind] = []
        layers: list[Any] = self.layers
        for layer in layers:
            if layer.use >= 0:
                found.append(self.blocks[self.config.first_use(layer.use)].attention[layer.use].cache())
            found.append(layer.attn.cache())
        return tuple(found)

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm."""
        embedded_TD = x_TD = self.embed(tokens_T)
        layers: list[Any] = self.layers
        for i, layer in enumerate(layers):
            shared_TD = None
            if layer.use >= 0:
                shared_TD = self.blocks[self.config.first_use(layer.use)](x_TD, embedded_TD, layer.use, batch)
            x_TD = layer(x_TD, shared_TD, batch)
            batch.after_layer(i, x_TD)
        return self.norm(x_TD)

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the shared blocks' weights under the names of later layers."""
        later = (
            rf"model\.layers\.{layer}\.shared_transformer\..*" for layer in self.config.hybrid[self.config.blocks :]
        )
        return (*super().ignored, *later)

    def names(self) -> Mapping[str, Entry]:
        """The name table."""
        layer, c = "model.layers.*.", self.config
        shared, inner = layer + "shared_transformer.", self.config.inner
        plain = mamba2_names(layer, "layers.*.attn", c.mamba, "mamba")
        hybrid = mamba2_names(layer, "layers.*.attn", c.mamba, "mamba_decoder.mamba")
        adapters = {part: f"{shared}self_attn.linear_{part}_adapter_list.*." for part in "qkv"}
        mlp = f"{shared}feed_forward.gate_up_proj_adapter_list.*."
        halves = {"gate": (0, inner), "up": (inner, 2 * inner)}
        return {
            "embed": ("model.embed_tokens", "lm_head") if c.tied else "model.embed_tokens",
            "norm": "model.final_layernorm",
            "head": "lm_head",
            "layers.*.norm": (layer + "input_layernorm", layer + "mamba_decoder.input_layernorm"),
            "layers.*.linear": layer + "linear",
            **{path: (plain[path], hybrid[path]) for path in plain},
            "layers.*.attn.out": (layer + "mamba.out_proj", layer + "mamba_decoder.mamba.out_proj"),
            "blocks.*.attn_norm": shared + "input_layernorm",
            "blocks.*.mlp_norm": shared + "pre_ff_layernorm",
            **{f"blocks.*.qkv.{part}": f"{shared}self_attn.{part}_proj" for part in "qkv"},
            "blocks.*.out": shared + "self_attn.o_proj",
            **{f"blocks.*.gate_up.{p}": Take(shared + "feed_forward.gate_up_proj", rows) for p, rows in halves.items()},
            "blocks.*.down": shared + "feed_forward.down_proj",
            **{f"blocks.*.{part}.*.down": name + "0" for part, name in adapters.items()},
            **{f"blocks.*.{part}.*.up": name + "1" for part, name in adapters.items()},
            "blocks.*.mlp.*.down": mlp + "0",
            **{f"blocks.*.mlp.*.up.{part}": Take(mlp + "1", rows) for part, rows in halves.items()},
            **self.pooler.names(),
        }
