"""Makes the program of a loaded model, or of this process's stage of it."""

from __future__ import annotations

from typing import Any

from kvasir.layers.kv_layout import KVLayout
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program
from kvasir.program.staged import StagedProgram
from kvasir.runner.load import LoadedModel, stage_of


def program_of(loaded: LoadedModel, cache: NativeCache, **sizes: Any) -> Program | StagedProgram:
    """cache: of the model, as `held_layout` lays it out. sizes: as of a Program."""
    assert loaded.trace is not None
    stage = stage_of(loaded.trace, loaded)
    return Program(loaded.trace, cache, **sizes) if stage is None else StagedProgram(stage, cache, **sizes)


def held_layout(loaded: LoadedModel) -> KVLayout:
    """The caches of the model and its draft model, with memory for those layers that this process computes."""
    assert loaded.trace is not None
    layout, stage = loaded.layout, stage_of(loaded.trace, loaded)
    if stage is None:
        return layout
    own = len(KVLayout.of(loaded.model.cache_spec()).kinds)
    return layout.holding({*stage.held, *range(own, len(layout.kinds))})
