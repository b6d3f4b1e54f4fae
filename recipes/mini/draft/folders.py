"""The three drafters as folders that engines load, and back.

draft   a Llama of its own: config, weights, tokenizer.
eagle3  SpecForge's layout: `LlamaForCausalLMEagle3`, without the embeddings, which are the target's. `d2t` has offsets:
        the target's id of draft id i is i + d2t[i]. `eagle_aux_hidden_state_layer_ids` are layers, counted from 0, whose
        outputs the head reads: SpecForge's and SGLang's convention; vLLM names the same outputs by numbers greater by 1.
mtp     a copy of the target with DeepSeek's `model.layers.{L}` after its own and `num_nextn_predict_layers` in its config.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..export import swap
from ..model import Mini, MiniConfig, block_from_hf, block_to_hf, from_hf, to_hf
from .heads import Eagle3, Head, HeadConfig, Mtp

Drafter = Mini | Head
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle_config(head: Eagle3) -> dict:
    c, size = head.config, len(head.vocab)
    eagle = {LAYER_IDS: list(head.aux), "use_aux_hidden_state": True}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": head.target_vocab, "tie_word_embeddings": False}
    return c.to_hf() | own | {"draft_vocab_size": size, "eagle_config": eagle}


def eagle_tensors(head: Eagle3) -> dict[str, Tensor]:
    ids = head.vocab
    known = torch.zeros(head.target_vocab, dtype=torch.bool)
    known[ids] = True
    return {
        "fc.weight": head.fc,
        **block_to_hf(head.block, "midlayer."),
        "midlayer.hidden_norm.weight": head.hidden_norm,
        "norm.weight": head.last_norm,
        "lm_head.weight": head.lm_head,
        "d2t": ids - torch.arange(len(ids)),
        "t2d": known,
    }


def mtp_tensors(head: Mtp) -> dict[str, Tensor]:
    target = head.shared[0]
    layer = f"model.layers.{target.config.layers}."
    own = {
        "enorm": head.enorm, "hnorm": head.hnorm, "eh_proj": head.eh_proj, "shared_head.norm": head.last_norm,
    }  # fmt: skip
    named = {f"{layer}{name}.weight": t for name, t in own.items()}
    return to_hf(target) | block_to_hf(head.block, layer) | named


def contents(drafter: Drafter) -> tuple[dict, dict[str, Tensor]]:
    """`config.json` and the tensors, floats in bfloat16."""
    if isinstance(drafter, Eagle3):
        config, tensors = eagle_config(drafter), eagle_tensors(drafter)
    elif isinstance(drafter, Mtp):
        config, tensors = drafter.shared[0].config.to_hf() | {"num_nextn_predict_layers": 1}, mtp_tensors(drafter)
    else:
        assert isinstance(drafter, Mini)
        config, tensors = drafter.config.to_hf(), to_hf(drafter)
    rounded = {n: t.detach().to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    return config, {n: t.contiguous() for n, t in rounded.items()}


def write(drafter: Drafter, to: Path, target: Path) -> int:
    """Writes the folder, aside at first; the tokenizer's files are the target's. Returns its bytes."""
    new = to.with_name(to.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    config, tensors = contents(drafter)
    (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    (new / "model.safetensors").chmod(0o644)
    for name in COPIED if not isinstance(drafter, Eagle3) else ():
        shutil.copyfile(target / name, new / name)
    swap(new, to)
    return sum(f.stat().st_size for f in to.iterdir())


def read(folder: Path, target: Mini) -> Drafter:
    """A drafter of any of the three kinds."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if "draft_vocab_size" in config:
        return read_eagle(config, tensors, target)
    if config.get("num_nextn_predict_layers"):
        return read_mtp(tensors, target)
    return from_hf(MiniConfig.from_hf(config), tensors).eval()


@torch.no_grad()
def read_eagle(config: dict, tensors: dict[str, Tensor], target: Mini) -> Eagle3:
    first, middle, last = config["eagle_config"][LAYER_IDS]
    sizes = HeadConfig(config["intermediate_size"], config["draft_vocab_size"], (first, middle, last))
    offsets = tensors["d2t"]
    head = Eagle3(target.config, sizes, offsets + torch.arange(len(offsets)))
    block_from_hf(head.block, tensors, "midlayer.")
    head.fc.copy_(tensors["fc.weight"])
    head.hidden_norm.copy_(tensors["midlayer.hidden_norm.weight"])
    head.last_norm.copy_(tensors["norm.weight"])
    head.lm_head.copy_(tensors["lm_head.weight"])
    return head.eval()


@torch.no_grad()
def read_mtp(tensors: dict[str, Tensor], target: Mini) -> Mtp:
    head, layer = Mtp(target), f"model.layers.{target.config.layers}."
    block_from_hf(head.block, tensors, layer)
    named = {"enorm": head.enorm, "hnorm": head.hnorm, "eh_proj": head.eh_proj, "shared_head.norm": head.last_norm}
    for name, parameter in named.items():
        parameter.copy_(tensors[f"{layer}{name}.weight"])
    return head.eval()


def draft_config(target: MiniConfig, width: int, layers: int, ffn: int, heads: int, kv_heads: int) -> MiniConfig:
    """A Llama with the target's tokenizer, positions and head sizes that fit the width."""
    sizes = {"hidden": width, "layers": layers, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    return replace(target, **sizes, head_dim=width // heads)
