"""Random DFlash drafters, and what they compute, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.eagle3_heads import Tensors, mlp, rms

BASE: dict[str, Any] = {
    "width": 64, "target": 64, "heads": 4, "kv": 2, "dim": 16, "inner": 80, "vocab": 96, "layers": 2, "theta": 100.0,
    "factor": 1.0, "eps": 1e-3, "bias": False, "ids": (1, 2, 4), "mask": 95, "block": 8, "causal": False, "window": 0,
    "embed": False, "head": False, "scale": 1.0, "cap": 0.0, "embed_scale": 1.0, "anchored": False, "markov": "",
    "rank": 8, "sure": "", "mixed": False, "draft": 96,
}  # fmt: skip
# Variant -> its settings that differ from BASE.
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "top": {"layers": 1, "ids": (3, 0), "bias": True, "factor": 4.0},
    "sliding": {"causal": True, "window": 12, "embed": True, "head": True, "width": 48, "dim": 24},
    "both ways": {"window": 12, "scale": 0.5, "cap": 5.0, "embed_scale": 0.7},
    "mixed": {"window": 12, "mixed": True, "layers": 3},
    "anchored": {"anchored": True},
    "dspark": {"anchored": True, "markov": "vanilla", "sure": "pairs", "embed": True, "head": True},
    "dspark gated": {"anchored": True, "markov": "gated", "sure": "hidden"},
    "dspark rnn": {"anchored": True, "markov": "rnn", "sure": "pairs"},
    "bonus": {"markov": "rnn", "rank": 12},
    "speculators": {"window": 12, "mixed": True, "embed": True, "head": True, "draft": 40, "width": 48, "dim": 24},
    "speculators both ways": {"window": 12, "ids": (3, 0), "head": True},
    "speculators dspark": {"anchored": True, "markov": "gated", "sure": "pairs", "head": True, "draft": 40},
}
# Tensors that are no parameters of a drafter.
UNREAD = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def settings(variant: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **VARIANTS[variant], **changes}


def windowed(s: dict[str, Any], layer: int) -> bool:
    """Whether a layer has a window: of mixed ones, all but the last, and these alone are causal."""
    return bool(s["window"]) and not (s["mixed"] and layer == s["layers"] - 1)


def tensors_of(s: dict[str, Any], seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width, q, kv = s["width"], s["heads"] * s["dim"], s["kv"] * s["dim"]
    found: Tensors = {"fc.weight": noise(width, len(s["ids"]) * s["target"]) / s["target"] ** 0.5}
    norms = {"norm": width, "hidden_norm": width}
    for i in range(s["layers"]):
        at = f"layers.{i}."
        shapes = {
            "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q), "mlp.gate_proj": (s["inner"], width), "mlp.up_proj": (s["inner"], width),
            "mlp.down_proj": (width, s["inner"]),
        }  # fmt: skip
        for name, shape in shapes.items():
            found[f"{at}{name}.weight"] = noise(*shape) * 1.5 / shape[1] ** 0.5
            if s["bias"] and "self_attn" in name:
                found[f"{at}{name}.bias"] = noise(shape[0]) * 0.5
        norms |= {f"{at}{name}": width for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{at}self_attn.{name}_norm": s["dim"] for name in "qk"}
    found |= {f"{name}.weight": noise(size) * 0.3 + 1.0 for name, size in norms.items()}
    sizes = {"gated": ("gate", s["rank"], width + s["rank"]), "rnn": ("joint", 3 * s["rank"], width + 2 * s["rank"])}
    if s["markov"]:
        found["markov_head.markov_w1.weight"] = noise(s["vocab"], s["rank"])
        found["markov_head.markov_w2.weight"] = noise(s["draft"], s["rank"])
    if s["markov"] in sizes:
        name, outputs, inputs = sizes[s["markov"]]
        found[f"markov_head.{name}_proj.weight"] = noise(outputs, inputs) * 2.0 / inputs**0.5
        found[f"markov_head.{name}_proj.bias"] = noise(outputs) * 0.3
    if s["sure"]:
        inputs = width + s["rank"] * (s["sure"] == "pairs")
        found["confidence_head.proj.weight"] = noise(1, inputs) / inputs**0.5
        found["confidence_head.proj.bias"] = noise(1)
    if s["embed"]:
        found["embed_tokens.weight"] = noise(s["vocab"], width)
    if s["head"]:
        found["lm_head.weight"] = noise(s["draft"], width) * 1.5 / width**0.5
    if s["draft"] < s["vocab"]:
        chosen = torch.randperm(s["vocab"], generator=generator)[: s["draft"]].sort().values
        found["d2t"] = chosen - torch.arange(s["draft"])
        found["t2d"] = torch.zeros(s["vocab"], dtype=torch.bool).index_fill_(0, chosen, True)
        found |= {"verifier_lm_head.weight": found["lm_head.weight"] * 2.0, "verifier_norm.weight": noise(width)}
    return found


def target_ids(tensors: Tensors) -> Tensor | None:
    """The target's id of each id of a draft vocabulary."""
    return tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None


