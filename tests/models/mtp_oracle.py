"""Models with a head for multi-token prediction, and an oracle: transformers does not load these heads, but a head's
block is a model of one layer. With the rows that the head's matrix makes, and under the head's norm, transformers'
model computes what the head predicts. A head of several layers has a block for each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.families import config_of
from tests.models.oracle import randomized, state_of
from tests.models.step3p5_text import Step3p5ForCausalLM

FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
# Kind -> changes of its config that leave the one layer of a head.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "deepseek-v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "deepseek-v32": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm-moe-dsa": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "indexer_types": ["full"]},
    "glm4-moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4-moe-lite": {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "mimo-v2-flash": {
        "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"],
    },
    "step3p5": {
        "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"],
        "swiglu_limits": None, "swiglu_limits_shared": None,
    },
    "qwen3-5": FULL,
    "qwen3-5-moe": FULL,
    "qwen3-next": FULL,
}  # fmt: skip
COUNT = {"qwen3-5": "mtp_num_hidden_layers", "qwen3-5-moe": "mtp_num_hidden_layers", "qwen3-next": ""}
NORMED = ("mimo-v2-flash", "qwen3-5", "qwen3-5-moe", "qwen3-next")  # the rows after the last norm are carried
WHOLE = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # joint, embed norm, hidden norm, last norm
UNCHAINED = ("mimo-v2-flash",)  # each layer reads the target's rows
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def reference(transformers: Any, config: dict[str, Any], seed: int) -> Any:
    kind = config.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **config)
    if kind == "step3p5":
        return randomized(Step3p5ForCausalLM(config), seed)
    return randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


def renamed(
    kind: str, layers: int, layer: int, state: dict[str, Tensor], parts: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """A one-layer model's state, and the own parts of a layer of the head, as a checkpoint names them."""
    names: tuple[str, ...] = QWEN
    if kind.startswith("qwen"):
        prefix = f"mtp.layers.{layer}."
    elif kind == "mimo-v2-flash":
        prefix = f"model.mtp.layers.{layer}."
        names = tuple(prefix + name for name in (*WHOLE[:3], "final_layernorm"))
    else:
        prefix = f"model.layers.{layers + layer}."
        names = tuple(prefix + name for name in WHOLE)
    found = {
        prefix + name.removeprefix("model.layers.0."): tensor
        for name, tensor in state.items()
        if name.startswith("model.layers.0.")
    }
    if kind == "step3p5":
        names = (*names[:3], f"{prefix}transformer.shared_head.norm")
        found[f"{prefix}transformer.shared_head.output.weight"] = state["lm_head.weight"]
    if kind == "mimo-v2-flash":
        found = {name.replace("post_attention", "pre_mlp"): tensor for name, tensor in found.items()}
    return found | {
        f"{name}.weight": part for name, part in zip(names, (*parts, state["model.norm.weight"]), strict=True)
    }


@dataclass(frozen=True)
class Oracle:
    """A target of a kind, the blocks of its head's layers, and their own parts. around: what is added to norms
    besides. Layers of Qwen share their parts."""

    target: Any
    blocks: tuple[Any, ...]
    joints: tuple[Tensor, ...]
    norms: tuple[tuple[Tensor, Tensor], ...]
    around: float
    kind: str

    @classmethod
    @cache
    def of(cls, transformers: Any, kind: str, layers: int = 1) -> Oracle:
        target = reference(transformers, config_of(kind), 0)
        blocks = tuple(reference(transformers, config_of(kind) | KINDS[kind], 1 + i) for i in range(layers))
        shared, width = kind.startswith("qwen"), target.config.hidden_size
        around = 0.0 if shared or kind == "step3p5" else 1.0  # which add 1 themselves
        joints, norms = [], []
        for i, block in enumerate(blocks):
            if kind != "step3p5":  # whose layers have logits of their own
                block.lm_head.weight.data.copy_(target.lm_head.weight)
            if shared:
                block.model.norm.weight.data.copy_(blocks[0].model.norm.weight)
            generator = torch.Generator().manual_seed(2 if shared else 2 + i)
            joints.append(torch.randn((width, 2 * width), generator=generator) / width**0.5)
            first, second = (torch.randn(width, generator=generator) * 0.3 + around for _ in range(2))
            norms.append((first, second))
        return cls(target, blocks, tuple(joints), tuple(norms), around, kind)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """The target's last hidden rows, [T, D]; of Step-3.5 those before the last norm."""
        after, before = _last(self.target, input_ids=ids[None])
        return before if self.kind == "step3p5" else after

    @torch.no_grad()
    def rows(self, next_ids: Tensor, hidden_TD: Tensor, layer: int = 0) -> Tensor:
        """The inputs of the block of a layer, [T, D]."""
        embedded = self.target.get_input_embeddings()(next_ids)
        both = [rms(rows, self.target.config.rms_norm_eps) * (norm + 1.0 - self.around)
                for rows, norm in zip((embedded, hidden_TD), self.norms[layer], strict=True)]  # fmt: skip
        return torch.cat(both, 1) @ self.joints[layer].T

    @torch.no_grad()
    def predict(self, rows_TD: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The logits [T, V], and the rows that are carried to the next layer or position [T, D]."""
        block = self.blocks[layer]
        hidden, before = _last(block, inputs_embeds=rows_TD[None])
        return block.lm_head(hidden), hidden if self.kind in NORMED else before

    def guesses(self, ids: list[int], count: int) -> list[int]:
        """The ids that follow, guessed greedily: layer i continues each position with the id 1 + i after it, the last
        one further positions with its own guesses and rows."""
        whole = list(ids)
        target = hidden = self.hidden(torch.tensor(ids[:-1]))
        for layer in range(len(self.blocks)):
            given = hidden if layer == 0 or self.kind not in UNCHAINED else target
            rows = self.rows(torch.tensor(whole[1 + layer :]), given, layer)
            logits, hidden = self.predict(rows, layer)
            whole.append(int(logits[-1].argmax()))
        while len(whole) - len(ids) < count:
            rows = torch.cat([rows, self.rows(torch.tensor(whole[-1:]), hidden[-1:], layer)])
            logits, hidden = self.predict(rows, layer)
            whole.append(int(logits[-1].argmax()))
        return whole[len(ids) :][:count]

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint."""
        found, layers = state_of(self.target), self.target.config.num_hidden_layers
        for i, (block, joint, norms) in enumerate(zip(self.blocks, self.joints, self.norms, strict=True)):
            found |= renamed(self.kind, layers, i, state_of(block), (joint, *norms))
        return found

    @property
    def config(self) -> dict[str, Any]:
        name = COUNT.get(self.kind, "num_nextn_predict_layers")
        count = len(self.blocks)
        own = {"mtp_layer_types": ["sliding_attention"] * count, "mtp_mlp_layer_types": ["dense"] * count}
        more = {**own, "mtp_heads": count} if self.kind == "step3p5" else {}
        return self.target.config.to_dict() | ({name: count} if name else {}) | more

    def save(self, folder: Path) -> None:
        """Writes the checkpoint."""
        config = self.config | {"architectures": [type(self.target).__name__]}
        config.pop("mtp_heads", None)  # counted by the loader
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in self.state.items()}, folder / "model.safetensors")


def _last(model: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The rows after the last norm, and before it."""
    before: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0][0]))
    after = model.model(**inputs).last_hidden_state[0]
    hook.remove()
    return after, before[0]


def rms(rows: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
