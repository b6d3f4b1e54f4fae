"""Which published chat template stands for each family; see FORMATS in tests/parse/test_table.py."""

from __future__ import annotations

from kvasir.models.registry import MODELS

TEMPLATES = {
    "deepseek_v3": "deepseek-ai-DeepSeek-V3.1",
    "gemma2": "google-gemma-2-2b-it",
    "gemma4": "google-gemma-4-31B-it",
    "gemma4_text": "google-gemma-4-31B-it",
    "glm4_moe": "GLM-4.6",
    "gpt_oss": "openai-gpt-oss-120b",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "kimi_k2": "Kimi-K2-Instruct",
    "lfm2": "LFM2-8B-A1B",
    "lfm2_moe": "LFM2-8B-A1B",
    "llama": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral3": "Mistral-Small-3.2-24B-Instruct-2506",
    "phi3": "microsoft-Phi-3.5-mini-instruct",
    "qwen2": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3_5": "Qwen3.5-4B",
    "qwen3_5_moe": "Qwen3.5-4B",
    "qwen3_5_moe_text": "Qwen3.5-4B",
    "qwen3_5_text": "Qwen3.5-4B",
    "qwen3_moe": "Qwen3-Coder",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
}
# Families without a class for causal language models, and those whose published models only continue texts.
_CHATS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
NO_CHAT = {name for name, (_, _, classes) in MODELS.items() if not any(c.endswith(_CHATS) for c in classes)}
NO_CHAT |= {"gpt2", "gpt_neox", "starcoder2"}