def config_of(s: dict[str, Any], variant: str = "qwen3") -> dict[str, Any]:
    """Its `config.json`. The settings of the block are in `dflash_config`, or at the top in the variant of that
    name."""
    if variant.startswith("speculators"):
        return _speculators(s)
    sliding = bool(s["window"])
    own: dict[str, Any] = {
        "block_size": s["block"], "mask_token_id": s["mask"], "target_layer_ids": list(s["ids"]),
        **({"final_logit_softcapping": s["cap"]} if s["cap"] else {}),
        **({"output_multiplier": s["scale"]} if s["scale"] != 1.0 else {}),
        **({"sample_from_anchor": True} if s["anchored"] and not s["markov"] else {}),
        **({"markov_rank": s["rank"], "markov_head_type": s["markov"], "num_anchors": 512} if s["markov"] else {}),
        **({"enable_confidence_head": True, "confidence_head_with_markov": s["sure"] == "pairs"} if s["sure"] else {}),
        **({"input_embedding_scale": s["embed_scale"]} if s["embed_scale"] != 1.0 else {}),
    }  # fmt: skip
    return {
        "architectures": ["Qwen3DSparkModel" if s["markov"] and s["anchored"] else "DFlashDraftModel"],
        "model_type": "qwen3", "hidden_size": s["width"],
        "vocab_size": s["vocab"], "intermediate_size": s["inner"], "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv"], "head_dim": s["dim"],
        "rms_norm_eps": s["eps"], "rope_theta": s["theta"], "max_position_embeddings": 64, "attention_bias": s["bias"],
        "attention_dropout": 0.0, "hidden_act": "silu", "tie_word_embeddings": False, "max_window_layers": 5,
        "rope_scaling": {"rope_type": "linear", "factor": s["factor"]} if s["factor"] != 1.0 else None,
        "layer_types": ["sliding_attention" if windowed(s, i) else "full_attention" for i in range(s["layers"])],
        "use_sliding_window": sliding, "sliding_window": s["window"] or None, "num_target_layers": 6,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **({} if s["mixed"] or s["causal"] == sliding else {"is_causal": s["causal"]}),
        **({"target_hidden_size": s["target"]} if s["target"] != s["width"] else {}),
        **(own if variant == "top" or variant.startswith("dspark") else {"dflash_config": own}),
    }  # fmt: skip


