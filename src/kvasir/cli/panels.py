"""The panels of --help: the twenty most common options come first; the others follow by subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST = 20  # options in the first panel
FIRST, MORE = "Options", "More options"
OPERATION, FORMATS = "Operation of the server", "Formats of answers"
# For the first panel, after the command's own options; in this order, as far as there is room.
_COMMON = (
    "max_model_len dtype quantize device threads kv_memory speculate lora top_p top_k min_p json_schema "
    "weights_memory max_num_seqs replicas served_model_name reasoning chat_template"
).split()
_LAST = ("quiet", "verbose", "help")
_SUBJECTS = {
    "Sampling": (),  # the group of that name
    "Model and arithmetic": (
        "dtype quantize device threads served_model_name tokenizer revision kv_dtype chat_template "
        "trust_special_tokens executor rope_scaling hf_overrides"
    ).split(),
    "Batching and memory": (
        "max_model_len max_num_seqs kv_memory weights_memory max_num_batched_tokens max_chunk block_size num_blocks "
        "memory_fraction overlap pin max_waiting jump_ahead slo_interactive slo_batch slo_background"
    ).split(),
    "Prefix cache": "prefix_cache cache_".split(),
    "Several processes": "tensor_parallel pipeline_parallel expert_parallel role transfer_".split(),
    "Speculation": "speculate draft_".split(),
    "Adapters": "lora max_loras max_cpu_loras max_lora_rank lora_memory".split(),
}
_GROUPS = {
    "sampler": "Sampling",
    "operation": OPERATION,
    "models": "Several models",
    "fleet": "Replicas",
    "peers": "Names of other engines",
}


def panel_of(name: str, group: str) -> str:
    """The subject of an option. group: the options that it belongs to."""
    if group in _GROUPS:
        return _GROUPS[group]
    for panel, names in _SUBJECTS.items():
        if any(name == known or (known.endswith("_") and name.startswith(known)) for known in names):
            return panel
    return "Other"


def by_panel(options: Sequence[Any]) -> dict[str, list[Any]]:
    """The options of a command by the titles of their panels, all in the order in which they are shown."""
    subjects = {option.name: getattr(option, "rich_help_panel", None) for option in options}
    last = [option for option in options if option.name in _LAST]
    own = [option for option in options if not isinstance(subjects[option.name], str) and option not in last]
    common = [option for name in _COMMON for option in options if option.name == name and option not in own]
    first = [*own, *common][: MOST - len(last)]
    last.sort(key=lambda option: _LAST.index(option.name))
    panels: dict[str, list[Any]] = {FIRST: [*first, *last]}
    for option in options:
        if option not in panels[FIRST]:
            title = subjects[option.name]
            panels.setdefault(title if isinstance(title, str) else MORE, []).append(option)
    return panels
