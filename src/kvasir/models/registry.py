"""Maps the name of an architecture to our class for it. The table lists every supported model.

A model folder is data: `auto_map` and the code in the folder are never loaded. For a known model type, our code runs
instead; an unknown one raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted

# model_type -> module of this package, its class, and the `architectures` that the class implements.
MODELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "afmoe": ("afmoe", "Afmoe", ("AfmoeForCausalLM",)),
    "apertus": ("apertus", "Apertus", ("ApertusForCausalLM",)),
    "albert": (
        "albert",
        "Albert",
        (
            "AlbertModel",
            "AlbertForMaskedLM",
            "AlbertForPreTraining",
            "AlbertForSequenceClassification",
            "AlbertForTokenClassification",
        ),
    ),
    "arcee": ("arcee", "Arcee", ("ArceeForCausalLM",)),
    "bamba": ("bamba", "Bamba", ("BambaForCausalLM",)),
    "bert": (
        "bert",
        "Bert",
        (
            "BertModel",
            "BertForMaskedLM",
            "BertForPreTraining",
            "BertForSequenceClassification",
            "BertForTokenClassification",
        ),
    ),
    "bitnet": ("bitnet", "BitNet", ("BitNetForCausalLM", "BitnetForCausalLM")),
    "camembert": (
        "roberta",
        "Roberta",
        (
            "CamembertModel",
            "CamembertForMaskedLM",
            "CamembertForSequenceClassification",
            "CamembertForTokenClassification",
        ),
    ),
    "cohere": ("cohere", "Cohere", ("CohereForCausalLM",)),
    "cohere2": ("cohere2", "Cohere2", ("Cohere2ForCausalLM",)),
    "cwm": ("llamas", "Cwm", ("CwmForCausalLM",)),
    "dbrx": ("dbrx", "Dbrx", ("DbrxForCausalLM",)),
    "deberta-v2": (
        "deberta_v2",
        "DebertaV2",
        (
            "DebertaV2Model",
            "DebertaV2ForMaskedLM",
            "DebertaV2ForSequenceClassification",
            "DebertaV2ForTokenClassification",
        ),
    ),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", ("DeepseekV2ForCausalLM",)),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32", ("DeepseekV32ForCausalLM",)),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", ("DeepseekV3ForCausalLM",)),
    "cohere2_moe": ("cohere2_moe", "Cohere2Moe", ("Cohere2MoeForCausalLM",)),
    "distilbert": (
        "distilbert",
        "DistilBert",
        (
            "DistilBertModel",
            "DistilBertForMaskedLM",
            "DistilBertForSequenceClassification",
            "DistilBertForTokenClassification",
        ),
    ),
    "electra": (
        "electra",
        "Electra",
        ("ElectraModel", "ElectraForPreTraining", "ElectraForSequenceClassification", "ElectraForTokenClassification"),
    ),
    "ernie4_5": ("ernie4_5", "Ernie45", ("Ernie4_5ForCausalLM",)),
    "dots1": ("glm4_moe", "Dots1", ("Dots1ForCausalLM",)),
    "ernie4_5_moe": ("ernie4_5", "Ernie45Moe", ("Ernie4_5_MoeForCausalLM",)),
    "eurobert": ("eurobert", "EuroBert", ("EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification")),
    "exaone_moe": ("exaone_moe", "ExaoneMoe", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")),
    "exaone4": ("exaone4", "Exaone4", ("Exaone4ForCausalLM",)),
    "falcon": ("falcon", "Falcon", ("FalconForCausalLM",)),
    "gemma": ("gemma", "Gemma", ("GemmaForCausalLM", "GemmaModel", "GemmaForSequenceClassification")),
    "falcon_h1": ("falcon_h1", "FalconH1", ("FalconH1ForCausalLM",)),
    "falcon_mamba": ("mamba", "MambaModel", ("FalconMambaForCausalLM",)),
    "flex_olmo": ("flex_olmo", "FlexOlmo", ("FlexOlmoForCausalLM",)),
    "gemma2": ("gemma2", "Gemma2", ("Gemma2ForCausalLM", "Gemma2Model", "Gemma2ForSequenceClassification")),
    "gemma3": ("gemma3", "Gemma3", ("Gemma3ForConditionalGeneration",)),
    "gemma3_text": (
        "gemma3_text",
        "Gemma3Text",
        ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"),
    ),
    "gemma3n": ("gemma3n", "Gemma3n", ("Gemma3nForConditionalGeneration",)),
    "gemma3n_text": ("gemma3n_text", "Gemma3nText", ("Gemma3nForCausalLM",)),
    "gemma4": ("gemma4", "Gemma4", ("Gemma4ForConditionalGeneration",)),
    "gemma4_text": ("gemma4_text", "Gemma4Text", ("Gemma4ForCausalLM",)),
    "gemma4_unified": ("gemma4", "Gemma4", ("Gemma4UnifiedForConditionalGeneration",)),
    "gemma4_unified_text": ("gemma4_text", "Gemma4Text", ("Gemma4UnifiedForCausalLM",)),
    "glm": ("glm4", "Glm", ("GlmForCausalLM",)),
    "glm_moe_dsa": ("deepseek_v32", "DeepseekV32", ("GlmMoeDsaForCausalLM",)),
    "glm4": ("glm4", "Glm4", ("Glm4ForCausalLM",)),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", ("Glm4MoeLiteForCausalLM",)),
    "glm4_moe": ("glm4_moe", "Glm4Moe", ("Glm4MoeForCausalLM",)),
    "gpt2": ("gpt2", "GPT2", ("GPT2LMHeadModel",)),
    "gpt_bigcode": ("gpt_bigcode", "GPTBigCode", ("GPTBigCodeForCausalLM",)),
    "gpt_neox": ("gpt_neox", "GPTNeoX", ("GPTNeoXForCausalLM",)),
    "gpt_oss": ("gpt_oss", "GptOss", ("GptOssForCausalLM",)),
    "granite": ("granite", "Granite", ("GraniteForCausalLM",)),
    "granitemoe": ("granite", "GraniteMoe", ("GraniteMoeForCausalLM",)),
    "granitemoehybrid": ("granite_hybrid", "GraniteHybrid", ("GraniteMoeHybridForCausalLM",)),
    "granitemoeshared": ("granite", "GraniteMoe", ("GraniteMoeSharedForCausalLM",)),
    "gte": ("rope_encoder", "Gte", ("GteModel", "GteForMaskedLM", "GteForSequenceClassification")),
    "helium": ("helium", "Helium", ("HeliumForCausalLM",)),
    "hy_v3": ("hy_v3", "HyV3", ("HYV3ForCausalLM",)),
    "hunyuan_v1_dense": ("hunyuan", "HunyuanDense", ("HunYuanDenseV1ForCausalLM",)),
    "hunyuan_v1_moe": ("hunyuan", "HunyuanMoe", ("HunYuanMoEV1ForCausalLM",)),
    "hyperclovax": ("hyperclovax", "HyperClovaX", ("HyperCLOVAXForCausalLM",)),
    "iquestcoder": ("llamas", "IQuestCoder", ("IQuestCoderForCausalLM",)),
    "jais2": ("llamas", "Jais2", ("Jais2ForCausalLM",)),
    "jina_bert": (
        "jina_bert",
        "JinaBert",
        ("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"),
    ),
    "jamba": ("jamba", "Jamba", ("JambaForCausalLM",)),
    "jina_embeddings_v3": (
        "rope_encoder",
        "JinaV3",
        ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3ForSequenceClassification"),
    ),
    "kimi_k2": ("deepseek_v3", "DeepseekV3", ("DeepseekV3ForCausalLM",)),
    "kimi_linear": ("kimi_linear", "KimiLinear", ("KimiLinearForCausalLM",)),
    "lfm2": ("lfm2", "Lfm2", ("Lfm2ForCausalLM",)),
    "lfm2_moe": ("lfm2", "Lfm2Moe", ("Lfm2MoeForCausalLM",)),
    "lfm3": ("lfm3", "Lfm3", ("Lfm3ForCausalLM",)),
    "internlm3": ("internlm3", "InternLM3", ("InternLM3ForCausalLM",)),
    "llama": ("llama", "Llama", ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification")),
    "mimo": ("mimo", "MiMo", ("MiMoForCausalLM",)),
    "mimo_v2_flash": ("mimo_v2_flash", "MiMoV2Flash", ("MiMoV2FlashForCausalLM",)),
    "minicpm3": ("minicpm3", "MiniCPM3", ("MiniCPM3ForCausalLM",)),
    "llama_bidirec": (
        "llama_bidirec",
        "LlamaBidirec",
        ("LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification"),
    ),
    "mamba": ("mamba", "MambaModel", ("MambaForCausalLM",)),
    "mamba2": ("mamba", "Mamba2Model", ("Mamba2ForCausalLM",)),
    "llama4": ("llama4", "Llama4", ("Llama4ForConditionalGeneration",)),
    "llama4_text": ("llama4", "Llama4Text", ("Llama4ForCausalLM",)),
    "mellum": ("mellum", "Mellum", ("MellumForCausalLM",)),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", ("MiniMaxM2ForCausalLM",)),
    "ministral": ("mistral", "Ministral", ("MinistralForCausalLM",)),
    "ministral3": ("mistral", "Ministral3", ("Ministral3ForCausalLM",)),
    "mistral3": ("mistral", "Mistral3", ("Mistral3ForConditionalGeneration",)),
    "mistral": ("mistral", "Mistral", ("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification")),
    "mistral4": ("mistral4", "Mistral4", ("Mistral4ForCausalLM",)),
    "mixtral": ("mixtral", "Mixtral", ("MixtralForCausalLM",)),
    "modernbert": (
        "modernbert",
        "ModernBert",
        ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    ),
    "mpnet": (
        "mpnet",
        "MPNet",
        ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification", "MPNetForTokenClassification"),
    ),
    "nemotron": ("nemotron", "Nemotron", ("NemotronForCausalLM",)),
    "nemotron_h": ("nemotron_h", "NemotronH", ("NemotronHForCausalLM",)),
    "new": ("rope_encoder", "New", ("NewModel", "NewForMaskedLM", "NewForSequenceClassification")),
    "nomic_bert": (
        "rope_encoder",
        "NomicBert",
        ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    ),
    "olmo": ("olmo", "Olmo", ("OlmoForCausalLM",)),
    "olmo2": ("olmo2", "Olmo2", ("Olmo2ForCausalLM",)),
    "olmo3": ("olmo2", "Olmo3", ("Olmo3ForCausalLM",)),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybrid", ("OlmoHybridForCausalLM",)),
    "olmoe": ("olmoe", "Olmoe", ("OlmoeForCausalLM",)),
    "phi": ("phi", "Phi", ("PhiForCausalLM",)),
    "phi3": ("phi3", "Phi3", ("Phi3ForCausalLM",)),
    "phimoe": ("phimoe", "Phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM")),
    "qwen2": ("qwen2", "Qwen2", ("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification")),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", ("Qwen2MoeForCausalLM",)),
    "qwen3": ("qwen3", "Qwen3", ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification")),
    "qwen3_5": ("qwen3_5", "Qwen35", ("Qwen3_5ForConditionalGeneration",)),
    "qwen3_5_moe": ("qwen3_5", "Qwen35Moe", ("Qwen3_5MoeForConditionalGeneration",)),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen35MoeText", ("Qwen3_5MoeForCausalLM",)),
    "qwen3_5_text": ("qwen3_5", "Qwen35Text", ("Qwen3_5ForCausalLM",)),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", ("Qwen3MoeForCausalLM",)),
    "qwen3_next": ("qwen3_next", "Qwen3Next", ("Qwen3NextForCausalLM",)),
    "roberta": (
        "roberta",
        "Roberta",
        ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaForTokenClassification"),
    ),
    "rwkv7": ("rwkv7", "Rwkv7", ("RWKV7ForCausalLM",)),
    "seed_oss": ("seed_oss", "SeedOss", ("SeedOssForCausalLM",)),
    "smollm3": ("smollm3", "SmolLM3", ("SmolLM3ForCausalLM",)),
    "solar_open": ("solar_open", "SolarOpen", ("SolarOpenForCausalLM",)),
    "stablelm": ("stablelm", "StableLM", ("StableLmForCausalLM",)),
    "starcoder2": ("starcoder2", "Starcoder2", ("Starcoder2ForCausalLM",)),
    "step3p5": ("step3p5", "Step3p5", ("Step3p5ForCausalLM",)),
    "step3p7": ("step3p5", "Step3p7", ("Step3p7ForConditionalGeneration",)),
    "vaultgemma": ("gemma", "VaultGemma", ("VaultGemmaForCausalLM",)),
    "xlm-roberta": (
        "roberta",
        "Roberta",
        (
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "XLMRobertaForTokenClassification",
        ),
    ),
    "youtu": ("youtu", "Youtu", ("YoutuForCausalLM",)),
    "zamba2": ("zamba2", "Zamba2", ("Zamba2ForCausalLM",)),
}
# Architectures whose configs state the model type of another.
_TYPES = {name: "jina_bert" for name in MODELS["jina_bert"][2]}
# Heads, which draft for a model and are none: EAGLE-3 (kvasir.models.eagle3), also as GGUF's architecture, DFlash
# and DSpark (kvasir.models.dflash), and the assistants of Gemma 4 (kvasir.models.gemma4_assistant).
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "eagle3")
ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
DFLASH = ("DFlashDraftModel", "Qwen3DSparkModel", "DFlashSpeculator", "DSparkSpeculator")
HEADS: tuple[str, ...] = (*EAGLE3, *DFLASH, *ASSISTANTS)
HOWTO = "docs/howto/add-a-model.md shows how to add one"


def model_class(name: str) -> type:
    """The class for a `model_type` or for a name in `architectures`. Raises UnsupportedModel if there is none.

    Imports only the module of that class.
    """
    for model_type, (module, attribute, architectures) in MODELS.items():
        if name == model_type or name in architectures:
            return getattr(import_module(f"kvasir.models.{module}"), attribute)
    raise unsupported(name)


def model_class_for(config: Mapping[str, Any]) -> type:
    """The class for a `config.json`. Raises UnsupportedModel if there is none, ModelFileError if the config names no
    model.

    A known model type with an unsupported head (a classifier, a reward model) raises UnsupportedModel too.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ModelFileError(f"config.json: architectures is {architectures!r}", "expected a list of names")
    if heads := [name for name in (*architectures, model_type) if name in HEADS]:
        method = "dflash" if heads[0] in DFLASH else "eagle3"
        raise UnsupportedModel(
            f"{heads[0]} is a head that drafts for another model", f"start its target with --speculate {method}=PATH"
        )
    if model_type is None and not architectures:
        raise ModelFileError("config.json names no model_type and no architectures", "is this a model's folder?")
    if model_type is None:
        return model_class(architectures[0])
    if not isinstance(model_type, str):
        raise ModelFileError(f"config.json: model_type is {quoted(model_type)}", "expected a name")
    model_type = _TYPES.get(architectures[0] if architectures else "", model_type)
    if model_type == "xlm-roberta" and config.get("position_embedding_type") == "rotary":
        return model_class("jina_embeddings_v3")  # as its authors publish it
    text = config.get("text_config")
    if model_type == "mistral3" and isinstance(text, Mapping) and text.get("model_type") == "mistral4":
        return model_class("mistral4")
    if model_type not in MODELS:
        raise unsupported(model_type, architectures, "auto_map" in config)
    ours = MODELS[model_type][2]
    if architectures and not set(ours) & set(architectures):
        raise UnsupportedModel(
            f"no code for the architecture {architectures[0][:100]} of the model type {model_type}",
            f"supported for this type: {', '.join(ours)}; {HOWTO}",
        )
    return model_class(model_type)


def unsupported(
    name: str, architectures: list[str] | None = None, own_code: bool = False, known: Iterable[str] = ()
) -> UnsupportedModel:
    """The error for an unknown architecture: it names the nearest supported ones, of `known` (by default model types
    and classes), and how to add one."""
    known = list(known) or [*MODELS, *(a for entry in MODELS.values() for a in entry[2])]
    near = get_close_matches(name, known, n=3, cutoff=0.4) or get_close_matches(name, known, n=3, cutoff=0.0)
    hints = [
        f"nearest supported: {', '.join(near)}",
        "code that comes with a model (auto_map) is never run" if own_code else "",
        HOWTO,
    ]
    classes = f" ({architectures[0][:100]})" if architectures else ""
    return UnsupportedModel(
        f"no code for the architecture {name[:100]}{classes}", "; ".join(hint for hint in hints if hint)
    )
