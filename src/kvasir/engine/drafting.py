"""Loads the drafter with weights that the options name, if there is one, beside a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.engine.progress import Progress
from kvasir.models.tables import TABLES
from kvasir.runner.load import LoadedModel, LoadOptions
from kvasir.runner.load_draft import load_draft, with_own_draft
from kvasir.runner.load_head import is_head, tables_of, with_head
from kvasir.speculation import HEADS, Drafters
from kvasir.text.shared_tokens import shared_ids
from kvasir.weights.find import find_model


def lent_tables(drafters: Drafters) -> tuple[str, ...]:
    """The tables of a model (`models.tables`) that its drafter uses. Raises KvasirError for unusable files."""
    if not drafters.weights or drafters.weights == "mtp":
        return TABLES if drafters.weights else ()
    files = find_model(drafters.source)
    return tables_of(files) if drafters.weights in HEADS or is_head(files) else ()


def with_drafter(
    loaded: LoadedModel,
    drafters: Drafters,
    options: EngineOptions,
    device: str,
    threads: int,
    progress: Progress | None,
) -> LoadedModel:
    """The model with its drafter, which is loaded with the options of drafters, or else as the model. Raises
    KvasirError if its files, its vocabulary or the model's executor do not allow it."""
    if not drafters.weights:
        return loaded
    if drafters.weights == "mtp":
        return with_own_draft(loaded)
    files = find_model(drafters.source)
    dtype = options.draft_dtype or options.dtype
    quantize = options.draft_quantize or options.quantize or ""
    how = LoadOptions(
        loaded.executor, options.block_size, options.kv_dtype, "" if quantize == "none" else quantize, threads
    )
    if drafters.weights in HEADS or is_head(files):  # an assistant of Gemma 4 is called a draft model, too
        return with_head(loaded, files, dtype, device, progress, how)
    shared, unknown = _vocabulary(loaded, drafters, options)
    return load_draft(loaded, files, dtype, device, progress, how, shared, unknown)


def _vocabulary(loaded: LoadedModel, drafters: Drafters, options: EngineOptions) -> tuple[np.ndarray | None, int]:
    """`shared` and `unknown` of load_draft. Models without tokenizers have the same ids."""
    own, _ = load_text(options)
    other, _ = load_text(replace(options, model=drafters.source, revision=None, tokenizer=None, chat_template=None))
    try:
        if own is None or other is None:
            return None, 0
        ids = shared_ids(own, other, loaded.model.config.vocab_size)
        ends = (other.unk_id, *other.eos_ids)
        return None if ids is None else np.array(ids, np.int32), next((i for i in ends if i is not None), 0)
    finally:
        for tokenizer in (own, other):
            if tokenizer is not None:
                tokenizer.close()
