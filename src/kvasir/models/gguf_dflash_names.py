"""Names of the tensors in GGUF files of DFlash drafters (`kvasir.models.gguf_dflash`)."""

from __future__ import annotations

from collections.abc import Mapping

# In addition to Llama's.
NAMES: Mapping[str, str] = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
