"""Presents GGUF tensors under Hugging Face's names, so that one class and one name table serve both containers.

It undoes the converter's changes:

- `llama` and some others: the converter reorders the rows of the query and key projections so that rotated pairs are
  adjacent; we rotate halves, as Hugging Face does. (Files of `qwen2` and `qwen3` keep the halves.)
- `gemma2`, `gemma3`, `nemotron`: the converter adds 1 to the norms' weights.
- Mixtures of experts: the converter stacks the matrices of a layer's experts; each is returned separately, as a view.
- `gptneox`, `falcon`: the converter puts all rows of q, k and v one after the other; the checkpoint has them by head of
  keys.
- `qwen3next`, `qwen35`, `qwen35moe`: the converter stores the decay rates as -exp(A_log), and adds 1 to the norms'
  weights. The heads of v of the last two stay in the file's order, which the config describes.
- Mamba: the same decay rates; Mamba 2's rates, skips and norms have one more dimension in the file.
- `gpt2`: the converter transposes the `Conv1D` weights; the checkpoint's orientation is returned, as a view.

Source: the tensor names of the GGUF specification (docs/gguf.md of the ggml project) and of its `gguf-py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.models import gguf_decoder_names as others
from kvasir.models import gguf_encoder_names as encoders
from kvasir.models import gguf_gemma_names as gemmas
from kvasir.models import gguf_state_space_names as state_spaces
from kvasir.models.config import MAX_EXPERTS
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
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
_FUSED = "ffn_gate_up_exps"  # of which each matrix has the gate's rows, then those of up
_MIXTRAL_NAMES = {
    **_LLAMA_NAMES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_QWEN3MOE_NAMES = {
    **_LLAMA_NAMES,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_DEEPSEEK_NAMES = {**_QWEN3MOE_NAMES, **others.SHARED, "exp_probs_b": "mlp.gate.e_score_correction_bias"}
_QWEN2MOE_NAMES = {
    **_QWEN3MOE_NAMES,
    **{name: hf.replace("experts", "expert") for name, hf in others.SHARED.items()},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# Norms after attention and the MLP, and none before.
_POST_NORM_NAMES = {
    **{name: hf for name, hf in _LLAMA_NAMES.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_LATE_NORM_NAMES = {
    **{name: hf for name, hf in _LLAMA_NAMES.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
_GPT_OSS_NAMES = {
    **_LATE_NORM_NAMES,
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GRANITEMOE_NAMES = {
    **_QWEN3MOE_NAMES,
    **{name: hf.replace("mlp.shared_experts", "shared_mlp") for name, hf in others.SHARED.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.*.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.*.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.*.down_proj",
}
_GLM4_NAMES = {
    **{name: hf for name, hf in _LLAMA_NAMES.items() if name != "ffn_gate"},
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_HUNYUANMOE_NAMES = {
    **_QWEN3MOE_NAMES,
    **_HUNYUAN_NORMS,
    **{name: hf.replace("shared_experts", "shared_mlp") for name, hf in others.SHARED.items()},
    "ffn_gate_inp": "mlp.gate.wg",
}
_DELTA_NAMES = {
    **_QWEN2MOE_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


@dataclass(frozen=True, slots=True)
class NameTable:
    """How the tensors of one `general.architecture` map to a checkpoint: the names, the layers' prefix, the converter's
    changes."""

    names: Mapping[str, str]
    layers: str
    paired_rows: tuple[str, ...] = ()  # modules whose rows are ordered in adjacent pairs
    transposed: tuple[str, ...] = ()  # modules whose checkpoint weight is [in, out]
    raised: tuple[str, ...] = ()  # modules to whose weight the converter adds 1
    parted: tuple[str, ...] = ()  # modules with all rows of q, then of k, then of v, which the checkpoint has by head
    squeezed: tuple[str, ...] = ()  # matrices of one row, stored as vectors
    nested: tuple[str, ...] = ()  # vectors, stored in the checkpoint as matrices of one row
    flattened: tuple[str, ...] = ()  # stacks of the heads' matrices, which we read as one, below each other
    scales: Mapping[str, str] = field(default_factory=dict)  # names of the vectors that end in ".scale" in the file
    flat: tuple[str, ...] = ()  # stored as matrices, vectors in the checkpoint
    wrapped: tuple[str, ...] = ()  # of any shape, [1, 1, n, 1] in the checkpoint
    named: tuple[str, ...] = ()  # of the modules in _VECTORS, those with ".weight" and ".bias" in the checkpoint
    # Parts of layers for multi-token prediction -> their names, "{}" for the layer's number among them; "" -> the
    # prefix of the rest. Empty if they are named as the model's own layers.
    drafting: Mapping[str, str] = field(default_factory=dict)


_QK = ("attn_q", "attn_k")
# Parts of layers for multi-token prediction.
_DRAFTING = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DELTA = NameTable(
    _DELTA_NAMES,
    "model.layers",
    raised=(
        "attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm", "nextn.enorm", "nextn.hnorm",
        "nextn.shared_head_norm",
    ),
    squeezed=("ffn_gate_inp_shexp",),
    drafting={
        "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
        "shared_head.norm": "mtp.norm", "": "mtp.layers.{}",
    },
)  # fmt: skip
FAMILIES = {
    "llama": NameTable(_MIXTRAL_NAMES, "model.layers", paired_rows=_QK),
    "qwen2": NameTable(_LLAMA_NAMES, "model.layers"),
    "qwen3": NameTable({**_LLAMA_NAMES, "cls.output": "cls.output"}, "model.layers"),
    "qwen3moe": NameTable(_QWEN3MOE_NAMES, "model.layers"),
    "gemma2": NameTable(_GEMMA_NAMES, "model.layers", raised=tuple(m for m in _GEMMA_NAMES if m.endswith("norm"))),
    "gemma3": NameTable(_GEMMA_NAMES, "model.layers", raised=tuple(m for m in _GEMMA_NAMES if m.endswith("norm"))),
    "phi3": NameTable(_PHI3_NAMES, "model.layers"),
    "gpt2": NameTable(others.GPT2, "transformer.h", transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    "bert": NameTable(encoders.BERT, "encoder.layer"),
    "bitnet": NameTable({**_LLAMA_NAMES, **others.BITNET}, "model.layers", scales=others.BITNET_SCALES),
    "apertus": NameTable({**_LLAMA_NAMES, "ffn_up": "mlp.up_proj"}, "model.layers"),
    "arcee": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "chatglm": NameTable(
        {**_LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, "model.layers"
    ),
    "cohere2": NameTable(_LLAMA_NAMES, "model.layers"),
    "dbrx": NameTable(others.DBRX, "transformer.blocks"),
    "deepseek2": NameTable({**_DEEPSEEK_NAMES, **others.LATENT}, "model.layers", flattened=("attn_k_b", "attn_v_b")),
    "command-r": NameTable(_LLAMA_NAMES, "model.layers"),
    "dots1": NameTable(_DEEPSEEK_NAMES, "model.layers"),
    "ernie4_5": NameTable(_LLAMA_NAMES, "model.layers"),
    "ernie4_5-moe": NameTable(
        {**_DEEPSEEK_NAMES, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        "model.layers",
        nested=("exp_probs_b",),
    ),
    "eurobert": NameTable(_LLAMA_NAMES, "model.layers"),
    "exaone-moe": NameTable(_DEEPSEEK_NAMES, "model.layers"),
    "exaone4": NameTable(_POST_NORM_NAMES, "model.layers"),
    "gemma-embedding": NameTable(
        {**_GEMMA_NAMES, **encoders.DENSE}, "model.layers", raised=tuple(m for m in _GEMMA_NAMES if m.endswith("norm"))
    ),
    "gemma3n": NameTable({**_GEMMA_NAMES, **gemmas.GEMMA3N}, "model.layers"),
    "gemma4": NameTable({**_GEMMA_NAMES, **gemmas.GEMMA4}, "model.layers", scales=gemmas.SCALES),
    "falcon": NameTable(others.FALCON, "transformer.h", parted=("attn_qkv",)),
    "gemma": NameTable(_LLAMA_NAMES, "model.layers", raised=("attn_norm", "ffn_norm", "output_norm")),
    "glm4": NameTable(_GLM4_NAMES, "model.layers"),
    "glm4moe": NameTable({**_DEEPSEEK_NAMES, "post_attention_norm": "post_attention_layernorm"}, "model.layers"),
    "gpt-oss": NameTable(_GPT_OSS_NAMES, "model.layers"),
    "gptneox": NameTable(others.GPT_NEOX, "gpt_neox.layers", parted=("attn_qkv",)),
    "granite": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "granitemoe": NameTable(_GRANITEMOE_NAMES, "model.layers", paired_rows=_QK),
    "hunyuan-dense": NameTable({**_LLAMA_NAMES, **_HUNYUAN_NORMS}, "model.layers"),
    "hunyuan-moe": NameTable(_HUNYUANMOE_NAMES, "model.layers"),
    "jina-bert-v2": NameTable(encoders.JINA_V2, "encoder.layer"),
    "jina-bert-v3": NameTable(encoders.JINA_V3, "encoder.layers"),
    "kimi-linear": NameTable(
        {**_DEEPSEEK_NAMES, **others.LATENT, **others.KIMI},
        "model.layers",
        flattened=("attn_k_b", "attn_v_b"),
        wrapped=("ssm_a",),
    ),
    "lfm2": NameTable({**_LLAMA_NAMES, **others.LFM2}, "model.layers"),
    "lfm2moe": NameTable({**_LLAMA_NAMES, **others.LFM2}, "model.layers"),
    "mimo2": NameTable(
        {**_DEEPSEEK_NAMES, "attn_sinks": "self_attn.attention_sink_bias"}, "model.layers", drafting=others.MIMO_DRAFTING
    ),
    "minicpm3": NameTable({**_LLAMA_NAMES, **others.LATENT}, "model.layers"),
    "falcon-h1": NameTable(state_spaces.FALCON_H1, "model.layers", flat=state_spaces.FLAT),
    "granitehybrid": NameTable(state_spaces.GRANITE_HYBRID, "model.layers", paired_rows=_QK, flat=state_spaces.FLAT),
    "jamba": NameTable(state_spaces.JAMBA, "model.layers", named=("ssm_dt",)),
    "mamba": NameTable(state_spaces.MAMBA, "backbone.layers", named=("ssm_dt",)),
    "mamba2": NameTable(state_spaces.MAMBA2, "backbone.layers", flat=state_spaces.FLAT),
    "llama4": NameTable({**_LLAMA_NAMES, **others.LLAMA4}, "model.layers"),
    "minimax-m2": NameTable(
        {**_MIXTRAL_NAMES, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}, "model.layers"
    ),
    "modern-bert": NameTable(encoders.MODERN, "model.layers"),
    "nomic-bert": NameTable(encoders.NOMIC, "encoder.layers"),
    "nomic-bert-moe": NameTable(encoders.NOMIC_MOE, "encoder.layers"),
    "nemotron": NameTable(_LLAMA_NAMES, "model.layers", raised=("attn_norm", "ffn_norm", "output_norm")),
    "olmo": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "nemotron_h": NameTable(state_spaces.NEMOTRON_H, "backbone.layers", paired_rows=_QK, flat=state_spaces.FLAT),
    "nemotron_h_moe": NameTable(state_spaces.NEMOTRON_H, "backbone.layers", paired_rows=_QK, flat=state_spaces.FLAT),
    "olmo2": NameTable(_POST_NORM_NAMES, "model.layers"),
    "olmoe": NameTable(_QWEN3MOE_NAMES, "model.layers"),
    "phi2": NameTable(others.PHI, "model.layers"),
    "phimoe": NameTable(_MIXTRAL_NAMES, "model.layers"),
    "qwen2moe": NameTable(_QWEN2MOE_NAMES, "model.layers", squeezed=("ffn_gate_inp_shexp",)),
    "qwen3next": _DELTA,
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "seed_oss": NameTable(_LATE_NORM_NAMES, "model.layers"),
    "smollm3": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "stablelm": NameTable({**_LLAMA_NAMES, **others.STABLELM_NORMS}, "model.layers"),
    "starcoder": NameTable(others.GPT2, "transformer.h"),
    "starcoder2": NameTable({**_LLAMA_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, "model.layers"),
}
# Tensors that are read into the config or duplicate it.
_NO_WEIGHTS = re.compile(rf"rope_(freqs|factors_long|factors_short)\.weight|{_LAYER}attn_rot_embd\.weight")
# Modules that are single vectors: the checkpoint's name of the tensor has no ".weight" or ".bias" after it.
_VECTORS = ("attn_sinks", "exp_probs_b", "layer_output_scale", "altup_correct_scale", "ssm_a", "ssm_d", "ssm_dt")
_BARE = ("ssm_a", "ssm_d", "ffn_norm")  # also without ".weight" in the file
# Stored without the dimension of size 1, or with more of them.
_CONVOLUTIONS = ("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv")
_RATES = "ssm_a"  # stored as -exp(A_log)


class TensorSource(Protocol):
    """The methods of `kvasir.weights.source.GGUFSource` that this module uses: those of a `WeightSource`, and `tensor`
    with the index of a matrix in a stack."""

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        ...

    def info(self, name: str) -> Any:
        """The entry of a tensor: its type and shape."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The rows' bytes, uint8 [rows, bytes per row]."""
        ...

    def array(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor in its own type; with `index`, one matrix of a stack of experts."""
        ...

    def drop(self, name: str) -> None:
        """Releases the pages of a tensor that is no longer needed."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


# --- tensors ----------------------------------------------------------------------------------------


def hf_name(architecture: str, name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor, with "*" for the expert's number where the file stacks experts; None for
    a tensor that holds no weights.

    Raises UnsupportedModel for an unknown architecture, ModelFileError for a tensor that the architecture does not
    have.
    """
    family = _family(architecture)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    layer, module, kind = _parts(name)
    prefix = f"{family.layers}.{layer}." if layer is not None else ""
    if kind == "scale" and module in family.scales:
        return prefix + family.scales[module]
    names = {**_DRAFTING, **family.names}
    if module not in names or kind not in ("weight", "bias", *([""] if module in _BARE else [])):
        raise ModelFileError(f"a GGUF file of architecture {architecture} holds the unknown tensor {name}")
    suffix = "" if module in _VECTORS and module not in family.named else f".{kind or 'weight'}"
    return prefix + names[module] + suffix


def halves_from_pairs(num_rows: int, num_heads: int) -> np.ndarray:
    """Indices (int64 [num_rows]) that reorder rows from adjacent pairs to halves, head by head.

    Within a head the file holds x0 y0 x1 y1 ..., Hugging Face x0 x1 ... y0 y1 ...
    """
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


class HFView:
    """A GGUF `WeightSource` under the checkpoint's names and in its orientation, as if it were read from
    safetensors."""

    def __init__(self, source: TensorSource, config: Mapping[str, Any], architecture: str):
        """config: the result of `hf_config_from_gguf` for the same file."""
        self._source = source
        self._family = _family(architecture)
        self._heads = {
            "attn_q": config.get("num_attention_heads", 1),
            "attn_k": config.get("num_key_value_heads", 1),
            "fused": config.get("num_kv_heads") or config.get("num_attention_heads", 1),
        }
        self._stored: dict[str, tuple[str, int | None]] = {}  # name in the file, and index in a stack of experts
        self._halves: dict[str, int] = {}  # of a matrix of gate and up: 0 or 1
        for name in source.names():
            hf = hf_name(architecture, name)
            if hf is not None:
                hf = self._drafting(hf, int(config.get("num_hidden_layers") or 0))
                found = {hf.replace("*", str(i)): (name, i) for i in _places(name, source.info(name).shape)}
                self._stored |= self._parted(found) if _parts(name)[1] == _FUSED else found
        self.close = source.close

    def _parted(self, found: dict[str, tuple[str, int | None]]) -> dict[str, tuple[str, int | None]]:
        """Matrices of gate and up as two each."""
        parted = {}
        for half, part in enumerate(("gate_proj", "up_proj")):
            names = {name.replace("gate_up_proj", part): place for name, place in found.items()}
            self._halves |= dict.fromkeys(names, half)
            parted |= names
        return parted

    def _drafting(self, name: str, layers: int) -> str:
        """The checkpoint's name of a tensor of a layer for multi-token prediction, of which the file's name continues
        those of the model's own layers; any other name as it is."""
        names, found = self._family.drafting, re.match(rf"{re.escape(self._family.layers)}\.(\d+)\.(.*)", name)
        if not names or found is None or (number := int(found[1]) - layers) < 0:
            return name
        module, _, kind = found[2].rpartition(".")
        if module in names:
            return f"{names[module].format(number)}.{kind}"
        return f"{names[''].format(number)}.{found[2]}"

    def names(self) -> Iterable[str]:
        """The checkpoint's names of all tensors that hold weights."""
        return self._stored.keys()

    def info(self, name: str) -> Any:
        """The file's entry with the checkpoint's name and shape."""
        stored, place = self._stored[name]
        info = self._source.info(stored)
        if place is not None:
            parts = 2 if name in self._halves else 1
            shape = (info.shape[1] // parts, *info.shape[2:])
            return replace(info, name=name, shape=shape, nbytes=info.nbytes // info.shape[0] // parts)
        shape = info.shape[::-1] if self._is_transposed(name) else info.shape
        if _parts(stored)[1] in self._family.flat:
            shape = (prod(shape),)
        if self._is_one_row(name):
            shape = (1, *shape[-1:])
        if _parts(stored)[1] in self._family.flattened and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        if _parts(stored)[1] in _CONVOLUTIONS and len(shape) > 1:
            shape = (prod(shape[:-1]), 1, shape[-1])
        if _parts(stored)[1] in self._family.wrapped:
            shape = (1, 1, prod(shape), 1)
        return replace(info, name=name, shape=shape)

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`: a view where the file is only transposed, a copy where another change of the
        converter is undone."""
        stored, place = self._stored[name]
        if place is not None:
            return self._half(name, self._source.array(stored, place))
        array = self._source.array(stored)
        if self._is_transposed(name):
            return array.T
        _, module, kind = _parts(stored)
        if module in self._family.raised and kind == "weight":
            return array.astype(np.float32) - np.float32(1)
        if self._is_one_row(name):
            return array.reshape(1, -1)
        if module in self._family.flattened:
            return array.reshape(-1, array.shape[-1])
        if module in _CONVOLUTIONS and kind == "weight":
            return array.reshape(-1, 1, array.shape[-1])
        if module == _RATES:
            with np.errstate(divide="ignore", invalid="ignore"):  # NaN in a bad file stays in its own answers
                rates = np.log(-array.astype(np.float64)).astype(np.float32)
            rates = rates.reshape(1, 1, -1, 1) if module in self._family.wrapped else rates
            return rates.reshape(-1) if module in self._family.flat else rates
        if module in self._family.flat:
            return array.reshape(-1)
        order = self._row_order(name, array.shape[0] if array.ndim else 1)
        return array if order is None else array[order]

    def raw(self, name: str) -> np.ndarray:
        """The rows' bytes, uint8 [rows, bytes per row], in the checkpoint's row order.

        A transposed weight stays as in the file: one row per output, as kernels expect.
        """
        stored, place = self._stored[name]
        data = self._source.raw(stored)
        if place is not None:
            shape = self._source.info(stored).shape
            rows = shape[1] if len(shape) == 3 else 1
            data = self._half(name, data[place * rows : (place + 1) * rows])
        if self._is_one_row(name):
            return data.reshape(1, -1)
        order = self._row_order(name, data.shape[0])
        return data if order is None else data[order]

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`; a stack of experts is dropped with its last matrix."""
        stored, place = self._stored[name]
        last = place is None or place == self._source.info(stored).shape[0] - 1
        if last and self._halves.get(name, 1) == 1:
            self._source.drop(stored)

    def _half(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The tensor's rows of a matrix of gate and up."""
        if name not in self._halves:
            return rows
        size = len(rows) // 2
        return rows[self._halves[name] * size :][:size]

    def _is_transposed(self, name: str) -> bool:
        _, module, kind = _parts(self._stored[name][0])
        return kind == "weight" and module in self._family.transposed

    def _is_one_row(self, name: str) -> bool:
        _, module, _ = _parts(self._stored[name][0])
        return module in (*self._family.squeezed, *self._family.nested)

    def _row_order(self, name: str, num_rows: int) -> np.ndarray | None:
        _, module, _ = _parts(self._stored[name][0])
        heads = self._heads.get(module, self._heads["attn_q"])
        if module in self._family.parted:
            groups = self._heads["fused"]
            if num_rows % (heads + 2 * groups) or heads % groups:
                raise ModelFileError(f"{name} has {num_rows} rows", f"expected q, k and v of {heads} heads")
            dim = num_rows // (heads + 2 * groups)
            parts = np.split(np.arange(num_rows), [heads * dim, (heads + groups) * dim])
            return np.concatenate([part.reshape(groups, -1) for part in parts], axis=1).reshape(num_rows)
        if module not in self._family.paired_rows:
            return None
        if num_rows % (2 * heads):
            raise ModelFileError(f"{name} has {num_rows} rows, which {heads} heads of even width cannot share")
        return halves_from_pairs(num_rows, heads)


def _places(name: str, shape: tuple[int, ...]) -> Iterable[int | None]:
    """The indices in a stack of experts' matrices; (None,) for a tensor that is not a stack. Raises ModelFileError for
    a bad shape."""
    _, module, kind = _parts(name)
    if module not in (*_EXPERTS, *gemmas.STACKS) or kind == "scale":
        return (None,)
    if len(shape) != (2 if name.endswith(".bias") else 3) or shape[0] > MAX_EXPERTS:
        raise ModelFileError(f"{name} has shape {list(shape)}", f"expected a stack of at most {MAX_EXPERTS} matrices")
    if module == _FUSED and shape[1] % 2:
        raise ModelFileError(f"{name} has shape {list(shape)}", "expected as many rows of gates as of ups")
    return range(shape[0])


def _family(architecture: str) -> NameTable:
    if architecture not in FAMILIES:
        raise unsupported(architecture, known=FAMILIES)
    return FAMILIES[architecture]


def _parts(name: str) -> tuple[str | None, str, str]:
    """ "blk.3.attn_q.weight" -> ("3", "attn_q", "weight"), "output.weight" -> (None, "output", "weight")."""
    match = re.fullmatch(rf"(?:{_LAYER})?(cls\.(?:output|norm)|(?:shortconv\.|nextn\.)?\w+)(?:\.(\w+))?", name)
    if match is None:
        return None, name, ""
    return match[1], match[2], match[3] or ""
