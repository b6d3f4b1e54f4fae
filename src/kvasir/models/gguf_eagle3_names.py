"""Names of the tensors in GGUF files of EAGLE-3 heads (`kvasir.models.gguf_eagle3`)."""

from __future__ import annotations

from collections.abc import Mapping

# In addition to Llama's.
NAMES: Mapping[str, str] = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "attn_norm_2": "hidden_norm",
    "d2t": "d2t",
}
VECTORS = ("d2t",)  # without ".weight"
