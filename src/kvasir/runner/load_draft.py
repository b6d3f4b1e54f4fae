"""Gives a loaded model another one that drafts for it: its own layers for multi-token prediction, a head with a
checkpoint of its own, or a smaller model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvasir.errors import ConfigError
from kvasir.models.draft_model import SmallerModel
from kvasir.models.drafting import DraftModel, drafts_blocks, joint_layout
from kvasir.models.mtp import MultiTokenDraft
from kvasir.ops.graph import CannotTrace
from kvasir.program.cache import no_kernel
from kvasir.program.lower import lower
from kvasir.program.marshal import prepared
from kvasir.program.trace import Trace, trace, trace_correct
from kvasir.runner.load import (
    OTHER,
    LoadedModel,
    LoadOptions,
    exports_of,
    load_model,
    no_triton_kernel,
    parts_of,
)
from kvasir.runner.program_draft import draft_traces
from kvasir.types import Task
from kvasir.weights.load import Progress
from kvasir.weights.local import ModelFiles

WITHOUT = "use --executor eager, or another drafter"


def with_own_draft(loaded: LoadedModel) -> LoadedModel:
    """The model with its own layers for multi-token prediction, which were loaded with it (`LoadOptions.mtp`), as its
    draft model. Raises ConfigError as `load_draft`."""
    assert loaded.mtp is not None, "the layers for multi-token prediction are not loaded"
    return attach(loaded, MultiTokenDraft(loaded.lender or loaded.model, loaded.mtp))


def load_draft(
    loaded: LoadedModel,
    files: ModelFiles,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    options: LoadOptions | None = None,
    shared: np.ndarray | None = None,
    unknown: int = 0,
) -> LoadedModel:
    """The model with the ordinary decoder in `files` as its draft model.

    dtype, device, options: of the draft model; it runs on the model's executor. Of ranks that share the model, each
    guesses: with a draft model of its own, unless these options have the mesh, too. shared: int32 [vocabulary of the
    model], the draft model's id of the same token, -1 where it has none; None if they have the same tokenizer. unknown:
    its id for the others. Raises ConfigError if the executor cannot draft, if the model is not one that drafts, or if
    it does not fit; what `load_model` raises.
    """
    options = replace(options or LoadOptions(), executor=loaded.executor, hidden=(), mtp=False)
    try:
        more = load_model(files, dtype, device, progress, options)
    except ConfigError as error:
        raise ConfigError(f"draft model: {error.message}", WITHOUT if error.hint == OTHER else error.hint) from error
    if Task.GENERATE not in more.model.tasks:
        raise ConfigError(f"{more.architecture} generates no text", "choose a draft model that does")
    draft = SmallerModel(more.model, loaded.model.config.vocab_size, shared, unknown)
    return attach(loaded, draft, more)


def attach(loaded: LoadedModel, draft: DraftModel, more: Any = None) -> LoadedModel:
    """The model with a draft model, which may read outputs of its trace. more: what was loaded for it
    (bytes, formats, notes, held, mapped as in LoadedModel). Raises ConfigError if the executor cannot
    draft, or not with this, and for a model that generates no text."""
    if Task.GENERATE not in loaded.model.tasks:
        raise ConfigError(f"{loaded.architecture} generates no text that could be drafted", "use --speculate off")
    if loaded.executor == "eager":
        return _joined(replace(loaded, draft=draft), more)
    layout, graph = joint_layout(loaded.model, draft), loaded.executor == "graph"
    exports = dict.fromkeys((*exports_of(loaded.model, loaded.hidden), *draft.taps))
    try:
        if reason := (no_triton_kernel if graph else no_kernel)(layout):
            raise CannotTrace(reason)
        traced = trace(loaded.model, tuple(exports))
        layers, joining = draft_traces(draft, traced)
        correcting = trace_correct(draft) if drafts_blocks(draft) else None
        for one in (*parts_of(traced, loaded), *layers, joining, correcting):
            if one is not None:
                (_check_calls if graph else _check_program)(one)
    except CannotTrace as error:
        raise ConfigError(f"the {loaded.executor} executor cannot draft with this: {error}", WITHOUT) from error
    return _joined(replace(loaded, trace=traced, draft=draft), more)


def _check_program(traced: Trace) -> None:
    """Raises CannotTrace for an op without a native kernel."""
    lower(traced, 1, 1, prepared)


def _check_calls(traced: Trace) -> None:
    """Raises CannotTrace for an op without a Triton kernel."""
    from kvasir.graph.adapter_places import Places
    from kvasir.graph.fold import fold

    Places.of(traced, fold(traced))


def _joined(loaded: LoadedModel, more: Any) -> LoadedModel:
    """The model with the bytes and notes of its draft model."""
    if more is None:
        return loaded
    return replace(
        loaded,
        bytes=loaded.bytes + more.bytes,
        formats=_sum(loaded.formats, more.formats),
        notes=(*loaded.notes, *(f"draft model: {note}" for note in more.notes)),
        held=loaded.held + more.held,
        mapped=loaded.mapped + more.mapped,
    )


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in (*first, *second)}
