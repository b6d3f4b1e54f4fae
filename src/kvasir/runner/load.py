"""Loads a model from its files: reads its config, selects the class of its architecture, fills in its weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvasir import device as devices
from kvasir.errors import ConfigError, UnsupportedModel
from kvasir.layers.attention import Attention
from kvasir.layers.kv_layout import AROUND, CHUNKED, LATENT, KVLayout, Spec, no_op
from kvasir.layers.latent_attention import LatentAttention
from kvasir.layers.places import Place
from kvasir.layers.rope import Rope, ropes
from kvasir.layers.shared_block import SharedBlock
from kvasir.models.config import read_hf_config
from kvasir.models.drafting import DraftModel, joint_layout
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_view import HFView
from kvasir.models.mtp import MultiTokenHead
from kvasir.models.overrides import NONE, Overrides
from kvasir.models.pooling import TokenHeads, read_pooling
from kvasir.models.registry import model_class_for
from kvasir.models.tables import EMBED, WholeTables
from kvasir.ops import native
from kvasir.ops.graph import CannotTrace
from kvasir.parallel import SOLO, Mesh
from kvasir.program.cache import no_kernel
from kvasir.program.lower import lower
from kvasir.program.marshal import prepared
from kvasir.program.stages import Stage, cut
from kvasir.program.trace import Trace, trace
from kvasir.runner.allotment import Needs, allot, needs_of
from kvasir.runner.packing import Packer, Report
from kvasir.runner.staging import divide
from kvasir.runner.streaming import PackedLayers, WeightStream, packed_layers
from kvasir.runner.weight_sizes import check_room, weight_bytes
from kvasir.weights.gguf_scales import ScaledGGUF
from kvasir.weights.load import ROUNDED_ROWS, Progress, choose_dtype, fill
from kvasir.weights.local import ModelFiles
from kvasir.weights.published import unquantized, with_own_file, with_rounded_rows
from kvasir.weights.published.view import DecodedView
from kvasir.weights.source import GGUFSource, JoinedSource, SafetensorsSource, WeightSource

_TOKEN_HEADS = ("colbert_linear", "sparse_linear")  # files or tensors of BGE-M3
# The hint where the selected executor, or that of ranks and stages, cannot run a model.
OTHER, ONE_PROCESS = "use --executor auto", "leave --tensor-parallel and --pipeline-parallel out"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. config: in Hugging Face's form, also for a GGUF file. bytes: of the weights' files.

    trace: None for the eager executor. executor: that it was loaded for. mtp: its head for multi-token prediction, if
    it was asked for. draft: the model that drafts for it (`runner.load_draft`). formats: bytes of packed weights by
    format.
    notes: messages for the user. hidden: as in LoadOptions. held: bytes of the weights in memory, of which `mapped` are
    pages of the file. stream: reads the other weights during a step. layers, budget: what it is made of, while the
    model is loaded. borders: between stages, as in `program.stages.cut`; empty if this process computes all layers.
    stage: the number of its own. lender: the model with whole tables, if only its drafter has them.
    """

    model: Any
    config: Mapping[str, Any]
    architecture: str
    dtype: str
    num_parameters: int
    bytes: int
    trace: Trace | None = None
    formats: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    held: int = 0
    mapped: int = 0
    executor: str = "eager"
    mtp: MultiTokenHead | None = None
    draft: DraftModel | None = None
    stream: WeightStream | None = None
    layers: PackedLayers | None = None
    budget: int = 0
    borders: tuple[int, ...] = ()
    stage: int = 0
    lender: Any = None

    @property
    def layout(self) -> KVLayout:
        """The caches of all layers, those of the draft model included."""
        return joint_layout(self.model, self.draft)

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of the matrices that a step of one row reads in this process; 0 without a trace."""
        return sum(part.weight_bytes_read for part in parts_of(self.trace, self)) if self.trace else 0

    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings, those of the draft model included."""
        parts = (self.model, *(self.draft.parts() if self.draft else ()))
        return tuple({id(rope): rope for part in parts for rope in ropes(part)}.values())


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading and running a model. executor: "auto", "program", "graph" or "eager". kv_dtype, quantize: as
    in EngineOptions. hidden: outputs that work may want: "layers.<i>", "last" or "attention.<i>". mesh: the rank to
    load for. overrides: of the config. mtp: whether the head for multi-token prediction is loaded, too. weights_memory:
    as in EngineOptions. tables: those of `models.tables` that this process has whole, for a head that it computes
    alone. agree: gives this process's bytes for weights that are streamed, 0 if they are not, of its needs, once all
    processes of the mesh have asked; without it, all are taken to need as much."""

    executor: str = "eager"
    block_size: int = 64
    kv_dtype: str = "auto"
    quantize: str = ""
    threads: int = 1
    hidden: tuple[str, ...] = ()
    mesh: Mesh = SOLO
    overrides: Overrides = NONE
    mtp: bool = False
    weights_memory: int | None = None
    tables: tuple[str, ...] = ()
    agree: Callable[[Needs], int] | None = None


def load_model(
    files: ModelFiles,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    options: LoadOptions | None = None,
    report: Report | None = None,
) -> LoadedModel:
    """Loads a model's config and weights. dtype: "auto", "float32", "bfloat16" or (on a GPU) "float16".

    With executor "auto", programs run on the CPU and graphs on a GPU; a model that cannot run so is loaded for eager,
    with a note that gives the reason. report: see `Packer`. Raises UnsupportedModel, ModelFileError, or ConfigError for
    a dtype or an option that is not available.
    """
    options = options or LoadOptions()
    auto, reason = options.executor == "auto", "it was selected"
    if auto:
        options = replace(options, executor="program" if device == "cpu" else "graph")
    if options.kv_dtype == "fp8" and options.executor != "graph":
        raise _no_fp8("--executor graph on a GPU, else ")
    if options.executor != "eager":
        reason = (_no_graph if options.executor == "graph" else _no_program)(options, device)
    if not reason:
        try:
            if options.executor == "graph":
                return _load_graph(files, dtype, device, progress, options)
            return _load_program(files, dtype, progress, options, report)
        except CannotTrace as error:
            reason = str(error)
    if options.executor != "eager" and not auto:
        alone = options.mesh.size == options.mesh.stages == 1  # else the engine has selected the executor
        raise ConfigError(f"the {options.executor} executor cannot run this: {reason}", OTHER if alone else ONE_PROCESS)
    if options.quantize:
        why = _no_program(options, device) or reason
        raise ConfigError(f"only the program executor quantizes, and it cannot run this: {why}")
    if options.weights_memory:
        why = _no_program(options, device) or reason
        raise ConfigError(
            f"only the program executor streams weights, and it cannot run this: {why}", "leave --weights-memory out"
        )
    if options.kv_dtype == "fp8":
        raise _no_fp8(because=f", which cannot run this: {reason}")
    devices.need_torch(f"the eager executor is needed: {reason}")
    notes = (f"eager executor: {reason}",) if auto else ()
    return _load(files, dtype, device, progress, None, replace(options, executor="eager"), notes)


def _no_fp8(instead: str = "", because: str = "") -> ConfigError:
    return ConfigError(f"only the graph executor has an fp8 KV cache{because}", f"use {instead}--kv-dtype int8 or auto")


def _no_program(options: LoadOptions, device: str) -> str:
    """Why no program can run with these options, found before any file is read; "" if one can."""
    if device != "cpu":
        return f"programs run on the CPU, not on {device}"
    if options.block_size % 16:
        return f"programs need blocks of 16 tokens or a multiple, not {options.block_size}"
    return native.reason()


def _no_graph(options: LoadOptions, device: str) -> str:
    """Why the graph executor cannot run with these options, found before any file is read; "" if it can."""
    if options.quantize:
        return "it does not quantize"
    if options.weights_memory:
        return "it does not stream weights"
    return devices.no_triton(device)


def no_attention(model: Any) -> str:
    """Why the program executor cannot compute the model's attention; "" if it can."""
    return no_kernel(model.cache_spec())


