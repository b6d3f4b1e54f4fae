"""StarCoder and SantaCoder (GPT-BigCode, arXiv:2305.06161): GPT-2 whose heads may share one head of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import runs
from kvasir.models.gpt2 import GPT2, GPT2Config

# Fields of the implementation: softmax is always in float32 here, and a cache is not configured by the model.
_NO_EFFECT = (
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "pre_allocate_kv_cache"),
    *("max_sequence_length", "max_batch_size", "pad_key_length", "validate_runner_input"),
)


@dataclass(frozen=True, slots=True)
class GPTBigCodeConfig(GPT2Config):
    """The sizes and settings of a GPT-BigCode."""

    kv_heads: int = 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPTBigCodeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        one = Fields(config).flag("multi_query", True)
        left = {name: value for name, value in config.items() if name not in (*_NO_EFFECT, "multi_query")}
        base = GPT2Config.from_hf({"activation_function": "gelu_pytorch_tanh", **left, "num_key_value_heads": None})
        return cls(
            **{f.name: getattr(base, f.name) for f in fields(GPT2Config)}, kv_heads=1 if one else base.heads
        )  # fmt: skip


class GPTBigCode(GPT2):
    """A GPT-2 with matrices stored as [out, in]."""

    Config = GPTBigCodeConfig
    config: GPTBigCodeConfig

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.config.kv_heads

    def names(self) -> Mapping[str, Entry]:
        """The name table of `GPT2.names`; q, k and v are grouped by head of keys."""
        c, layer = self.config, "transformer.h.*."
        parts = " ".join(f"layers.*.attn.qkv.{part}" for part in "qkv")
        return {
            **super().names(),
            **runs(parts, layer + "attn.c_attn", (c.heads // c.kv_heads * c.head_dim, c.head_dim, c.head_dim)),
            "layers.*.attn.out": layer + "attn.c_proj",
            "layers.*.mlp.up": layer + "mlp.c_fc",
            "layers.*.mlp.down": layer + "mlp.c_proj",
        }
