"""The share of each kernel of a step: all launches of one kernel, recorded and replayed by themselves."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

from benchmarks.gpu.engine import Engine, Piece
from kvasir.ops.launch import Launch, launch
from kvasir.runner.graph_replays import bucket_of


def kernels(engine: Engine, pieces: list[Piece]) -> dict[str, Any]:
    """Times by kernel; `sum_of_step` is their sum relative to the whole step's time. A step of more sequences than its
    logits are computed at a time for counts its first ones."""
    pieces = pieces[: min(engine.chosen, engine.rows)]
    compute, sample, _ = engine.step(pieces)

    def both() -> None:
        compute()
        sample()

    step = engine.place.seconds(both)
    count = sum(piece[2] for piece in pieces)
    found: dict[str, list[Launch]] = defaultdict(list)
    width = bucket_of(len(pieces), engine.chosen)
    for one in engine.launches(bucket_of(count, engine.executor.replays.max_tokens), width, 0):
        found[one.name.strip("_").removesuffix("_kernel")].append(one)
    record, times = engine.place.record(), {}
    for name, launches in found.items():
        times[name] = engine.place.seconds(record(partial(_again, launches)))["median"]
    total = sum(times.values())
    rows = {
        name: {
            "launches": len(found[name]),
            "ms": ms,
            "share": ms / total,
            "bytes": (moved := sum(one.bytes for one in found[name])),
            "bytes_per_s": 1e3 * moved / ms,
        }
        for name, ms in sorted(times.items(), key=lambda item: -item[1])
    }
    return {"step_ms": step, "kernels": rows, "sum_of_step": total / step["median"]}


def _again(launches: list[Launch]) -> None:
    for one in launches:
        launch(one.kernel, one.grid, *one.args, bytes=one.bytes, **one.constants, **one.options)