def no_triton_kernel(spec: Spec | KVLayout) -> str:
    """Why no Triton kernel computes with these caches; "" if one does, or if that is known only from the ops."""
    for kind in KVLayout.of(spec).kinds:
        if kind.needs in (AROUND, CHUNKED, LATENT):
            return f"no kernel for {kind.needs}"
        if kind.key_dim != kind.value_dim:
            return f"no kernel for keys of {kind.key_dim} and values of {kind.value_dim}"
    return ""


def _load_program(
    files: ModelFiles, dtype: str, progress: Progress | None, options: LoadOptions, report: Report | None
) -> LoadedModel:
    packer = partial(Packer, quantize=options.quantize, threads=options.threads, report=report)
    loaded = _load(files, dtype, "cpu", progress, packer, options)
    try:
        traced = trace(loaded.model, exports_of(loaded.model, options.hidden))
        for part in parts_of(traced, loaded):
            lower(part, 1, 1, prepared)  # raises for an op without a kernel
        return _streamed(replace(loaded, trace=traced, executor="program"))
    except BaseException:
        if loaded.layers:
            loaded.layers.close()
        raise


def _streamed(loaded: LoadedModel) -> LoadedModel:
    """The program's model with its layers in their places, if they are streamed."""
    if loaded.layers is None:
        return loaded
    assert loaded.trace is not None
    held = loaded.held - loaded.layers.nbytes
    stream = WeightStream(loaded.layers, loaded.trace, loaded.budget, held)
    return replace(loaded, layers=None, stream=stream, held=held + stream.held, notes=(*loaded.notes, stream.note))


