"""The parts of an engine that compute, or that describe what computes; each is made from those before it.

`build` imports this module only once the libraries under torch are configured, since it imports torch where that is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvasir import device as devices
from kvasir import ops
from kvasir.config import DeviceFacts, EngineConfig, EngineOptions, ModelFacts
from kvasir.device import Device
from kvasir.engine.drafting import lent_tables, with_drafter
from kvasir.engine.progress import Progress
from kvasir.engine.rank_messages import RankSizes
from kvasir.engine.ranks import RankProcesses, of_ranks
from kvasir.environment import env
from kvasir.models.config import GenerationDefaults, read_generation_config
from kvasir.models.overrides import read_overrides
from kvasir.ops import Choice, native
from kvasir.parallel import SOLO, Mesh
from kvasir.plan import CacheGroup, Capacity
from kvasir.program.shared import SharedRank
from kvasir.runner import make
from kvasir.runner.allotment import Needs
from kvasir.runner.footprint import footprint_of
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.numerics import numerics_version
from kvasir.runner.runner import Runner
from kvasir.speculation import MAX_DRAFTED, parse
from kvasir.types import ModelInfo, Task
from kvasir.weights.find import find_model
from kvasir.weights.local import ModelFiles

Agree = Callable[[Needs], int] | None


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, its files, and where it computes. threads: number of computing threads. groups: of its cache.
    kernels: the implementation of each op."""

    files: ModelFiles
    loaded: LoadedModel
    device: Device
    threads: int
    kv_dtype: str
    groups: tuple[CacheGroup, ...]
    kernels: tuple[Choice, ...]
    generation: GenerationDefaults
    ranks: RankProcesses | None = None

    def close(self) -> None:
        """Ends the other ranks, and the reads of weights."""
        if self.ranks:
            self.ranks.close()
        if self.loaded.stream:
            self.loaded.stream.close()


def load(options: EngineOptions, progress: Progress | None, on_loss: Callable[[str], None] | None = None) -> Model:
    """Loads the model, with its drafter, for the device of the options. on_loss: see RankProcesses. Raises
    KvasirError."""
    device = devices.detect(options.device)
    if options.tensor_parallel == options.pipeline_parallel == 1:
        return _load(options, progress, device, options.threads or device.threads)
    ranks = RankProcesses(options, device, on_loss)
    try:
        model = _load(options, progress, device, ranks.threads, ranks.model_mesh, ranks.agree)
        return replace(model, ranks=ranks, loaded=ranks.shared(model.loaded))
    except BaseException:
        ranks.close()
        raise


def load_part(options: EngineOptions, threads: int, mesh: Mesh, device: str, agree: Agree) -> LoadedModel:
    """What a rank of another process loads. device: its kind. agree: see LoadOptions."""
    files = find_model(options.model, options.revision)
    _prepare(threads)
    return load_model(files, options.dtype, device, None, _load_options(options, threads, mesh, agree))


def _prepare(threads: int) -> None:
    devices.set_threads(threads)
    if isa := env("KVASIR_ISA"):
        native.force_isa(isa)  # raises if unavailable: an explicit request is never silently ignored


def _load_options(options: EngineOptions, threads: int, mesh: Mesh, agree: Agree) -> LoadOptions:
    overrides = read_overrides(options.rope_scaling, options.hf_overrides)
    several = mesh.size * mesh.stages > 1
    executor = options.executor
    if several:
        executor = "program" if isinstance(mesh, SharedRank) else "graph"
    drafters, leads = parse(options.speculate), mesh.rank == 0 and mesh.stage == mesh.stages - 1
    tables = lent_tables(drafters) if leads and several and executor == "program" else ()
    return LoadOptions(
        executor, options.block_size, options.kv_dtype, options.quantize or "", threads, mesh=mesh, overrides=overrides,
        mtp=drafters.weights == "mtp" and leads, tables=tables, weights_memory=options.weights_memory,
        agree=agree,
    )  # fmt: skip


def _load(
    options: EngineOptions, progress: Progress | None, device: Device, threads: int, mesh: Mesh = SOLO,
    agree: Agree = None,
) -> Model:  # fmt: skip
    _prepare(threads)
    files = find_model(options.model, options.revision)
    load_options, drafters = _load_options(options, threads, mesh, agree), parse(options.speculate)
    with devices.memory_for("the model's weights"):
        loaded = load_model(files, options.dtype, device.kind, progress, load_options)
        loaded = with_drafter(loaded, drafters, options, device.kind, threads, progress)
    kernels, sharing = ops.choose(device, loaded.dtype), 1 if device.kind == "cuda" else mesh.size
    kv_dtype = loaded.dtype if options.kv_dtype == "auto" else options.kv_dtype
    groups = tuple(
        replace(group, bytes_per_block=sharing * group.bytes_per_block)
        for group in make.cache_groups_of(loaded, options.block_size, kv_dtype)
    )
    generation = read_generation_config(files.root if files.kind == "hf" else "", loaded.config)
    return Model(files, loaded, device, threads, kv_dtype, groups, kernels, generation)


