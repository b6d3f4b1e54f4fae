"""Step-3.5's decoder of transformers, which has it as the text part of a model for images only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    "max_position_embeddings": 4,
}  # fmt: skip


class Step3p5ForCausalLM(torch.nn.Module):
    """whole: the model for images. Its tensors are those of a checkpoint of the text model."""

    def __init__(self, config: Any):
        """config: of the text model."""
        import transformers

        super().__init__()
        self.config = config
        whole: Any = transformers.Step3p7Config(vision_config=VISION)
        whole.text_config = config
        self.whole = transformers.Step3p7ForConditionalGeneration._from_config(whole, attn_implementation="eager")

    def forward(self, ids: Tensor) -> Any:
        return self.whole(input_ids=ids, attention_mask=torch.ones_like(ids))

    @property
    def model(self) -> Any:
        return self.whole.model.language_model

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    @property
    def lm_head(self) -> Any:
        return self.whole.lm_head