def stage_of(traced: Trace, loaded: LoadedModel) -> Stage | None:
    """This process's stage of a trace of the model; None if there is only one."""
    if not loaded.borders:
        return None
    return cut(traced, loaded.borders, loaded.stage, KVLayout.of(loaded.model.cache_spec()))


def parts_of(traced: Trace, loaded: LoadedModel) -> tuple[Trace, ...]:
    """The traces that this process computes."""
    stage = stage_of(traced, loaded)
    if stage is None:
        return (traced,)
    return (stage.body, stage.tail) if stage.tail else (stage.body,)


def exports_of(model: Any, hidden: tuple[str, ...]) -> tuple[str, ...]:
    """The rows that are read after a step besides the forward's result. hidden: outputs that work may want."""
    return (*hidden, *getattr(model, "outputs", {}).values())


def _load_graph(
    files: ModelFiles, dtype: str, device: str, progress: Progress | None, options: LoadOptions
) -> LoadedModel:
    from kvasir.graph.adapter_places import Places
    from kvasir.graph.fold import fold
    from kvasir.graph.matrices import stack_experts
    from kvasir.ops.linear.triton_matrix import LAYOUTS
    from kvasir.runner.device_packing import DevicePacker

    loaded = _load(files, dtype, device, progress, partial(DevicePacker, device=device), options)
    compares = device == "cuda" and loaded.dtype == "float32" and set(loaded.formats) & set(LAYOUTS)
    if compares and (reason := devices.rounds_float32(devices.target())):
        raise CannotTrace(f"products of float32 inputs with quantized weights: {reason}")
    for part in (loaded.model, loaded.mtp):
        if part:
            stack_experts(part)
    traced = trace(loaded.model, exports_of(loaded.model, options.hidden))
    Places.of(traced, fold(traced))  # both raise for an op without a kernel
    notes = (*loaded.notes, *_cache_notes(device))
    return replace(loaded, trace=traced, executor="graph", notes=notes)


def _cache_notes(device: str) -> list[str]:
    """Chooses the folder of compiled kernels."""
    if device != "cuda":
        return []
    from kvasir.ops.compiling import use_private_cache

    note = use_private_cache(devices.target())
    return [note] if note else []


