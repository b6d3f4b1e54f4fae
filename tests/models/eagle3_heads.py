"""Random EAGLE-3 heads in every published layout, and what they compute, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]

BASE: dict[str, Any] = {
    "width": 64, "target": 64, "heads": 4, "kv": 2, "dim": 16, "inner": 80, "vocab": 96, "draft": 40, "layers": 1,
    "theta": 100.0, "factor": 1.0, "eps": 1e-3, "bias": False, "head_norm": False, "adds_normed": False, "taps": 3,
    "joint_norm": False, "chunk_norms": False, "carries_normed": False, "embed": False, "head": True, "scale": 1.0,
}  # fmt: skip
# Layout -> its settings that differ from BASE.
LAYOUTS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "vllm": {"width": 48, "embed": True, "dim": 24, "scale": 0.5},
    "authors": {"factor": 4.0, "draft": 96},
    "nvidia": {"joint_norm": True, "bias": True, "draft": 96, "embed": True},
    "eagle-3.1": {"chunk_norms": True, "carries_normed": True},
    "old-names": {"chunk_norms": True, "layers": 2},
    "speculators": {"adds_normed": True, "embed": True},
    "speculators-qwen3": {
        "adds_normed": True, "head_norm": True, "joint_norm": True, "carries_normed": True, "layers": 3, "taps": 4,
    },
    "shared-head": {"head": False, "draft": 96},
    "gguf": {"adds_normed": True, "joint_norm": True, "embed": True, "width": 48},
}  # fmt: skip


def settings(layout: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **LAYOUTS[layout], **changes}


def tensors_of(s: dict[str, Any], seed: int = 1) -> Tensors:
    """A head's tensors under speculators' names."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found: Tensors = {"fc.weight": noise(s["width"], s["taps"] * s["target"]) / s["target"] ** 0.5}
    norms = {"norm": s["width"]}
    if s["joint_norm"]:
        norms["input_norm"] = s["taps"] * s["target"]
    if s["chunk_norms"]:
        norms |= {f"fc_norm.{i}": s["target"] for i in range(s["taps"])}
    for i in range(s["layers"]):
        at, reads = f"layers.{i}.", 2 * s["width"] if i == 0 else s["width"]
        q, kv = s["heads"] * s["dim"], s["kv"] * s["dim"]
        shapes = {
            "self_attn.q_proj": (q, reads), "self_attn.k_proj": (kv, reads), "self_attn.v_proj": (kv, reads),
            "self_attn.o_proj": (s["width"], q), "mlp.gate_proj": (s["inner"], s["width"]),
            "mlp.up_proj": (s["inner"], s["width"]), "mlp.down_proj": (s["width"], s["inner"]),
        }  # fmt: skip
        for name, shape in shapes.items():
            found[f"{at}{name}.weight"] = noise(*shape) * 1.5 / shape[1] ** 0.5
            if s["bias"] and "self_attn" in name:
                found[f"{at}{name}.bias"] = noise(shape[0]) * 0.5
        norms |= {f"{at}{name}": s["width"] for name in ("input_layernorm", "post_attention_layernorm")}
        if i == 0:
            norms[at + "hidden_norm"] = s["width"]
        if s["head_norm"]:
            norms |= {f"{at}self_attn.{name}_norm": s["dim"] for name in "qk"}
    found |= {f"{name}.weight": noise(size) * 0.3 + 1.0 for name, size in norms.items()}
    if s["embed"]:
        found["embed_tokens.weight"] = noise(s["vocab"], s["width"])
    if s["head"]:
        found["lm_head.weight"] = noise(s["draft"], s["width"]) * 1.5 / s["width"] ** 0.5
    if s["draft"] < s["vocab"]:
        chosen = torch.randperm(s["vocab"], generator=generator)[: s["draft"]].sort().values
        found["d2t"] = chosen - torch.arange(s["draft"])
        found["t2d"] = torch.zeros(s["vocab"], dtype=torch.bool).index_fill_(0, chosen, True)
    return found


