"""Folders of tiny random models with tokenizers, as published encoders and rerankers have them."""

from __future__ import annotations

import json
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tests.engine.cores import random_model

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = "the cat sat on mat dog ran far away what is capital of france paris berlin rome a and in to water river city"
# As Qwen3's rerankers have it, in fewer words.
RERANKER = (
    '{%- set told = messages | selectattr("role", "eq", "system") | map(attribute="content") | first'
    ' | default("find what answers") -%}'
    '[CLS] {{ told }} [SEP] {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
    ' [SEP] {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }} [MASK]'
)


def wordpiece() -> tokenizers.Tokenizer:
    """A tokenizer of 300 pieces, which joins pairs as BERT's does."""
    pieces = [*SPECIAL, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase), *".,!?[]0123456789"]
    pieces += [word for word in dict.fromkeys(_WORDS.split()) if word not in pieces]
    pieces += [f"word{i}" for i in range(300 - len(pieces))]
    made = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(SPECIAL)
    return made


def add_tokenizer(folder: Path, **config: object) -> None:
    """Writes the tokenizer's files."""
    wordpiece().save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    about = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 256, **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def with_tokenizer(kind: str, folder: Path, template: str = "", prompts: dict | None = None) -> str:
    """A random model of a kind of `cores`, with a tokenizer, and perhaps a chat template and prompts."""
    random_model(kind, folder)
    add_tokenizer(folder, **({"chat_template": template} if template else {}))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return str(folder)
