"""The tensors' names of Gemma 3n and 4 in GGUF files, beside those of Gemma 2 and 3."""

PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4 = {
    **PER_LAYER,
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_up_exps": "experts.*.gate_up_proj",
    "ffn_gate_exps": "experts.*.gate_proj",
    "ffn_up_exps": "experts.*.up_proj",
    "ffn_down_exps": "experts.*.down_proj",
}
ASSISTANT = {"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"}
SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
GEMMA3N = {
    **PER_LAYER,
    "altup_proj": "model.altup_projections.*",
    "altup_unembd_proj": "model.altup_unembed_projections.*",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
STACKS = ("altup_proj", "altup_unembd_proj")  # one matrix per stream but the first
