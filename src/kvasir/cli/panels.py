"""The panels of --help: what users need most comes first; the other options follow by subject."""

from __future__ import annotations

# In the first panel, with the command's own options.
_COMMON = (
    "max_model_len dtype quantize device threads kv_memory weights_memory max_num_seqs speculate lora "
    "top_p top_k min_p json_schema"
).split()
_SUBJECTS = {
    "Sampling": (),  # the group of that name
    "Model and arithmetic": (
        "served_model_name tokenizer revision kv_dtype chat_template trust_special_tokens executor rope_scaling "
        "hf_overrides"
    ).split(),
    "Batching and memory": (
        "max_num_batched_tokens max_chunk block_size num_blocks memory_fraction overlap pin max_waiting jump_ahead "
        "slo_interactive slo_batch slo_background"
    ).split(),
    "Prefix cache": "prefix_cache cache_".split(),
    "Several processes": "tensor_parallel pipeline_parallel expert_parallel role transfer_".split(),
    "Speculation": "draft_".split(),
    "Adapters": "max_loras max_cpu_loras max_lora_rank lora_memory".split(),
}
_GROUPS = {
    "sampler": "Sampling",
    "operation": "Operation of the server",
    "models": "Several models",
    "fleet": "Replicas",
    "peers": "Names of other engines",
}


def panel_of(name: str, group: str) -> str | None:
    """The panel of an option; None for the first one. group: the options that it belongs to."""
    if name in _COMMON:
        return None
    if group in _GROUPS:
        return _GROUPS[group]
    for panel, names in _SUBJECTS.items():
        if any(name == known or (known.endswith("_") and name.startswith(known)) for known in names):
            return panel
    return "Other"