def _load(
    files: ModelFiles,
    dtype: str,
    device: str,
    progress: Progress | None,
    packer: Callable[[str], Any] | None,
    options: LoadOptions,
    notes: tuple[str, ...] = (),
) -> LoadedModel:
    config, source = open_checkpoint(files, options.overrides)
    kind = model_class_for(config)
    config = _counted(kind, config, source)
    model = kind(kind.Config.from_hf(config))
    _check_hidden(options.hidden, model)
    if packer and options.executor != "graph" and device == "cpu" and (reason := no_attention(model)):
        raise CannotTrace(reason)
    if options.executor == "graph" and (reason := no_triton_kernel(model.cache_spec())):
        raise CannotTrace(reason)
    if reason := no_op(model.cache_spec()):
        raise UnsupportedModel(f"neither executor can run this model: {reason}")
    if isinstance(source, DecodedView):
        notes = (*notes, source.note)
    weights_dtype = choose_dtype(dtype, source, device)
    hold = packer(weights_dtype) if packer else None
    mesh, parameters = options.mesh, 0
    with_table = EMBED in options.tables and mesh.size == 1
    division = divide(kind(kind.Config.from_hf(config)), source, mesh, with_table) if mesh.stages > 1 else None
    if division and hold:
        hold.leave_out = division.leaves_out(model)
    mtp = MultiTokenHead(model) if options.mtp else None
    tables = WholeTables(model, options.tables) if options.tables and mesh.size > 1 else None
    drafting = [part for part in (mtp, tables) if part]  # computed by this rank alone if it has tables for that
    if mesh.size > 1:
        shared = [model] if tables else [model, *drafting]
        parameters = sum(split(part, mesh, source, weights_dtype, hold) for part in shared)
    leads = mesh.rank == 0 and mesh.stage == mesh.stages - 1
    ranks = mesh.size * mesh.stages
    sizes: Counter[int] = Counter()
    own = weight_bytes(model, source, weights_dtype, hold, sizes)
    drafts = sum(weight_bytes(part, source, weights_dtype, hold, sizes) for part in drafting)
    # The process that leads sees to it that all parts fit, unless each has a device of its own.
    needed, budget = (ranks if leads and device == "cpu" else 1) * own + drafts, 0
    if isinstance(hold, Packer):
        alike = lambda needs: allot([needs] * ranks, devices.available(device), options.weights_memory)[0]  # noqa: E731
        budget = (options.agree or alike)(needs_of(model, own + drafts, sizes))
    else:
        check_room(needed, device)
    place = place_of(hold, weights_dtype, device)
    facts = (weights_dtype, options.quantize, repr(options.overrides))
    packed = packed_layers(model, files, needed, facts, mesh, options.agree is not None) if budget else nullcontext()
    with packed as layers:
        if layers and isinstance(hold, Packer):
            hold.layers = layers
        if tables and isinstance(hold, Packer):
            fill(tables, source, place, None, hold)
            hold.whole = tables.matrices(model)
        filled = fill(model, source, place, progress, hold)
        if mtp:
            filled = filled + (more := fill(mtp, source, place, progress, hold))
            parameters += more.parameters if tables else 0
    size = sum(path.stat().st_size for path in files.weights)
    formats, more = (hold.formats, (*hold.notes, *hold.quantize_note())) if hold else ({}, ())
    if config.get("pooling_tokens", TokenHeads()).unread:
        notes = (*notes, "the layers over tokens (*_linear.pt) are pickled and not read: convert them to safetensors")
    loaded = LoadedModel(
        model, config, kind.__name__, weights_dtype, parameters or filled.parameters, size, None, formats,
        (*notes, *more), options.hidden, filled.bytes + sum(formats.values()), filled.mapped, mtp=mtp,
        borders=division.borders if division else (), stage=mesh.stage,
        lender=tables.lent_to(model) if tables else None,
    )  # fmt: skip
    return replace(loaded, layers=layers, budget=budget) if layers else loaded


def _counted(kind: Any, config: dict[str, Any], source: WeightSource) -> dict[str, Any]:
    """The config with the number of layers for multi-token prediction, from their tensors if the field is missing."""
    missing, pattern = getattr(kind, "counted", None) or ("", "")
    if not missing or missing in config:
        return config
    return config | {missing: len({found[1] for name in source.names() if (found := re.match(pattern, name))})}


