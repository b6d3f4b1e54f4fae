"""Kvasir: an LLM inference engine. Public names resolve lazily, so `import kvasir` stays cheap."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvasir.config import EngineOptions
    from kvasir.engine.async_llm import AsyncLLM
    from kvasir.engine.llm import LLM
    from kvasir.engine.lora_requests import LoRARequest
    from kvasir.engine.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoreOutput
    from kvasir.errors import KvasirError
    from kvasir.types import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationOutput",
    "EmbeddingOutput",
    "EngineOptions",
    "KvasirError",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
]

_HOMES = {
    "LLM": "kvasir.engine.llm",
    "AsyncLLM": "kvasir.engine.async_llm",
    "LoRARequest": "kvasir.engine.lora_requests",
    "ClassificationOutput": "kvasir.engine.outputs",
    "EmbeddingOutput": "kvasir.engine.outputs",
    "ScoreOutput": "kvasir.engine.outputs",
    "RequestOutput": "kvasir.engine.outputs",
    "EngineOptions": "kvasir.config",
    "KvasirError": "kvasir.errors",
    "SamplingParams": "kvasir.types",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'kvasir' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
