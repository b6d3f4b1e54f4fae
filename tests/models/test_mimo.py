"""MiMo-7B: transformers has Qwen2, which the decoder and the head's block are. The head in this file is the oracle of
what is around that block."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvasir.errors import UnsupportedModel
from kvasir.models.mimo import MiMo, MiMoConfig
from kvasir.ops import native
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_draft import with_own_draft
from kvasir.weights.find import find_model
from tests.models.driver import logits_of
from tests.models.family_parts import SIZES
from tests.models.mtp_oracle import reference, rms
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids, state_of
from tests.models.test_mtp import draft, head_of
from tests.runner.proposing import Lane, runner_of, step

LENGTH = 40
CONFIG = {**SIZES, "model_type": "qwen2", "rope_theta": 1000.0}
PARTS = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")


@cache
def made(transformers: Any) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """The target, the head's block, and the head's matrix and norms of tokens and rows."""
    target, block = (reference(transformers, dict(CONFIG), seed) for seed in (0, 1))
    block.model.layers = block.model.layers[:1]
    generator = torch.Generator().manual_seed(2)
    joint = torch.randn((64, 128), generator=generator) / 8
    return target, block, (joint, *(torch.randn(64, generator=generator) * 0.3 + 1 for _ in range(2)))


def saved(transformers: Any, folder: Path, **changes: Any) -> Path:
    """A checkpoint as Xiaomi publishes it."""
    target, block, parts = made(transformers)
    own = {name: tensor for name, tensor in state_of(block).items() if name.startswith("model.layers.0.")}
    state = state_of(target) | {name.replace("layers.0", "mtp_layers.0"): tensor for name, tensor in own.items()}
    whole = (*parts, block.model.norm.weight.data)
    state |= {f"model.mtp_layers.0.{name}.weight": part for name, part in zip(PARTS, whole, strict=True)}
    config = {**target.config.to_dict(), "model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    config |= {"num_nextn_predict_layers": 1, "attention_bias": True, "use_mrope": False, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def predicted(transformers: Any, next_ids: Tensor, hidden: Tensor, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """The head's logits, and the rows that it carries."""
    target, block, (joint, token_norm, hidden_norm) = made(transformers)
    eps = target.config.rms_norm_eps
    rows = rms(hidden, eps) * hidden_norm, rms(target.get_input_embeddings()(next_ids), eps) * token_norm
    both = torch.cat(rows[::-1] if swapped else rows, -1) @ joint.T
    out = block.model(inputs_embeds=both[None], use_cache=False).last_hidden_state[0]
    return target.lm_head(out), out


@pytest.mark.filterwarnings("ignore")
def test_the_decoder_is_a_qwen2_and_the_head_reads_the_hidden_row_first(transformers, tmp_path):
    loaded = load_model(find_model(saved(transformers, tmp_path)), "float32", options=LoadOptions(mtp=True))
    assert isinstance(loaded.model, MiMo) and loaded.mtp is not None
    target, ids = made(transformers)[0], torch.tensor(random_ids(LENGTH + 1, 96))
    with torch.no_grad():
        whole, hidden = target(ids[None]).logits[0], target.model(ids[None, :-1]).last_hidden_state[0]
    assert distance(logits_of(loaded.model, ids.tolist()), whole) < TOLERANCE
    ours, expected = draft(loaded.model, loaded.mtp, ids), predicted(transformers, ids[1:], hidden)[0]
    assert distance(ours, expected) < TOLERANCE
    assert distance(ours, predicted(transformers, ids[1:], hidden, swapped=True)[0]) > SENSITIVITY
    assert torch.equal(ours, draft(loaded.model, loaded.mtp, ids, chunks=(1, 17, 2)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_it_drafts_for_itself(transformers, tmp_path):
    """Each further id reads the row after the head's last norm."""
    options = LoadOptions("program", block_size=16, mtp=True)
    loaded = with_own_draft(load_model(find_model(saved(transformers, tmp_path)), "float32", options=options))
    runner, lane = runner_of(loaded), Lane(0, random_ids(LENGTH, 96, seed=8), propose=3, chunk=17)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(3):
        ids, found = torch.tensor(lane.ids), []
        with torch.no_grad():
            hidden = made(transformers)[0].model(ids[None, :-1]).last_hidden_state[0]
        for _ in range(3):
            logits, carried = predicted(transformers, ids[1:], hidden)
            found.append(int(logits[-1].argmax()))
            ids, hidden = torch.cat([ids, torch.tensor(found[-1:])]), torch.cat([hidden, carried[-1:]])
        assert list(lane.draft) == found
        step(runner, [lane])


@pytest.mark.filterwarnings("ignore")
def test_without_its_layers_it_is_a_decoder_alone(transformers, tmp_path):
    loaded = load_model(find_model(saved(transformers, tmp_path, num_nextn_predict_layers=0)))
    with pytest.raises(UnsupportedModel, match="MiMo has no layers for multi-token prediction"):
        head_of(loaded.model, None)


def test_a_published_config_is_read():
    """The fields of MiMo-7B-RL."""
    config = {
        "architectures": ["MiMoForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 32768, "max_window_layers": 36, "model_type": "mimo", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 640000, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151680,
    }  # fmt: skip
    read = MiMoConfig.from_hf(config)
    assert (read.drafting, read.num_layers, read.kv_heads, read.qkv_bias, read.out_bias) == (1, 36, 8, True, False)
    with pytest.raises(UnsupportedModel, match="attention_bias"):
        MiMoConfig.from_hf(config | {"attention_bias": False})
