"""A small Llama in plain torch: the numbers of HF `LlamaForCausalLM`, with fused projections for speed.

Shape letters: B rows, S positions, D model width, H query heads, K key/value heads, d head size, V
vocabulary.
The checkpoint names of `state_dict()` are this file's own; `to_hf` gives the names and shapes HF expects.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MiniConfig:
    """Sizes of the model. Hidden and ffn are multiples of 256, so that every K-quant fits."""

    vocab: int = 2048
    hidden: int = 256
    ffn: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    eps: float = 1e-5
    max_len: int = 1024

    def to_hf(self) -> dict:
        """The `config.json` of the exported folder."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }

    @staticmethod
    def from_hf(hf: dict) -> "MiniConfig":
        """Reads the fields back from a `config.json` written by `to_hf`."""
        return MiniConfig(
            vocab=hf["vocab_size"],
            hidden=hf["hidden_size"],
            ffn=hf["intermediate_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            rope_theta=hf["rope_theta"],
            eps=hf["rms_norm_eps"],
            max_len=hf["max_position_embeddings"],
        )

    def to_json(self) -> dict:
        return asdict(self)


class Block(nn.Module):
    """One pre-norm layer: grouped-query attention, then a SwiGLU."""

    def __init__(self, c: MiniConfig) -> None:
        super().__init__()
        self.c = c
        self.sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        self.attn_norm = nn.Parameter(torch.ones(c.hidden))
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden))
        self.qkv = nn.Parameter(torch.empty(sum(self.sizes), c.hidden))
        self.out = nn.Parameter(torch.empty(c.hidden, c.heads * c.head_dim))
        self.gate_up = nn.Parameter(torch.empty(2 * c.ffn, c.hidden))
        self.down = nn.Parameter(torch.empty(c.hidden, c.ffn))

    def heads(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed input [B, S, D] to rotated q [B, H, S, d], rotated k and plain v [B, K, S, d]."""
        q, k, v = F.linear(h, self.qkv).split(self.sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for t in (q, k, v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def mlp(self, h: Tensor) -> Tensor:
        gate, up = F.linear(h, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: "Cache | None", layer: int
    ) -> Tensor:
        q, k, v = self.heads(norm(x, self.attn_norm, self.c.eps), *rope)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        x = x + F.linear(attend(q, k, v, mask).transpose(1, 2).flatten(2), self.out)
        return x + self.mlp(norm(x, self.mlp_norm, self.c.eps))


class Mini(nn.Module):
    """The whole model; input and output embeddings are tied."""

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden))

    @torch.no_grad()
    def init(self, seed: int) -> "Mini":
        """Normal weights of 0.02; projections back into the residual are scaled down with depth."""
        rng = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.layers) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = shrink if name.endswith(("out", "down")) else 1.0
                p.normal_(0.0, 0.02 * scale if name == "embed" else 0.04 * scale, generator=rng)
        return self

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: "Cache | None" = None) -> Tensor:
        """Final hidden states [B, S, D] of ids [B, S].

        `mask` [B or 1, 1, S, all positions] is true where a query may look; `positions` is [B or 1, S].
        """
        return self.finish(self.layer_rows(ids, mask, positions, cache)[-1])

    def layer_rows(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: "Cache | None" = None) -> list[Tensor]:
        """Each layer's output [B, S, D], before the final norm. Arguments as in `forward`."""
        rope = rope_tables(self.config, positions)
        x, rows = F.embedding(ids, self.embed), []
        for i, block in enumerate(self.blocks):
            x = block(x, rope, mask, cache, i)
            rows.append(x)
        return rows

    def finish(self, rows: Tensor) -> Tensor:
        """The last layer's output to final hidden states."""
        return norm(rows, self.final_norm, self.config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed)


class Cache:
    """Keys and values of left-padded rows, for generation only.

    `pads[b]` columns at the start of row b are padding: never attended, and positions count from behind them.
    """

    def __init__(self, config: MiniConfig, pads: list[int]) -> None:
        self.pads = torch.tensor(pads)
        self.length = 0
        self.keys: list[Tensor | None] = [None] * config.layers
        self.values: list[Tensor | None] = [None] * config.layers

    def begin(self, num_new: int) -> tuple[Tensor, Tensor]:
        """Announces `num_new` columns; returns their mask [B, 1, num_new, length] and positions."""
        self.length += num_new
        columns = torch.arange(self.length)
        queries = columns[-num_new:]
        seen = (columns <= queries[:, None]) & (columns >= self.pads[:, None, None])
        seen |= columns == queries[:, None]  # a padding query sees itself, so that no row is empty
        return seen[:, None], (queries - self.pads[:, None]).clamp(min=0)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old_k, old_v = self.keys[layer], self.values[layer]
        if old_k is not None and old_v is not None:
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def keep(self, rows: Tensor) -> None:
        """Drops every row but `rows` (indices)."""
        self.pads = self.pads[rows]
        self.keys = [None if k is None else k[rows] for k in self.keys]
        self.values = [None if v is None else v[rows] for v in self.values]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention: q [B, H, S, d], k and v [B, K, T, d], mask [B, 1, S, T] to [B, H, S, d].

    Written out, since for rows this short it is faster on a CPU than the fused kernel, backward above all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(c: MiniConfig, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B or 1, 1, S, d], the half-rotation layout of HF Llama."""
    freq = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
    angle = positions_BS[:, None, :, None].float() * freq
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)


def to_hf(model: Mini) -> dict[str, Tensor]:
    """The weights under HF names, in bfloat16, contiguous; the tied output matrix is left out."""
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
    for i, b in enumerate(model.blocks):
        assert isinstance(b, Block)
        tensors |= block_to_hf(b, f"model.layers.{i}.")
    return {name: t.detach().to(torch.bfloat16).contiguous() for name, t in tensors.items()}


def block_to_hf(b: Block, prefix: str) -> dict[str, Tensor]:
    """A layer's weights under HF names that begin with `prefix`."""
    q, k, v = b.qkv.split(b.sizes)
    gate, up = b.gate_up.chunk(2)
    names = {
        "input_layernorm": b.attn_norm, "post_attention_layernorm": b.mlp_norm,
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": b.out,
        "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": b.down,
    }  # fmt: skip
    return {f"{prefix}{name}.weight": t for name, t in names.items()}


def from_hf(config: MiniConfig, tensors: dict[str, Tensor]) -> Mini:
    """The inverse of `to_hf`; weights become float32."""
    model = Mini(config)
    with torch.no_grad():
        model.embed.copy_(tensors["model.embed_tokens.weight"])
        model.final_norm.copy_(tensors["model.norm.weight"])
    for i, b in enumerate(model.blocks):
        assert isinstance(b, Block)
        block_from_hf(b, tensors, f"model.layers.{i}.")
    return model


@torch.no_grad()
def block_from_hf(b: Block, tensors: dict[str, Tensor], prefix: str) -> None:
    """The inverse of `block_to_hf`, into the layer's own parameters."""
    layer = {n: tensors[f"{prefix}{n}.weight"] for n in HF_LAYER}
    b.attn_norm.copy_(layer["input_layernorm"])
    b.mlp_norm.copy_(layer["post_attention_layernorm"])
    b.qkv.copy_(torch.cat([layer[f"self_attn.{x}_proj"] for x in "qkv"]))
    b.out.copy_(layer["self_attn.o_proj"])
    b.gate_up.copy_(torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]))
    b.down.copy_(layer["mlp.down_proj"])


HF_LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
