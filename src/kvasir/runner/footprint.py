"""The memory that a loaded model needs besides its KV cache. A program's buffers are laid out and counted; torch's
memory for a step of the eager executor is bounded from the shapes of the layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvasir.layers.linear import Head, Linear
from kvasir.layers.moe import MoE
from kvasir.layers.rope import Angles
from kvasir.memory import Footprint
from kvasir.models.drafting import TARGET
from kvasir.ops.attention.sizes import BUDGET
from kvasir.program.cache import NativeCache
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_program import held_layout, program_of
from kvasir.runner.program_draft import program_draft
from kvasir.runner.proposals import LAG
from kvasir.speculation import MAX_DRAFTED

Progress = Callable[[int, int], None]

_FLOAT = 4
_SAMPLING = 6  # copies of a row of logits that the reference sampler holds at a time: sorted, their indices, masks
_LIVE = 2  # every activation of a layer, and the temporaries it is computed with
_SCORES = 4  # float32 copies of what attention computes at a time: keys, values, scores, results


def footprint_of(
    loaded: LoadedModel, *, kind: str, tokens: int, rows: int, threads: int, block_size: int, kv_dtype: str,
    progress: Progress | None = None, adapters: bool = False,
) -> Footprint:  # fmt: skip
    """The footprint in bytes. kind: of the device. tokens: most tokens of a step. rows: most running sequences.
    progress: of compiling kernels, which the graph executor does on a GPU to measure what they take. adapters: whether
    the graph executor makes room for them."""
    model = loaded.model
    groups = len(loaded.layout.groups)
    ids = 1 + (loaded.draft is not None)  # perhaps also in the draft model's vocabulary
    per_row = _FLOAT * (ids + -(-groups // block_size))  # a row's ids and its block tables
    gathered = 0
    if loaded.executor == "graph":
        from kvasir.runner.graph_memory import graph_memory
        from kvasir.runner.graph_trial import recorded_bytes

        sizes: Any = {"tokens": tokens, "rows": rows, "block_size": block_size, "kv_dtype": kv_dtype}
        sizes["adapters"] = adapters
        buffers, samplers = graph_memory(loaded, **sizes)
        if kind == "cuda":
            buffers += recorded_bytes(loaded, kind=kind, progress=progress, **sizes)
    else:
        has_program = loaded.executor == "program"
        sampled = MAX_CHOSEN if has_program else max(rows, MAX_CHOSEN) * (_SAMPLING if kind == "cuda" else 1)
        drawn = 2 * MAX_CHOSEN if loaded.draft else 0  # of draft logits: a copy, and one over the target's ids
        samplers = (_SAMPLING * MAX_CHOSEN + sampled + drawn) * _FLOAT * model.config.vocab_size
        if has_program:
            buffers = _program(loaded, tokens, rows, threads, block_size, kv_dtype)
            gathered = _FLOAT * threads  # DRY's numbers
        else:
            parts = loaded.draft.parts() if loaded.draft else ()
            rows_bytes = sum(_row_bytes(part, model.config.width) for part in (model, *parts))
            buffers = tokens * rows_bytes + _SCORES * _FLOAT * BUDGET
            gathered = max(_SCORES * _FLOAT * kind.width for kind in loaded.layout.kinds)
    return Footprint(
        weights=loaded.held,
        mapped=loaded.mapped,
        buffers=buffers,
        samplers=samplers,
        angles=sum(Angles.num_bytes(rope, 1) for rope in loaded.ropes()),
        rows=rows * per_row + gathered,
    )


def _program(loaded: LoadedModel, tokens: int, rows: int, threads: int, block_size: int, kv_dtype: str) -> int:
    """Bytes of the program's buffers, laid out over a cache of the smallest size."""
    assert loaded.trace is not None
    layout = held_layout(loaded)
    cache = NativeCache(layout, [1] * len(layout.groups), block_size, kv_dtype)
    sizes: dict[str, Any] = {"max_tokens": tokens, "max_rows": rows, "max_positions": 1}
    program = program_of(loaded, cache.of(TARGET), **sizes, threads=threads, max_drafted=MAX_DRAFTED)
    try:
        if loaded.draft is None:
            return program.num_bytes
        draft = program_draft(loaded.draft, program, cache, **sizes)
        waiting = _FLOAT * (LAG + loaded.draft.depth) * rows * draft.taps_width
        return program.num_bytes + draft.num_bytes + waiting
    finally:
        program.close()


def _row_bytes(model: Any, width: int) -> int:
    """An upper bound on the bytes of one token row in the widest layer and in the residual stream, `width` numbers."""
    experts = max((part.routing.top_k for _, part in model.walk() if isinstance(part, MoE)), default=1)
    widths: dict[str, int] = {}
    for path, part in model.walk():
        if isinstance(part, Linear) and not isinstance(part, Head):
            times = experts if ".experts." in path else 1
            widths[re.sub(r"\d+", "*", path)] = times * sum(sum(s) for s in part.expects().values() if len(s) == 2)
    return _LIVE * _FLOAT * (sum(widths.values()) + 4 * width)