def _speculators(s: dict[str, Any]) -> dict[str, Any]:
    """As `save_pretrained` of speculators writes it."""
    layer = {
        "model_type": "qwen3", "hidden_size": s["width"], "vocab_size": s["vocab"], "intermediate_size": s["inner"],
        "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"], "num_key_value_heads": s["kv"],
        "head_dim": s["dim"], "rms_norm_eps": s["eps"], "max_position_embeddings": 64, "attention_bias": s["bias"],
        "hidden_act": "silu", "tie_word_embeddings": False, "max_window_layers": 28, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": s["theta"], "mrope_section": [4, 2, 2]},
        "layer_types": [
            "sliding_attention" if windowed(s, i) else "full_attention" for i in range(s["layers"])
        ],
        "use_sliding_window": bool(s["window"]), "sliding_window": s["window"] or None, "use_cache": True,
    }  # fmt: skip
    heads = {
        "markov_rank": s["rank"], "markov_head_type": s["markov"], "enable_confidence_head": bool(s["sure"]),
        "confidence_head_with_markov": s["sure"] == "pairs", "sample_from_anchor": s["anchored"],
    }  # fmt: skip
    kind = "dspark" if s["markov"] else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if s["markov"] else "DFlashDraftModel"], "speculators_model_type": kind,
        "speculators_version": "0.9.0", "transformer_layer_config": layer, "draft_vocab_size": s["draft"],
        "block_size": s["block"], "mask_token_id": s["mask"], "aux_hidden_state_layer_ids": [i + 1 for i in s["ids"]],
        "target_hidden_size": s["target"] if s["target"] != s["width"] else None, "dtype": "float32",
        "sliding_window_non_causal": bool(s["window"]) and not s["mixed"], "tie_word_embeddings": True,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "verifier": {"name_or_path": "a/target"},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": s["block"] - (not s["anchored"])}],
        },
        **(heads if s["markov"] else {}),
    }  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, s: dict[str, Any], tensors: Tensors) -> Path:
    """As llama.cpp's converter writes it, with a tokenizer of so many ids."""
    from tests.models.gguf_files import writing

    files = {
        "fc": "fc", "norm": "output_norm", "hidden_norm": "enc.output_norm", "lm_head": "output",
        "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
        **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }  # fmt: skip
    files |= {f"markov_head.markov_{part}": f"markov_{part}" for part in ("w1", "w2")}
    files |= {"confidence_head.proj": "conf_proj"}
    with writing(path, "dflash") as writer:
        writer.add_block_count(s["layers"])
        writer.add_context_length(64)
        writer.add_embedding_length(s["width"])
        writer.add_feed_forward_length(s["inner"])
        writer.add_head_count(s["heads"])
        writer.add_head_count_kv(s["kv"])
        writer.add_key_length(s["dim"])
        writer.add_value_length(s["dim"])
        writer.add_rope_dimension_count(s["dim"])
        writer.add_rope_freq_base(s["theta"])
        writer.add_layer_norm_rms_eps(s["eps"])
        writer.add_token_list([f"t{i}" for i in range(s["vocab"])])
        writer.add_mask_token_id(s["mask"])
        writer.add_uint32("dflash.block_size", s["block"])
        writer.add_array("dflash.target_layers", [i + 1 for i in s["ids"]])
        if s["anchored"] != bool(s["markov"]):
            writer.add_bool("dflash.sample_from_anchor", s["anchored"])
        if s["target"] != s["width"]:
            writer.add_uint32("dflash.target_hidden_size", s["target"])
        if s["window"]:
            writer.add_sliding_window(s["window"])
            writer.add_sliding_window_pattern([windowed(s, i) for i in range(s["layers"])])
            if not s["mixed"]:
                writer.add_causal_attention(s["causal"])
        if s["cap"]:
            writer.add_final_logit_softcapping(s["cap"])
        if s["scale"] != 1.0:
            writer.add_logit_scale(s["scale"])
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            layer, _, rest = module.removeprefix("layers.").partition(".")
            within = rest if module.startswith("layers.") else module
            known = files.get(within, within)
            named = f"blk.{layer}.{known}" if module.startswith("layers.") else known
            writer.add_tensor(f"{named}.{kind}", tensor.numpy())
    return path


# --- the oracle -------------------------------------------------------------------------------------


