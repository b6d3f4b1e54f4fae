"""RWKV-7 written plainly from the paper (arXiv:2503.14456), token by token in float64: the oracle of its tests, since
transformers has no such model. Names of tensors are those of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def norm(x: np.ndarray, w: Weights, name: str, eps: float) -> np.ndarray:
    """A LayerNorm over the last dimension; the bias may be absent."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled.reshape(-1) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


class PlainRwkv7:
    """config: as in config.json, with all sizes. weights: float64."""

    def __init__(self, config: Mapping[str, Any], weights: Weights):
        self.c = config
        self.w = {name: np.asarray(array, np.float64).squeeze() for name, array in weights.items()}
        self.heads = config["hidden_size"] // config["head_dim"]
        self.states: list[dict[str, np.ndarray]] = []

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[len(ids), vocabulary]"""
        c, width = self.c, self.c["hidden_size"]
        zeros = np.zeros(width)
        shape = self.heads, c["head_dim"], c["head_dim"]
        self.states = [{"time": zeros, "channel": zeros, "S": np.zeros(shape)} for _ in range(c["num_hidden_layers"])]
        head = self.w["model.embeddings.weight" if c.get("tie_word_embeddings") else "lm_head.weight"]
        return np.stack([head @ self.hidden(token) for token in ids])

    def hidden(self, token: int) -> np.ndarray:
        eps, w = self.c["norm_eps"], self.w
        x, first = w["model.embeddings.weight"][token], None
        if self.c.get("norm_first", True):
            x = norm(x, w, "model.layers.0.pre_norm", eps)
        for i, state in enumerate(self.states):
            layer = f"model.layers.{i}."
            mixed, values = self.time_mix(norm(x, w, layer + "attn_norm", eps), state, layer + "attn.", first)
            first = values if first is None else first
            x = x + mixed
            x = x + self.channel_mix(norm(x, w, layer + "ffn_norm", eps), state, layer + "ffn.")
        return norm(x, w, "model.norm", eps)

    def low_rank(self, x: np.ndarray, name: str, between: Any = lambda x: x) -> np.ndarray:
        inner = between(self.w[f"{name}.lora.0.weight"] @ x)
        return self.w[f"{name}.lora.2.weight"] @ inner + self.w.get(f"{name}.lora.2.bias", 0.0)

    def time_mix(
        self, x: np.ndarray, state: dict[str, np.ndarray], name: str, first: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        w, shape = self.w, (self.heads, self.c["head_dim"])
        last, state["time"] = state["time"], x
        xr, xw, xk, xv, xa, xg = (x + (last - x) * w[f"{name}x_{part}"] for part in "rwkvag")
        r, k, v = w[name + "r_proj.weight"] @ xr, w[name + "k_proj.weight"] @ xk, w[name + "v_proj.weight"] @ xv
        decay = np.exp(-np.exp(-0.5) * sigmoid(self.low_rank(xw, name + "w_lora", np.tanh)))
        rate = sigmoid(self.low_rank(xa, name + "a_lora"))
        if first is not None:
            v = v + (first - v) * sigmoid(self.low_rank(xv, name + "v_lora"))
        gate = self.low_rank(xg, name + "g_lora", sigmoid)
        removed = (k * w[name + "k_k"]).reshape(shape)
        removed /= np.maximum(np.linalg.norm(removed, axis=1, keepdims=True), 1e-12)
        k = k * (1 + (rate - 1) * w[name + "k_a"])
        out = np.zeros(shape)
        parts = (part.reshape(shape) for part in (r, decay, k, v, rate))
        for head, (r_d, decay_d, k_d, v_d, rate_d) in enumerate(zip(*parts, strict=True)):
            n, S = removed[head], state["S"][head]  # S[i, j]: of value i and key j
            state["S"][head] = S = S @ (np.diag(decay_d) - np.outer(n, rate_d * n)) + np.outer(v_d, k_d)
            y = S @ r_d
            scaled = (y - y.mean()) / np.sqrt(y.var() + shape[1] * self.c["norm_eps"])
            here = slice(head * shape[1], (head + 1) * shape[1])
            y = scaled * w[name + "g_norm.weight"][here] + w[name + "g_norm.bias"][here]
            out[head] = y + (r_d * k_d * w[name + "r_k"].reshape(shape)[head]).sum() * v_d
        return w[name + "o_proj.weight"] @ (out.reshape(-1) * gate), v

    def channel_mix(self, x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
        last, state["channel"] = state["channel"], x
        shifted = x + (last - x) * self.w[name + "x_k"]
        return self.w[name + "value.weight"] @ np.maximum(self.w[name + "key.weight"] @ shifted, 0.0) ** 2


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights of a checkpoint that make every part of the model count."""
    random, c = np.random.default_rng(seed), config
    width, heads, inner, ranks = c["hidden_size"], c["hidden_size"] // c["head_dim"], c["intermediate_size"], {}
    for part, field in (("w", "decay"), ("a", "a"), ("v", "v"), ("g", "gate")):
        ranks[part] = c[f"{field}_low_rank_dim"]
    biases = ("weight", "bias") if c.get("norm_bias", True) else ("weight",)
    found: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (c["vocab_size"], width)}
    if not c.get("tie_word_embeddings"):
        found["lm_head.weight"] = (c["vocab_size"], width)
    found |= {f"model.norm.{part}": (width,) for part in biases}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        norms = ("attn_norm", "ffn_norm", *(("pre_norm",) if i == 0 and c.get("norm_first", True) else ()))
        found |= {f"{layer}{name}.{part}": (width,) for name in norms for part in biases}
        found |= {f"{layer}attn.x_{part}": (1, 1, width) for part in "rwkvag"}
        found |= {f"{layer}attn.{part}_proj.weight": (width, width) for part in "rkvo"}
        found |= {
            f"{layer}attn.k_k": (width,),
            f"{layer}attn.k_a": (width,),
            f"{layer}attn.r_k": (heads, width // heads),
        }
        found |= {f"{layer}attn.g_norm.{part}": (width,) for part in ("weight", "bias")}
        for part, rank in ranks.items():
            if part != "v" or i > 0:
                found[f"{layer}attn.{part}_lora.lora.0.weight"] = (rank, width)
                found[f"{layer}attn.{part}_lora.lora.2.weight"] = (width, rank)
            if part != "g" and (part != "v" or i > 0):
                found[f"{layer}attn.{part}_lora.lora.2.bias"] = (width,)
        found |= {f"{layer}ffn.x_k": (width,), f"{layer}ffn.key.weight": (inner, width)}
        found[f"{layer}ffn.value.weight"] = (width, inner)
    return {name: _drawn(random, name, shape) for name, shape in found.items()}


def _drawn(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = random.standard_normal(shape)
    if len(shape) == 2 and not name.endswith("r_k"):
        noise *= 1.0 if "embeddings" in name else 1.5 / shape[1] ** 0.5
    elif name.endswith("norm.weight"):
        noise = 1 + 0.3 * noise
    else:
        noise *= 0.7
    return noise.astype(np.float32)


def rwkv7_name(name: str) -> str:
    """The name by which llama.cpp's converter looks up a checkpoint's tensor in gguf-py's table."""
    for old, new in (
        *(("ffn_norm", "ln2"), ("ffn", "feed_forward"), ("attn", "attention"), ("g_norm", "ln_x")),
        *(("_lora.lora.0.weight", "1.weight"), ("_lora.lora.2.weight", "2.weight"), ("_lora.lora.2.bias", "0.weight")),
    ):
        name = name.replace(old, new)
    return name
