"""Cores over real and random models, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.models.registry import MODELS
from kvasir.sched.drafts import Drafter
from tests.models import rwkv7_plain
from tests.models.families import SWITCHED, config_of

_LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
_SHAPE = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
_GEMMA = {
    "sliding_window": 40,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

CONFIGS = {
    "llama": {**_LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "mistral": {**_LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {
        **_LLAMA, **_GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **_LLAMA, **_GEMMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 2, "rope_local_base_freq": 100.0,
    },
    "phi3": {
        **_LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "sliding_window": 40,
        "partial_rotary_factor": 0.75, "pad_token_id": 0,
    },
    "mixtral": {
        **_LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        **_LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "qwen3-next": {
        **_LLAMA, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
    },
    "qwen3-5-tiled": {
        **_LLAMA, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
        "linear_value_heads_tiled": True,
    },
    "rwkv7": {
        "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "hidden_size": 60, "num_hidden_layers": 3,
        "head_dim": 20, "intermediate_size": 96, "decay_low_rank_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 5,
        "gate_low_rank_dim": 16, "vocab_size": 300, "hidden_act": "sqrelu", "norm_eps": 1e-5,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 2, "n_head": 3,
        "n_positions": 512, "vocab_size": 300, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
    "gpt-bigcode": {
        "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": 48, "n_layer": 2,
        "n_head": 3, "n_positions": 512, "vocab_size": 300, "n_inner": 96,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 256,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
    "qwen3-0.6b": {
        **_LLAMA, **_SHAPE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1e6,
    },
    "llama-1b": {
        **_LLAMA, **_SHAPE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "rope_theta": 5e5,
    },
}  # fmt: skip
_ENCODER = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 300,
    "max_position_embeddings": 256, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
# Models of whole texts, besides bert.
ENCODERS = {
    "xlm-roberta": {**_ENCODER, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
    "distilbert": {
        "model_type": "distilbert", "architectures": ["DistilBertModel"], "dim": 48, "hidden_dim": 96, "n_layers": 2,
        "n_heads": 4, "vocab_size": 300, "max_position_embeddings": 256,
    },
    "albert": {**_ENCODER, "model_type": "albert", "architectures": ["AlbertModel"], "embedding_size": 20},
    "electra": {**_ENCODER, "model_type": "electra", "architectures": ["ElectraModel"], "embedding_size": 20},
    "mpnet": {**_ENCODER, "model_type": "mpnet", "architectures": ["MPNetModel"], "pad_token_id": 1},
    "deberta-v3": {
        **_ENCODER, "model_type": "deberta-v2", "architectures": ["DebertaV2Model"], "type_vocab_size": 0,
        "relative_attention": True, "share_att_key": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "pos_att_type": "p2c|c2p", "position_biased_input": False, "max_relative_positions": 60,
    },
    "jina-v3": {**_ENCODER, "model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"]},
    "nomic": {**_ENCODER, "model_type": "nomic_bert", "architectures": ["NomicBertModel"]},
    "gte": {**_ENCODER, "model_type": "gte", "architectures": ["GteModel"]},
    "modernbert": {
        **{name: value for name, value in _ENCODER.items() if name != "type_vocab_size"},
        "model_type": "modernbert", "architectures": ["ModernBertModel"], "local_attention": 24,
        "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "embedding-gemma": {
        **_LLAMA, **_GEMMA, "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "use_bidirectional_attention": True,
    },
    "eurobert": {
        **_LLAMA, "model_type": "eurobert", "architectures": ["EuroBertModel"], "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "mask_token_id": 3, "max_position_embeddings": 256,
    },
}  # fmt: skip
CLASSIFIERS = {
    "bert-pairs": {**CONFIGS["bert"], "architectures": ["BertForSequenceClassification"], "num_labels": 1},
    "bert-tokens": {**CONFIGS["bert"], "architectures": ["BertForTokenClassification"], "num_labels": 5},
    "xlm-roberta-labels": {
        **ENCODERS["xlm-roberta"], "architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 3,
    },
    "deberta-pairs": {
        **ENCODERS["deberta-v3"], "architectures": ["DebertaV2ForSequenceClassification"], "num_labels": 1,
    },
    "eurobert-labels": {
        **ENCODERS["eurobert"], "architectures": ["EuroBertForSequenceClassification"], "num_labels": 3,
    },
    "qwen3-labels": {
        **CONFIGS["qwen3"], "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 2, "pad_token_id": 0,
    },
}  # fmt: skip
for _name in SWITCHED:
    _config = {**config_of(_name), "vocab_size": 300, "max_position_embeddings": 512}
    CONFIGS[_name] = {**_config, "architectures": list(MODELS[_config["model_type"]][2])}
# Shorter than any test's pool: the served context, and so the factors, must not depend on the pool.
CONFIGS["phimoe"]["rope_parameters"]["original_max_position_embeddings"] = 64


def random_model(kind: str, folder: Path, seed: int = 0) -> str:
    """A Hugging Face folder with random weights, scaled so that logits and attention scores are O(1 to 10)."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.models.oracle import state_of
    from tests.models.step3p5_text import Step3p5ForCausalLM

    config = {**CONFIGS, **ENCODERS, **CLASSIFIERS}[kind]
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "rwkv7":  # of which transformers has no class
        weights = {name: torch.from_numpy(array) for name, array in rwkv7_plain.random_weights(config, seed).items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)
    with torch.device("meta"):
        made = transformers.AutoConfig.from_pretrained(folder)
        name = config["architectures"][0]
        cls: Any = getattr(transformers, name, transformers.LlamaForCausalLM)  # that of InternLM3, IQuestCoder
        cls = Step3p5ForCausalLM if config["model_type"] == "step3p5" else cls
        shapes = {k: v.shape for k, v in state_of(cls(made)).items()}
    big = config["vocab_size"] > 10000
    unscaled = config["model_type"].startswith(("gemma3n", "gemma4"))  # scores, which queries are small for
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings", True):
            continue
        x = torch.randn(shape, generator=rng, dtype=torch.float32)
        if len(shape) < 2:
            around = "norm" in name.lower() or "ln_" in name or name.endswith(("scale", "scalar"))
            x = 1.0 + 0.1 * x if around else 0.1 * x
            x = 0.25 * x if unscaled and name.endswith("q_norm.weight") else x
            x = 0.1 * x if name.endswith("bias") and ("norm" in name.lower() or "ln_" in name) else x
        else:
            x *= (1.0 if "emb" in name or "wte" in name or "wpe" in name else 1.6) * shape[-1] ** -0.5
        tensors[name] = x.to(torch.bfloat16) if big else x
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def core_of(model: str, drafter: Drafter | None = None, **options) -> EngineCore:
    options.setdefault("block_size", 64)
    options.setdefault("num_blocks", 60)
    return build_core(EngineOptions(model=model, **options), drafter=drafter)