def facts_of(model: Model, options: EngineOptions, progress: Progress | None) -> ModelFacts:
    """What `resolve` must know of the model."""
    loaded, compiled = model.loaded, partial(progress, kernels=True) if progress else None
    return ModelFacts(
        max_positions=loaded.model.config.context_length,
        dtype=loaded.dtype,
        bidirectional=loaded.model.bidirectional,
        groups=model.groups,
        executor=loaded.executor,
        notes=loaded.notes,
        streams=loaded.stream is not None,
        short_until=max((rope.scaling.short_until for rope in loaded.ropes()), default=0),
        footprint=lambda tokens: of_ranks(options.tensor_parallel, options.pipeline_parallel, footprint_of(
            loaded, kind=model.device.kind, tokens=tokens, rows=options.max_num_seqs, threads=model.threads,
            block_size=options.block_size, kv_dtype=model.kv_dtype, progress=compiled,
            adapters=options.expects_adapters,
        ), model.device.kind),
    )  # fmt: skip


def device_facts(model: Model) -> DeviceFacts:
    """What `resolve` must know of the machine, now that the weights are loaded."""
    device, (_, host_available) = model.device, devices.host_memory()
    available = devices.available(device.kind)
    if model.ranks and device.kind == "cuda":
        available = min(available, model.ranks.available)
    return DeviceFacts(device.kind, available, device.threads, device.processors, host_available)


def describe(model: Model, config: EngineConfig) -> ModelInfo:
    """What clients and the deciding half may know of the model; its `grade` comes with the runner."""
    loaded, device, generation = model.loaded, model.device, model.generation
    forward = loaded.model
    pooling, chosen = forward.config.pooling, [f"{c.op} {c.chosen}" for c in model.kernels]
    return ModelInfo(
        name=config.served_model_name,
        architecture=loaded.architecture,
        tasks=tuple(forward.tasks),
        vocab_size=forward.config.vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=generation.eos_ids,
        dtype=loaded.dtype,
        device=device.kind,
        executor=loaded.executor,
        numerics=numerics_version(loaded.executor, device.name, chosen, device.kind),
        num_parameters=loaded.num_parameters,
        embedding_size=pooling.size(forward.config.width),
        token_embedding_size=pooling.token_size(forward.config.width),
        token_weights=pooling.token_heads.weigh,
        labels=pooling.labels,
        activation=pooling.activation,
        pair_types=getattr(forward, "has_pairs", False),
        default_sampling=generation.sampling,
        weight_bytes_read=model.ranks.read if model.ranks else loaded.weight_bytes_read,
        kv_bytes_per_token=tuple((g.kind.bound, g.bytes_per_block // config.block_size) for g in model.groups),
        targets=config.targets,
        role=config.role if config.exchanges else "",
        block_size=config.block_size,
        drafters=config.drafters.methods if Task.GENERATE in forward.tasks else (),
        max_adapters=config.max_loras,
        adapter_bytes=config.lora_memory,
        draft_max=config.draft_max if config.drafters.methods and Task.GENERATE in forward.tasks else 0,
    )


def make_runner(model: Model, config: EngineConfig, info: ModelInfo) -> Runner:
    """Allocates what a runner of the model needs, for contexts up to the config's."""
    for rope in model.loaded.ropes():
        rope.serve(config.max_model_len)
    capacity = Capacity(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size,
        model.groups, config.num_blocks, info.vocab_size, config.max_loras, MAX_DRAFTED,
    )  # fmt: skip
    share = _share(model, config, capacity) if model.ranks else None
    with devices.memory_for("the KV cache and the buffers of a step"):
        return make.make_runner(model.loaded, config, capacity, info, model.device.kind, share)


def _share(model: Model, config: EngineConfig, capacity: Capacity) -> Callable[[Any], Any]:
    """Makes what all ranks compute of what rank 0 does: see `RankProcesses.make` and `lead`."""
    ranks, traced = model.ranks, model.loaded.trace
    assert ranks is not None and traced is not None
    sizes = RankSizes(
        config.num_blocks, config.block_size, config.kv_dtype, config.max_model_len, capacity.max_tokens_per_step,
        capacity.max_rows, capacity.max_drafted, tuple(traced.exports),
    )  # fmt: skip
    share = ranks.lead if model.loaded.executor == "graph" else ranks.make
    return lambda own: share(own, sizes)


def kernels_line(model: Model) -> str:
    """Which kernels compute, for users."""
    formats = _sizes(model.loaded.formats)
    if model.loaded.executor == "program":
        return f"{native.isa()}, every op; weights {formats}"
    if model.loaded.executor == "graph":
        return f"Triton, every op; weights {formats}"
    chosen = [f"{c.op} {c.chosen}" for c in model.kernels if c.chosen != ops.BODY]
    native_used = [native.isa()] if any(c.chosen == "native" for c in model.kernels) else []
    return f"{', '.join(chosen + native_used) or 'no native kernels'}; plain torch otherwise"


def _sizes(formats: Mapping[str, int]) -> str:
    """Weight formats with their bytes, the largest first."""
    found = sorted(formats.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in found)