def place_of(packer: Any, dtype: str, device: str) -> Place:
    """Where the modules keep what is not packed: in NumPy arrays for a program, in torch tensors otherwise."""
    if packer:
        return packer.place
    from kvasir.layers.tensors import TensorPlace, torch_dtype

    return TensorPlace(torch_dtype(dtype), device)


def split(model: Any, mesh: Mesh, source: WeightSource, dtype: str, packer: Packer | None) -> int:
    """Reduces the model to this rank's shards; returns the number of parameters of the whole. Sums are cut at the
    segments of the weights' packed formats."""
    cuts: dict[int, int] = {}

    def note(leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> bool:
        if not getattr(leaf, "reduces", False) or name != "weight":
            return True
        if source.info(stored).dtype == ROUNDED_ROWS:
            cuts[id(leaf)] = 1  # the scale of a row needs all of it
        elif packer:
            cuts[id(leaf)] = packer.segments(leaf, source.info(stored).dtype)
        return True

    whole = fill(model, source, None, hold=note)  # reads no weights
    model.split(mesh, lambda linear: cuts.get(id(linear), linear.segments))
    return whole.parameters


def _attentions(model: Any) -> Iterator[Attention | LatentAttention]:
    for _, part in model.walk():
        if isinstance(part, Attention | LatentAttention):
            yield part
        elif isinstance(part, SharedBlock):
            yield from part.attention.values()


def _check_hidden(names: tuple[str, ...], model: Any) -> None:
    layers = len(model.layers)
    weights = {f"attention.{part.model_layer}" for part in _attentions(model)}
    there = {"last", *(f"layers.{i}" for i in range(layers)), *weights}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"the model has no output {unknown[0]!r}",
            f"choose layers.0 to layers.{layers - 1}, last, or attention.<i> of a layer with attention",
        )


def open_checkpoint(files: ModelFiles, overrides: Overrides = NONE) -> tuple[dict[str, Any], WeightSource]:
    """The config and the tensors of a checkpoint, under Hugging Face's names also for GGUF, and as if they were not
    quantized for a published format of quantized safetensors."""
    if files.kind == "gguf":
        source = GGUFSource(files.weights[0])
        metadata = source.model.metadata
        config = overrides.apply(hf_config_from_gguf(metadata, source))
        architecture = str(metadata["general.architecture"])
        return config, with_rounded_rows(HFView(ScaledGGUF(source), config, architecture), architecture)
    assert files.config is not None, "a safetensors folder needs a config.json"
    found = read_pooling(files.root)
    pooling = found.get("pooling")
    folders = {layer.folder for layer in pooling.get("dense", ())} if isinstance(pooling, dict) else set()
    source = _with_parts(files.root, folders)
    config = {
        **overrides.apply(read_hf_config(files.config)),
        **found,
        "pooling_tokens": _token_heads(files.root, source),
    }
    return unquantized(with_own_file(config, files.root), source)


def _with_parts(root: Path, folders: Collection[str]) -> WeightSource:
    """The tensors of a folder, those of the modules that follow pooling, under the names of their folders, and those of
    heads in files of their own."""
    parts = {f"{folder}/": root / folder for folder in folders}
    parts |= {f"{head}.": path for head in _TOKEN_HEADS if (path := root / f"{head}.safetensors").is_file()}
    whole = SafetensorsSource(root)
    return JoinedSource({"": whole, **{p: SafetensorsSource(at) for p, at in parts.items()}}) if parts else whole


def _token_heads(root: Path, source: WeightSource) -> TokenHeads:
    """The layers over each row that a checkpoint has."""
    there = set(source.names())
    embed, weigh = (f"{head}.weight" in there for head in _TOKEN_HEADS)
    size = source.info("colbert_linear.weight").shape[0] if embed else 0
    return TokenHeads(
        size, weigh, not (embed or weigh) and any((root / f"{head}.pt").is_file() for head in _TOKEN_HEADS)
    )
