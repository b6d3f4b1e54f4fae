"""GGUF tensors under Hugging Face's names, so that one class and one name table serve both containers.

Two things that the converter does are undone:

- `llama`: it reorders the rows of the query and key projections so that rotated pairs are neighbours; we
  rotate halves, as Hugging Face does. (Files of `qwen2` and `qwen3` keep the halves.)
- `gpt2`: it transposes the `Conv1D` weights; the checkpoint's orientation is given back, as a view.

Source: the tensor names of the GGUF specification (docs/gguf.md of the ggml project) and of its `gguf-py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from kvasir.errors import ModelFileError
from kvasir.models.registry import unsupported

_LAYER = r"blk\.(\d+)\."
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one `general.architecture` maps: the names, the layers' prefix, what the converter changed."""

    names: Mapping[str, str]
    layers: str
    paired_rows: tuple[str, ...] = ()  # modules whose rows are in the order of neighbouring pairs
    transposed: tuple[str, ...] = ()  # modules whose weight the checkpoint holds as [in, out]


FAMILIES = {
    "llama": Family(_LLAMA_NAMES, "model.layers", paired_rows=("attn_q", "attn_k")),
    "qwen2": Family(_LLAMA_NAMES, "model.layers"),
    "qwen3": Family(_LLAMA_NAMES, "model.layers"),
    "gpt2": Family(_GPT2_NAMES, "transformer.h", transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    "bert": Family(_BERT_NAMES, "encoder.layer"),
}
# Tensors that are read into the config, or hold what the config says as well.
_NO_WEIGHTS = re.compile(rf"rope_freqs\.weight|{_LAYER}attn_rot_embd\.weight")


class Source(Protocol):
    """What is asked of `kvasir.weights.source.WeightSource`."""

    def names(self) -> Iterable[str]: ...
    def info(self, name: str) -> Any: ...
    def raw(self, name: str) -> np.ndarray: ...
    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...
    def drop(self, name: str) -> None: ...
    def close(self) -> None: ...


# --- tensors ----------------------------------------------------------------------------------------


def hf_name(architecture: str, name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for one that holds no weights.

    Raises UnsupportedModel for an unknown architecture, ModelFileError for a tensor that it does not have.
    """
    family = _family(architecture)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    layer, module, kind = _parts(name)
    if module not in family.names or kind not in ("weight", "bias"):
        raise ModelFileError(f"a GGUF file of architecture {architecture} holds the unknown tensor {name}")
    prefix = f"{family.layers}.{layer}." if layer is not None else ""
    return f"{prefix}{family.names[module]}.{kind}"


def halves_from_pairs(num_rows: int, num_heads: int) -> torch.Tensor:
    """Indices (int64 [num_rows]) that put rows of neighbouring pairs back into halves, head by head.

    Within a head the file holds x0 y0 x1 y1 ..., Hugging Face x0 x1 ... y0 y1 ...
    """
    rows = torch.arange(num_rows).view(num_heads, num_rows // num_heads // 2, 2)
    return rows.transpose(1, 2).reshape(num_rows)


class HFView:
    """A GGUF `WeightSource` under the checkpoint's names and in its orientation: as if from safetensors."""

    def __init__(self, source: Source, config: Mapping[str, Any], architecture: str):
        """`config` is what `hf_config_from_gguf` made of the same file."""
        self._source = source
        self._family = _family(architecture)
        self._heads = {
            "attn_q": config.get("num_attention_heads", 1),
            "attn_k": config.get("num_key_value_heads", 1),
        }
        names = {hf_name(architecture, name): name for name in source.names()}
        self._gguf_names = {hf: name for hf, name in names.items() if hf is not None}
        self.close = source.close

    def names(self) -> Iterable[str]:
        return self._gguf_names.keys()

    def info(self, name: str) -> Any:
        """The file's entry with the checkpoint's name and shape."""
        info = self._source.info(self._gguf_names[name])
        shape = info.shape[::-1] if self._is_transposed(name) else info.shape
        return replace(info, name=name, shape=shape)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `WeightSource.tensor`; a copy where rows are reordered, a view where the file is transposed."""
        tensor = self._source.tensor(self._gguf_names[name], dtype)
        if self._is_transposed(name):
            return tensor.T
        order = self._row_order(name, tensor.shape[0])
        return tensor if order is None else tensor[order]

    def raw(self, name: str) -> np.ndarray:
        """The rows' bytes, uint8 [rows, bytes per row], in the checkpoint's row order.

        A transposed weight stays as in the file: one row per output, which is what kernels want.
        """
        data = self._source.raw(self._gguf_names[name])
        order = self._row_order(name, data.shape[0])
        return data if order is None else data[order.numpy()]

    def drop(self, name: str) -> None:
        self._source.drop(self._gguf_names[name])

    def _is_transposed(self, name: str) -> bool:
        _, module, kind = _parts(self._gguf_names[name])
        return kind == "weight" and module in self._family.transposed

    def _row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        _, module, _ = _parts(self._gguf_names[name])
        if module not in self._family.paired_rows:
            return None
        heads = self._heads[module]
        if num_rows % (2 * heads):
            raise ModelFileError(f"{name} has {num_rows} rows, which {heads} heads of even width cannot share")
        return halves_from_pairs(num_rows, heads)


def _family(architecture: str) -> Family:
    if architecture not in FAMILIES:
        raise unsupported(architecture)
    return FAMILIES[architecture]


def _parts(name: str) -> tuple[str | None, str, str]:
    """ "blk.3.attn_q.weight" -> ("3", "attn_q", "weight"), "output.weight" -> (None, "output", "weight")."""
    match = re.fullmatch(rf"(?:{_LAYER})?(\w+)(?:\.(\w+))?", name)
    if match is None:
        return None, name, ""
    return match[1], match[2], match[3] or ""
