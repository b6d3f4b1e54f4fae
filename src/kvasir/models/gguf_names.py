"""Presents GGUF tensors under Hugging Face's names, so that one class and one name table serve both containers.

It undoes the converter's changes:

- `llama` and some others: the converter reorders the rows of the query and key projections so that rotated pairs are
  adjacent; we rotate halves, as Hugging Face does. (Files of `qwen2` and `qwen3` keep the halves.)
- `gemma2`, `gemma3`, `nemotron`, `step35`: the converter adds 1 to the norms' weights.
- Mixtures of experts: the converter stacks the matrices of a layer's experts; each is returned separately, as a view.
- `gptneox`, `falcon`: the converter puts all rows of q, k and v one after the other; the checkpoint has them by head of
  keys.
- `qwen3next`, `qwen35`, `qwen35moe`: the converter stores the decay rates as -exp(A_log), and adds 1 to the norms'
  weights. The heads of v of the last two stay in the file's order, which the config describes.
- `rwkv7`: the converter stacks the six vectors of a token shift, and flattens what has a row for each head.
- Mamba: the same decay rates; Mamba 2's rates, skips and norms have one more dimension in the file.
- `gpt2`: the converter transposes the `Conv1D` weights; the checkpoint's orientation is returned, as a view.

Source: the tensor names of the GGUF specification (docs/gguf.md of the ggml project) and of its `gguf-py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.models import gguf_decoder_names as others
from kvasir.models import gguf_dflash_names as dflash
from kvasir.models import gguf_eagle3_names as eagle3
from kvasir.models import gguf_encoder_names as encoders
from kvasir.models import gguf_gemma_names as gemmas
from kvasir.models import gguf_state_space_names as state_spaces
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
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
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
    headed: tuple[str, ...] = ()  # vectors, in the checkpoint matrices with a row for each head
    # Stacks of vectors, which the checkpoint has one by one: what stands for "*" in their names, in order.
    stacks: Mapping[str, str] = field(default_factory=dict)
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
_LATENT = NameTable({**_DEEPSEEK_NAMES, **others.LATENT}, "model.layers", flattened=("attn_k_b", "attn_v_b"))
_SPARSE = NameTable(
    {**_DEEPSEEK_NAMES, **others.LATENT, **others.INDEXER}, "model.layers", flattened=("attn_k_b", "attn_v_b")
)
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
    "afmoe": NameTable({**_DEEPSEEK_NAMES, **others.AFMOE}, "model.layers"),
    "apertus": NameTable({**_LLAMA_NAMES, "ffn_up": "mlp.up_proj"}, "model.layers"),
    "arcee": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "chatglm": NameTable(
        {**_LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, "model.layers"
    ),
    "cohere2": NameTable(_LLAMA_NAMES, "model.layers"),
    "cohere2moe": NameTable(_DEEPSEEK_NAMES, "model.layers"),
    "dbrx": NameTable(others.DBRX, "transformer.blocks"),
    "deepseek2": _LATENT,
    "deepseek32": _SPARSE,
    "command-r": NameTable(_LLAMA_NAMES, "model.layers"),
    "dflash": NameTable({**_LLAMA_NAMES, **dflash.NAMES}, "model.layers"),
    "dots1": NameTable(_DEEPSEEK_NAMES, "model.layers"),
    "ernie4_5": NameTable(_LLAMA_NAMES, "model.layers"),
    "ernie4_5-moe": NameTable(
        {**_DEEPSEEK_NAMES, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        "model.layers",
        nested=("exp_probs_b",),
    ),
    "eagle3": NameTable({**_LLAMA_NAMES, **eagle3.NAMES}, "model.layers", paired_rows=_QK),
    "eurobert": NameTable(_LLAMA_NAMES, "model.layers"),
    "exaone-moe": NameTable(_DEEPSEEK_NAMES, "model.layers"),
    "exaone4": NameTable(_POST_NORM_NAMES, "model.layers"),
    "gemma-embedding": NameTable(
        {**_GEMMA_NAMES, **encoders.DENSE}, "model.layers", raised=tuple(m for m in _GEMMA_NAMES if m.endswith("norm"))
    ),
    "gemma3n": NameTable({**_GEMMA_NAMES, **gemmas.GEMMA3N}, "model.layers"),
    "gemma4": NameTable({**_GEMMA_NAMES, **gemmas.GEMMA4}, "model.layers", scales=gemmas.SCALES),
    "gemma4-assistant": NameTable({**_GEMMA_NAMES, **gemmas.GEMMA4, **gemmas.ASSISTANT}, "model.layers"),
    "falcon": NameTable(others.FALCON, "transformer.h", parted=("attn_qkv",)),
    "gemma": NameTable(_LLAMA_NAMES, "model.layers", raised=("attn_norm", "ffn_norm", "output_norm")),
    "glm-dsa": _SPARSE,
    "glm4": NameTable(_GLM4_NAMES, "model.layers"),
    "glm4moe": NameTable({**_DEEPSEEK_NAMES, "post_attention_norm": "post_attention_layernorm"}, "model.layers"),
    "gpt-oss": NameTable(_GPT_OSS_NAMES, "model.layers"),
    "gptneox": NameTable(others.GPT_NEOX, "gpt_neox.layers", parted=("attn_qkv",)),
    "granite": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "granitemoe": NameTable(_GRANITEMOE_NAMES, "model.layers", paired_rows=_QK),
    "hunyuan-dense": NameTable({**_LLAMA_NAMES, **_HUNYUAN_NORMS}, "model.layers"),
    "hunyuan-moe": NameTable(_HUNYUANMOE_NAMES, "model.layers"),
    "hy-v3": NameTable({**_DEEPSEEK_NAMES, "exp_probs_b": "mlp.expert_bias"}, "model.layers"),
    "hy_v3": NameTable({**_DEEPSEEK_NAMES, "exp_probs_b": "mlp.expert_bias"}, "model.layers"),
    "jais2": NameTable(_LLAMA_NAMES, "model.layers"),
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
        {**_DEEPSEEK_NAMES, "attn_sinks": "self_attn.attention_sink_bias"},
        "model.layers",
        drafting=others.MIMO_DRAFTING,
    ),
    "minicpm3": NameTable({**_LLAMA_NAMES, **others.LATENT}, "model.layers"),
    "falcon-h1": NameTable(state_spaces.FALCON_H1, "model.layers", flat=state_spaces.FLAT),
    "granitehybrid": NameTable(state_spaces.GRANITE_HYBRID, "model.layers", paired_rows=_QK, flat=state_spaces.FLAT),
    "jamba": NameTable(state_spaces.JAMBA, "model.layers", named=("ssm_dt",)),
    "mamba": NameTable(state_spaces.MAMBA, "backbone.layers", named=("ssm_dt",)),
    "mamba2": NameTable(state_spaces.MAMBA2, "backbone.layers", flat=state_spaces.FLAT),
    "llama4": NameTable({**_LLAMA_NAMES, **others.LLAMA4}, "model.layers"),
    "llama-embed": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "mellum": NameTable(_QWEN3MOE_NAMES, "model.layers"),
    "mistral3": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "mistral4": _LATENT,
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
    "rwkv7": NameTable(state_spaces.RWKV7, "model.layers", headed=("time_mix_r_k",), stacks=state_spaces.RWKV7_STACKS),
    "seed_oss": NameTable(_LATE_NORM_NAMES, "model.layers"),
    "smollm3": NameTable(_LLAMA_NAMES, "model.layers", paired_rows=_QK),
    "stablelm": NameTable({**_LLAMA_NAMES, **others.STABLELM_NORMS}, "model.layers"),
    "starcoder": NameTable(others.GPT2, "transformer.h"),
    "step35": NameTable(
        {**_LLAMA_NAMES, **others.STEP35},
        "model.layers",
        raised=(
            *("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm"),
            *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
        ),
    ),
    "starcoder2": NameTable({**_LLAMA_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, "model.layers"),
}
# Tensors that are read into the config or duplicate it.
_NO_WEIGHTS = re.compile(rf"rope_(freqs|factors_long|factors_short)\.weight|{_LAYER}attn_rot_embd\.weight")
# Modules that are single vectors: the checkpoint's name of the tensor has no ".weight" or ".bias" after it.
_VECTORS = ("attn_sinks", "exp_probs_b", "layer_output_scale", "altup_correct_scale", "ssm_a", "ssm_d", "ssm_dt",
            *eagle3.VECTORS, *state_spaces.RWKV7_VECTORS)  # fmt: skip
_BARE = ("ssm_a", "ssm_d", "ffn_norm", "exp_probs_b", *eagle3.VECTORS)  # also without ".weight" in the file


# --- tensors ----------------------------------------------------------------------------------------


def hf_name(architecture: str, name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor, with "*" for the expert's number where the file stacks experts; None for
    a tensor that holds no weights.

    Raises UnsupportedModel for an unknown architecture, ModelFileError for a tensor that the architecture does not
    have.
    """
    family = family_of(architecture)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    layer, module, kind = parts_of(name)
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


def family_of(architecture: str) -> NameTable:
    """The names of an architecture. Raises UnsupportedModel for an unknown one."""
    if architecture not in FAMILIES:
        raise unsupported(architecture, known=FAMILIES)
    return FAMILIES[architecture]


def parts_of(name: str) -> tuple[str | None, str, str]:
    """ "blk.3.attn_q.weight" -> ("3", "attn_q", "weight"), "output.weight" -> (None, "output", "weight")."""
    match = re.fullmatch(
        rf"(?:{_LAYER})?(cls\.(?:output|norm)|(?:shortconv\.|nextn\.|indexer\.|enc\.)?\w+)(?:\.(\w+))?", name
    )
    if match is None:
        return None, name, ""
    return match[1], match[2], match[3] or ""
