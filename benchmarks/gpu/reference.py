"""The same steps by transformers, where it is installed: bfloat16, PyTorch's attention, one call per step."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.measure import Place
from benchmarks.gpu.models import config_of


def missing() -> str:
    """Why there is no reference; empty if there is one."""
    return "" if find_spec("transformers") else "transformers is not installed"


def reference(place: Place, shape: str, sequences: int, context: int) -> dict[str, Any]:
    """Times of a step that adds a token to each sequence of `context` tokens, greedy."""
    import transformers

    config = transformers.AutoConfig.for_model(**{**config_of(shape), "use_cache": True})
    with torch.device(place.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (sequences, context - 1), device=place.device)
    with torch.inference_mode():
        cache = transformers.DynamicCache()
        for first in range(0, context - 1, 256):  # the activations of all sequences at once would be large
            part = ids[:, first : first + 256]
            found = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = found.logits[:, -1:].argmax(-1)

        def step() -> None:
            nonlocal token
            found = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = found.logits[:, -1:].argmax(-1)

        times = place.seconds(step)
    return {
        **{"sequences": sequences, "context": context, "step_ms": times, "transformers": transformers.__version__},
        "tokens_per_s": 1e3 * sequences / times["median"],
    }