def config_of(layout: str, s: dict[str, Any], ids: list[int] | None = None) -> dict[str, Any]:
    """Its `config.json`. ids: of the target's layers, as the layout numbers them."""
    layer: dict[str, Any] = {
        "model_type": "qwen3" if s["head_norm"] else "llama", "hidden_size": s["width"], "vocab_size": s["vocab"],
        "intermediate_size": s["inner"], "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv"], "head_dim": s["dim"], "rms_norm_eps": s["eps"], "rope_theta": s["theta"],
        "max_position_embeddings": 64, "attention_bias": s["bias"], "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": {"rope_type": "linear", "factor": s["factor"]} if s["factor"] != 1.0 else None,
    }  # fmt: skip
    head: dict[str, Any] = {
        "draft_vocab_size": s["draft"],
        **({"norm_before_residual": True} if s["adds_normed"] else {}),
        **({"norm_before_fc": True} if s["joint_norm"] else {}),
        **({"fc_norm": True} if s["chunk_norms"] else {}),
        **({"norm_output": True} if s["carries_normed"] else {}),
        **({"logit_scale": s["scale"]} if s["scale"] != 1.0 else {}),
        **({"target_hidden_size": s["target"]} if s["target"] != s["width"] else {}),
        **({"eagle_aux_hidden_state_layer_ids": ids} if ids else {}),
    }
    if layout.startswith("speculators"):
        return {
            **{"norm_before_residual": False, **head}, "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3", "speculators_version": "0.5.0", "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/target"}},
            "embed_requires_grad": False,
        }  # fmt: skip
    architecture = {"vllm": "Eagle3LlamaForCausalLM", "authors": "LlamaForCausalLM"}.get(
        layout, "LlamaForCausalLMEagle3"
    )
    whole = {**layer, **head, "architectures": [architecture], "num_aux_hidden_states": s["taps"]}
    if layout == "nvidia":
        own = ("norm_before_fc", "eagle_aux_hidden_state_layer_ids")
        nested = {name: whole.pop(name) for name in own if name in whole}
        whole["eagle_config"] = {
            **nested, "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        }  # fmt: skip
    if layout == "old-names":
        whole["use_aux_norm"] = whole.pop("fc_norm")
    return whole


def _renamed(layout: str, name: str) -> str:
    if layout in ("specforge", "authors", "old-names", "eagle-3.1"):
        name = name.replace("layers.0.", "midlayer.")
    if layout == "old-names":
        name = name.replace("layers.1.input_layernorm", "layers.1.hidden_norm")
        for i, part in enumerate(("low", "mid", "high")):
            name = name.replace(f"fc_norm.{i}.", f"aux_norm_{part}.")
    own = ("lm_head.weight", "d2t", "t2d")
    return f"model.{name}" if layout in ("vllm", "authors") and name not in own else name


def write(folder: Path, layout: str, config: dict[str, Any], tensors: Tensors) -> Path:
    """A checkpoint in that layout."""
    folder.mkdir(exist_ok=True)
    if layout == "gguf":
        return write_gguf(folder / "head.gguf", config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    named = {_renamed(layout, name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """As llama.cpp's converter writes it: rows of q and k in pairs, ids of the target, no t2d."""
    from tests.models.gguf_files import gguf, writing

    files = {
        "fc": "fc", "rope_freqs": "rope_freqs", "norm": "output_norm", "input_norm": "enc.output_norm",
        "lm_head": "output", "embed_tokens": "token_embd", "layers.0.hidden_norm": "blk.0.attn_norm_2",
        "layers.0.input_layernorm": "blk.0.attn_norm", "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"layers.0.self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
        "layers.0.self_attn.o_proj": "blk.0.attn_output",
        **{f"layers.0.mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
    }  # fmt: skip
    with writing(path, "eagle3") as writer:
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_array("eagle3.target_layers", config["eagle_aux_hidden_state_layer_ids"])
        writer.add_uint32("eagle3.target_hidden_size", config.get("target_hidden_size", config["hidden_size"]))
        writer.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
        writer.add_bool("eagle3.norm_before_fc", config.get("norm_before_fc", False))
        for name, tensor in tensors.items():
            array: Any = tensor.numpy()
            if name == "d2t":
                writer.add_tensor("d2t", array + np.arange(len(array)), raw_dtype=gguf.GGMLQuantizationType.I64)
            elif name != "t2d":
                module, _, kind = name.rpartition(".")
                for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                    if module.endswith(part):
                        halves = array.reshape(config[heads], 2, -1, array.shape[1])
                        array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
                writer.add_tensor(f"{files[module]}.{kind}", array)
    return path


# --- the oracle -------------------------------------------------------------------------------------


def fused(s: dict[str, Any], t: Tensors, taps: Tensor) -> Tensor:
    """The rows [n, D] of the target's rows [n, taps * D'] that lie side by side."""
    if s["joint_norm"]:
        taps = rms(taps, t["input_norm.weight"], s["eps"])
    if s["chunk_norms"]:
        chunks = taps.chunk(s["taps"], -1)
        taps = torch.cat([rms(c, t[f"fc_norm.{i}.weight"], s["eps"]) for i, c in enumerate(chunks)], -1)
    return taps @ t["fc.weight"].T


def head(
    s: dict[str, Any], t: Tensors, rows: Tensor, embedded: Tensor, lm_head: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all positions at once: the rows for the logits, the logits, and the rows to carry."""
    normed = rms(rows, t["layers.0.hidden_norm.weight"], s["eps"])
    both = torch.cat([rms(embedded, t["layers.0.input_layernorm.weight"], s["eps"]), normed], -1)
    x = (normed if s["adds_normed"] else rows) + attend(s, t, "layers.0.self_attn.", both)
    x = x + mlp(s, t, "layers.0.", x)
    for i in range(1, s["layers"]):
        at = f"layers.{i}."
        x = x + attend(s, t, at + "self_attn.", rms(x, t[at + "input_layernorm.weight"], s["eps"]))
        x = x + mlp(s, t, at, x)
    out = rms(x, t["norm.weight"], s["eps"])
    return out, out @ lm_head.T * s["scale"], out if s["carries_normed"] else x


def attend(s: dict[str, Any], t: Tensors, at: str, x: Tensor) -> Tensor:
    q, k, v = (
        (x @ t[f"{at}{p}_proj.weight"].T + t.get(f"{at}{p}_proj.bias", 0)).view(len(x), -1, s["dim"]) for p in "qkv"
    )
    if s["head_norm"]:
        q, k = (rms(y, t[f"{at}{p}_norm.weight"], s["eps"]) for p, y in zip("qk", (q, k), strict=True))
    turns = s["theta"] ** (-torch.arange(0, s["dim"], 2, dtype=torch.float64) / s["dim"]) / s["factor"]
    angles = (torch.arange(len(x))[:, None] * torch.cat([turns, turns])).float()[:, None]
    q, k = (y * angles.cos() + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * angles.sin() for y in (q, k))
    k, v = (y.repeat_interleave(s["heads"] // s["kv"], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / s["dim"] ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return mixed @ t[at + "o_proj.weight"].T + t.get(at + "o_proj.bias", 0)


def mlp(s: dict[str, Any], t: Tensors, at: str, x: Tensor) -> Tensor:
    x = rms(x, t[at + "post_attention_layernorm.weight"], s["eps"])
    gate, up = (x @ t[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ t[at + "mlp.down_proj.weight"].T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
