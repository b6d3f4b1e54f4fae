"""Configs of published encoders, embedding models and rerankers: each is read, with the sizes that it states."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.models.registry import model_class_for
from kvasir.types import Task

_TRAINING = {
    "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
    "torch_dtype": "float32", "transformers_version": "4.37.0", "gradient_checkpointing": False,
    "classifier_dropout": None,
}  # fmt: skip
_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "hidden_act": "gelu",
}  # fmt: skip
_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "hidden_act": "gelu",
}  # fmt: skip
_XLMR = {
    **_TRAINING, "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    "layer_norm_eps": 1e-05, "model_type": "xlm-roberta", "output_past": True, "position_embedding_type": "absolute",
    "type_vocab_size": 1, "vocab_size": 250002,
}  # fmt: skip
_DEBERTA_V3 = {
    **_TRAINING, "architectures": ["DebertaV2ForSequenceClassification"], "model_type": "deberta-v2",
    "layer_norm_eps": 1e-07, "max_position_embeddings": 512, "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm", "pad_token_id": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu",
    "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "position_buckets": 256,
    "relative_attention": True, "share_att_key": True, "type_vocab_size": 0, "vocab_size": 128100,
}  # fmt: skip
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_RANKED = {"architectures": ["XLMRobertaForSequenceClassification"], **_ONE_LABEL}
PUBLISHED: dict[str, dict[str, Any]] = {
    "BAAI/bge-m3": {**_XLMR, **_LARGE, "max_position_embeddings": 8194},
    "BAAI/bge-reranker-v2-m3": {**_XLMR, **_LARGE, **_RANKED, "max_position_embeddings": 8194},
    "intfloat/multilingual-e5-large-instruct": {**_XLMR, **_LARGE, "max_position_embeddings": 514},
    "intfloat/multilingual-e5-small": {
        **_TRAINING, "architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 384,
        "intermediate_size": 1536, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "tokenizer_class": "XLMRobertaTokenizer", "type_vocab_size": 2, "vocab_size": 250037,
    },
    "Snowflake/snowflake-arctic-embed-l-v2.0": {
        **_XLMR, **_LARGE, "add_pooling_layer": False, "max_position_embeddings": 8194,
    },
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": {
        **_XLMR, **_BASE, "max_position_embeddings": 514,
    },
    "sentence-transformers/all-mpnet-base-v2": {
        **_TRAINING, **_BASE, "architectures": ["MPNetForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "mpnet", "pad_token_id": 1,
        "relative_attention_num_buckets": 32, "vocab_size": 30527,
    },
    "mixedbread-ai/mxbai-rerank-base-v1": {**_DEBERTA_V3, **_BASE, **_ONE_LABEL, "pooler_hidden_size": 768},
    "mixedbread-ai/mxbai-rerank-large-v1": {**_DEBERTA_V3, **_LARGE, **_ONE_LABEL, "pooler_hidden_size": 1024},
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": {
        **_DEBERTA_V3, **_BASE, "pooler_hidden_size": 768,
        "id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"},
        "label2id": {"contradiction": 2, "entailment": 0, "neutral": 1},
    },
    "Snowflake/snowflake-arctic-embed-m-v2.0": {
        **_TRAINING, **_BASE, "architectures": ["GteModel"], "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False, "logn_attention_scale": False, "matryoshka_dimensions": [256],
        "max_position_embeddings": 8192, "model_type": "gte", "pack_qkv": True, "pad_token_id": 1,
        "position_embedding_type": "rope", "rope_scaling": None, "rope_theta": 160000, "type_vocab_size": 1,
        "unpad_inputs": "true", "use_memory_efficient_attention": "true", "vocab_size": 250048,
    },
    "jinaai/jina-reranker-v2-base-multilingual": {
        **_XLMR, **_BASE, **_RANKED, "emb_pooler": None, "load_trained_adapters": False, "lora_adaptations": None,
        "lora_alpha": 4, "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "lora_rank": 4,
        "max_position_embeddings": 1026, "truncate_dim": None, "use_cache": False, "use_flash_attn": True,
    },
    "jinaai/jina-embeddings-v3": {
        **_XLMR, **_LARGE, "emb_pooler": "mean", "load_trained_adapters": True, "lora_alpha": 1, "lora_rank": 4,
        "lora_adaptations": ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"],
        "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "matryoshka_dimensions": [32, 64, 128, 256],
        "max_position_embeddings": 8194, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0,
        "task_instructions": {"separation": ""}, "truncate_dim": None, "use_cache": False, "use_flash_attn": True,
        "use_reg_tokens": False,
    },
    "nomic-ai/nomic-embed-text-v2-moe": {
        "activation_function": "gelu", "add_pooling_layer": False, "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0, "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.1,
        "eos_token_id": None, "expert_choice_router": False, "ffn_div": 1, "fused_bias_fc": True,
        "fused_dropout_add_ln": True, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "max_trained_positions": 2048, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "model_type": "nomic_bert",
        "moe_every_n_layers": 2, "moe_impl": "megablocks", "moe_normalize_expert_weights": False,
        "moe_resid_pdrop": 0.0, "moe_top_k": 2, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12,
        "n_positions": 2048, "num_experts": 8, "num_shared_experts": 0, "pad_token_id": 1,
        "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
        "qkv_proj_bias": True, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "router_aux_loss_coef": 0.1, "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.0,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "type_vocab_size": 1,
        "use_cache": True, "use_flash_attn": True, "use_rms_norm": None, "use_xentropy": True, "vocab_size": 250048,
    },
    "jinaai/jina-embeddings-v2-base-en": {
        **_TRAINING, **_BASE, "architectures": ["JinaBertForMaskedLM"], "emb_pooler": "mean",
        "attn_implementation": None, "feed_forward_type": "geglu", "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192, "model_max_length": 8192, "model_type": "bert", "pad_token_id": 0,
        "position_embedding_type": "alibi", "type_vocab_size": 2, "vocab_size": 30528,
    },
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "is_causal": False, "max_position_embeddings": 131072, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151646,
    },
    "intfloat/e5-mistral-7b-instruct": {
        "architectures": ["MistralModel"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": False, "vocab_size": 32000,
    },
    "Qwen/Qwen3-Embedding-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 32768,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151669,
    },
    "mixedbread-ai/mxbai-rerank-base-v2": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "pad_token_id": 151643,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_cache": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Alibaba-NLP/gte-modernbert-base": {
        "architectures": ["ModernBertModel"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
        "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "repad_logits_with_grad": False,
        "sep_token_id": 50282, "sparse_pred_ignore_index": -100, "sparse_prediction": False, "vocab_size": 50368,
    },
    "google/embeddinggemma-300m": {
        "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "max_position_embeddings": 2048,
        "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True,
        "use_cache": True, "vocab_size": 262144,
    },
}  # fmt: skip
# Tokens of a text, and what the model is for.
EXPECTED = {
    "BAAI/bge-m3": (8192, Task.EMBED),
    "BAAI/bge-reranker-v2-m3": (8192, Task.CLASSIFY),
    "sentence-transformers/all-mpnet-base-v2": (512, None),
    "mixedbread-ai/mxbai-rerank-base-v1": (512, Task.CLASSIFY),
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": (512, Task.CLASSIFY),
    "Snowflake/snowflake-arctic-embed-m-v2.0": (8192, Task.EMBED),
    "jinaai/jina-embeddings-v2-base-en": (8192, None),
    "nomic-ai/nomic-embed-text-v2-moe": (2048, Task.EMBED),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read(name):
    config = PUBLISHED[name]
    found = model_class_for(config).Config.from_hf(config)
    sizes = (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    stated = tuple(next(config[name] for name in names if name in config) for names in sizes)
    assert (found.width, found.num_layers, found.heads, found.vocab_size) == (*stated, config["vocab_size"])
    if name in EXPECTED:
        assert (found.context_length, found.pooling.task) == EXPECTED[name]
