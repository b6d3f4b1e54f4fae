"""Makes a runner of the graph executor; imports torch and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvasir import device as devices
from kvasir.config import EngineConfig
from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.tensors import torch_dtype
from kvasir.models.drafting import TARGET
from kvasir.ops.launch import recorded
from kvasir.plan import Capacity
from kvasir.runner import graph_selftest
from kvasir.runner.adapters import ModelAdapters
from kvasir.runner.blocks import Copies
from kvasir.runner.graph_blocks import graph_draft, graph_proposer
from kvasir.runner.graph_draft import DraftForwards, GraphDraft
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_memory import most_chosen
from kvasir.runner.graph_replays import Record
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_eager import copies_of
from kvasir.runner.rows import Rows
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo


def make_graph_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: str,
    share: Callable[[Callable[[], GraphExecutor]], GraphExecutor] | None = None,
) -> Runner:  # fmt: skip
    """See `make.make_runner`."""
    assert loaded.trace is not None
    devices.set_threads(1 if device == "cpu" else config.threads)
    cache = KVCache(
        loaded.layout, config.num_blocks, config.block_size, torch_dtype(config.kv_dtype), torch.device(device)
    )  # fmt: skip
    grade = ""

    def make() -> GraphExecutor:
        nonlocal grade
        options = {"overlaps": config.overlap, "copies": copies_of(config, cache), "adapters": config.expects_adapters}
        executor = make_executor(loaded, cache, capacity, **options)
        grade = _prepared(executor)
        return executor

    executor = share(make) if share else make()
    proposer = None
    if loaded.draft:
        draft = make_draft(loaded, cache, capacity, executor)
        if device == "cuda":
            draft.record_all()
        proposer = graph_proposer(
            draft, cache.groups, cache.block_size, capacity.vocab_size, config.draft_max_model_len
        )
    adapters = ModelAdapters(loaded.model, loaded.config, executor, config.max_lora_rank)
    return Runner(executor, capacity, replace(info, grade=grade), proposer, adapters)


def make_following(
    loaded: LoadedModel, capacity: Capacity, kv_dtype: str, device: str, *, adapters: bool = False
) -> GraphExecutor:
    """The executor of a rank that follows rank 0, with rows of its own. capacity: with the model's own cache groups.
    adapters: with room for them."""
    devices.set_threads(1)
    cache = KVCache(
        loaded.layout, capacity.num_blocks, capacity.block_size, torch_dtype(kv_dtype), torch.device(device)
    )  # fmt: skip
    executor = make_executor(loaded, cache, capacity, adapters=adapters)
    _prepared(executor)
    executor.bind(Rows(capacity, executor.computes | {"propose"}))
    return executor


def _prepared(executor: GraphExecutor) -> str:
    """Records the launches, on a GPU, and returns the grade of the self-test. Ranks do this together."""
    if executor.device.type == "cuda":
        executor.replays.record_all()
    return graph_selftest.run(executor)


def make_executor(
    loaded: LoadedModel,
    cache: KVCache,
    capacity: Capacity,
    *,
    overlaps: bool = False,
    copies: Copies | None = None,
    adapters: bool = False,
) -> GraphExecutor:
    """The executor of a loaded model over a cache, without its draft model. adapters: with room for them. Launches are
    recorded when they are first made, or all at once by its `replays`."""
    assert loaded.trace is not None
    longest, size, rows = capacity.max_model_len, capacity.block_size, capacity.max_rows
    chosen = most_chosen(rows, capacity.max_drafted)
    blocks = 1 + max(group.kind.blocks(longest, size) for group in capacity.groups)
    step = StepBuffers.empty(
        rows=rows,
        ids=longest + 1,
        blocks=[blocks] * len(capacity.groups),
        pieces=1 << (rows - 1).bit_length(),
        tokens=capacity.max_tokens_per_step,
        chosen=chosen,
        device=cache.device,
    )
    forward = Forward(
        loaded.trace, fold(loaded.trace), cache.of(TARGET), step,
        max_tokens=capacity.max_tokens_per_step, max_chosen=chosen, positions=longest + 1, dtype=loaded.dtype,
    )  # fmt: skip
    if adapters:
        forward.add_adapters()
    return GraphExecutor(
        loaded.model, forward, max_tokens=capacity.max_tokens_per_step, max_chosen=chosen,
        record=_recorder(cache.device), overlaps=overlaps, copies=copies,
    )  # fmt: skip


def make_draft(loaded: LoadedModel, cache: KVCache, capacity: Capacity, executor: GraphExecutor) -> GraphDraft:
    """The draft model of a loaded model, over the cache of both. Launches are recorded as those of the executor."""
    assert loaded.draft is not None and loaded.trace is not None
    forwards = DraftForwards(
        loaded.draft, loaded.trace, executor.forward, cache,
        max_tokens=capacity.max_tokens_per_step, max_rows=capacity.max_rows, positions=capacity.max_model_len + 1,
    )  # fmt: skip
    return graph_draft(loaded.draft, forwards, executor, _recorder(cache.device))


def _recorder(device: torch.device) -> Record:
    if device.type == "cpu":
        return recorded
    from kvasir.device.replays import Recorder

    return Recorder().record
