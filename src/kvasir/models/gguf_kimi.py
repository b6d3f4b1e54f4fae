"""Kimi Linear in GGUF files: the metadata as the `config.json` that our class reads.

Source: llama.cpp's converter of Kimi Linear and its loader. A file states which layers are recurrent by their number of
KV heads, 0; they have as many heads as attention.
"""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder
from kvasir.models.gguf_lfm2 import read_kv_heads

_SIGMOID = 2  # llama.cpp's number of the gating function


def _kimi_linear(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    recurrent = [n == 0 for n in read_kv_heads(f)]
    rank = f.integer("attention.kv_lora_rank", 1, MAX_WIDTH)
    turning = f.integer("rope.dimension_count", 2, MAX_HEAD_DIM)
    keys = f.integer("attention.key_length_mla", turning + 1, MAX_WIDTH)
    f.expect("attention.key_length", rank + turning)
    f.get("attention.value_length")  # a width that the converter copies from the model's config without a use
    heads = f.integer("attention.head_count", 1, MAX_HEADS)
    lengths = {"attention.key_length": turning, "attention.value_length": turning, "attention.head_count_kv": heads}
    config = read_decoder(Fields({**f.values, **lengths}, f.where, f.read), shapes)
    for rotary in ("head_dim", "rope_theta"):
        del config[rotary]
    f.expect("expert_gating_func", _SIGMOID)
    f.expect("expert_weights_norm", True)
    return config | {
        "model_type": "kimi_linear",
        "layer_types": ["linear_attention" if is_state else "full_attention" for is_state in recurrent],
        "linear_num_heads": heads,
        "linear_head_dim": f.integer("kda.head_dim", 1, MAX_HEAD_DIM),
        "linear_conv_kernel_dim": f.integer("ssm.conv_kernel", 1, MAX_WIDTH),
        "kv_lora_rank": rank,
        "q_lora_rank": f.integer("attention.q_lora_rank", 1, MAX_WIDTH, 0) or None,
        "qk_nope_head_dim": keys - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": f.integer("attention.value_length_mla", 1, MAX_WIDTH),
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_token": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "num_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "first_k_dense_replace": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "num_expert_group": f.integer("expert_group_count", 1, MAX_EXPERTS, 1),
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
    }


READERS = {"kimi-linear": _kimi_linear}
