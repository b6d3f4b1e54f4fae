"""Features of what computes: executors, formats of weights and of the cache, models."""

from __future__ import annotations

from collections.abc import Callable

from tests.composition import models
from tests.composition.drafter import ErraticSpeculator
from tests.composition.feature import Feature, Values, drafted


def executor(name: str) -> Feature:
    return Feature(f"{name} executor", "executor", "steps", lambda run: run.steps * (run.core.info.executor == name),
                   {"executor": name}, base=True)  # fmt: skip


def weights(name: str, *formats: str, **options: str) -> Feature:
    """formats: of which the engine says that it computes with one. A table becomes Q8_0 where the rest becomes Q4_0."""
    return Feature(name, "weights", f"{' or '.join(formats)} as the engine computes with",
                   lambda run: any(map(run.says, formats)), options, base=True)  # fmt: skip


def kv(dtype: str) -> Feature:
    return Feature(f"KV {dtype}", "KV", "steps on a cache of that type",
                   lambda run: run.says(f", {dtype}, ") * run.steps, {"kv_dtype": dtype}, base=True)  # fmt: skip


def model(name: str, *besides: str) -> Feature:
    return Feature(name, "model", "steps of that architecture",
                   lambda run: run.steps * (models.architecture(name) in ("", run.core.info.architecture)),
                   lambda _: models.options(name), base=True, besides=besides)  # fmt: skip


def drafts(name: str, drafter: Callable[[Values], str]) -> Feature:
    """drafter: as `speculate` names it."""
    return Feature(f"drafts: {name}", "drafts", "drafted ids, ids forced instead, or answers too short for any",
                   lambda run: drafted(run) or run.total("forced_tokens"),
                   lambda options: {"speculate": f"suffix,{drafter(options)}"}, drafter=ErraticSpeculator)  # fmt: skip


COMPUTING = [
    executor("program"),
    executor("eager"),
    weights("bfloat16", "bfloat16", dtype="bfloat16"),
    weights("float32", "float32", dtype="float32"),
    weights("q8", "Q8_0", quantize="q8"),
    weights("q4", "Q4_0", "Q8_0", quantize="q4"),
    kv("bfloat16"), kv("float16"), kv("float32"), kv("int8"),
    model("kvasir-mini"),
    model("kvasir-mini Q4_K_M"),
    *map(model, models.GENERATING),
    # Between steps none of its texts is under way, unless steps overlap.
    model("bert", "overlap", "neighbours"),
    # The model drafts for itself: any other would hardly be right.
    drafts("a model", lambda options: f"draft={options['model']}"),
    # Their weights are random, so they are hardly ever right.
    drafts("DFlash", lambda options: f"dflash={models.block_drafter(options['model'], 'qwen3')}"),
    drafts("DSpark", lambda options: f"dflash={models.block_drafter(options['model'], 'dspark rnn')}"),
    Feature("streamed weights", "weights memory", "bytes of layers read from disk",
            lambda run: sum(core.stats().weights_read_bytes for core in run.cores), models.streamed),
]  # fmt: skip
