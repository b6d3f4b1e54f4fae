"""The names of encoders' tensors in GGUF files: gguf-py's, and those of the checkpoints."""

BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
NOMIC = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
NOMIC_MOE = {
    **{name: hf for name, hf in NOMIC.items() if name != "ffn_gate"},
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps": "mlp.experts.*.w1",
    "ffn_down_exps": "mlp.experts.*.w2",
}
JINA_V2 = {
    **{name: hf for name, hf in BERT.items() if not name.startswith(("cls", "position"))},
    "ffn_up": "mlp.gated_layers",
    "ffn_gate": "mlp.gated_layers_w",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
JINA_V3 = {
    **{name: hf for name, hf in NOMIC.items() if name != "ffn_gate"},
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "ffn_up": "mlp.fc1",
}
MODERN = {
    "token_embd": "model.embeddings.tok_embeddings",
    "token_embd_norm": "model.embeddings.norm",
    "output_norm": "model.final_norm",
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "classifier",
}
# EmbeddingGemma's layers after pooling, besides Gemma's own names.
DENSE = {"dense_2": "2_Dense/linear", "dense_3": "3_Dense/linear"}