def block(s: dict[str, Any], t: Tensors, taps: Tensor, embedded: Tensor, lm_head: Tensor) -> Tensor:
    """The logits [n, V] of a block of embedded ids [n, D] after the target's rows [c, taps * D'], which lie side by
    side."""
    return logits_of(s, hidden_rows(s, t, taps, embedded), lm_head)


def logits_of(s: dict[str, Any], rows: Tensor, lm_head: Tensor) -> Tensor:
    logits = rows @ lm_head.T * s["scale"]
    return torch.tanh(logits / s["cap"]) * s["cap"] if s["cap"] else logits


def hidden_rows(s: dict[str, Any], t: Tensors, taps: Tensor, embedded: Tensor) -> Tensor:
    """Of a block, after the last norm."""
    context = rms(taps @ t["fc.weight"].T, t["hidden_norm.weight"], s["eps"])
    x = embedded * s["embed_scale"]
    for i in range(s["layers"]):
        at = f"layers.{i}."
        own = {"window": s["window"] * windowed(s, i), "causal": windowed(s, i) if s["mixed"] else s["causal"]}
        x = x + attend(s | own, t, at + "self_attn.", context, rms(x, t[at + "input_layernorm.weight"], s["eps"]))
        x = x + mlp(s, t, at, x)
    return rms(x, t["norm.weight"], s["eps"])


def attend(s: dict[str, Any], t: Tensors, at: str, context: Tensor, x: Tensor) -> Tensor:
    """Rows of the block to those of the context and of the block."""

    def heads(part: str, rows: Tensor) -> Tensor:
        y = (rows @ t[f"{at}{part}_proj.weight"].T + t.get(f"{at}{part}_proj.bias", 0)).view(len(rows), -1, s["dim"])
        return y if part == "v" else rms(y, t[f"{at}{part}_norm.weight"], s["eps"])

    q, k, v = heads("q", x), *(torch.cat([heads(part, context), heads(part, x)]) for part in "kv")
    turns = s["theta"] ** (-torch.arange(0, s["dim"], 2, dtype=torch.float64) / s["dim"]) / s["factor"]
    angles = (torch.arange(len(k))[:, None] * torch.cat([turns, turns])).float()[:, None]

    def rotated(y: Tensor, a: Tensor) -> Tensor:
        return y * a.cos() + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * a.sin()

    q, k = rotated(q, angles[len(context) :]), rotated(k, angles)
    k, v = (y.repeat_interleave(s["heads"] // s["kv"], 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / s["dim"] ** 0.5
    after = torch.arange(len(k)) - torch.arange(len(context), len(k))[:, None]  # how far a key lies after a query
    hidden = (after > 0) & s["causal"] | (after <= -s["window"]) & bool(s["window"])
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)
    return mixed @ t[at + "o_proj.weight"].T + t.get(at + "o_proj.bias", 0)


def corrections(s: dict[str, Any], t: Tensors, hidden: Tensor, before: list[int]) -> tuple[Tensor, Tensor]:
    """What the ids before add to the logits of each id of a block, [n, V], and how sure it is of each, [n]. hidden: the
    rows of these ids, [n, D]."""
    state, found, sure = torch.zeros(s["rank"]), [], []

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    for row, token in zip(hidden, before, strict=True):
        pair = t["markov_head.markov_w1.weight"][token]
        latent = pair
        if s["markov"] == "gated":
            latent = linear("markov_head.gate_proj", torch.cat([row, pair])).sigmoid() * pair
        if s["markov"] == "rnn":
            gate, new, latent = linear("markov_head.joint_proj", torch.cat([state, pair, row])).chunk(3)
            state, latent = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), latent.tanh()
        found.append(t["markov_head.markov_w2.weight"] @ latent)
        if s["sure"]:
            read = torch.cat([row, pair]) if s["sure"] == "pairs" else row
            sure.append(linear("confidence_head.proj", read).sigmoid()[0])
    return torch.stack(found), torch.stack(sure) if sure else torch.ones(len(found))
