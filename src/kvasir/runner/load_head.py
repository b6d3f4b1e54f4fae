"""Loads a head that drafts for a model from a checkpoint of its own: a folder of safetensors or a GGUF file.

Nothing that such a head computes reaches an answer, but its tensors are as untrusted as a model's: the table of a draft
vocabulary becomes ids of the target, so all of it is checked here, before anything is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel, quoted
from kvasir.models.config import MAX_VOCAB, read_hf_config
from kvasir.models.dflash import DFlash
from kvasir.models.dflash_config import is_dflash
from kvasir.models.eagle3 import Eagle3
from kvasir.models.eagle3_config import GGUF_TYPE, TENSORS, HeadTensors, is_eagle3, parallel
from kvasir.models.gemma4_assistant import Gemma4Assistant, is_assistant
from kvasir.models.registry import HEADS
from kvasir.models.tables import EMBED, HEAD
from kvasir.parallel import SOLO, Mesh
from kvasir.runner.load import LoadedModel, LoadOptions, open_checkpoint, place_of, split
from kvasir.runner.load_draft import attach
from kvasir.runner.packing import Packer, Report
from kvasir.runner.weight_sizes import check_room, weight_bytes
from kvasir.weights.load import Progress, choose_dtype, fill
from kvasir.weights.local import ModelFiles
from kvasir.weights.source import GGUFSource, WeightSource

HeadModel = Eagle3 | DFlash | Gemma4Assistant
_TABLES = ("d2t", "draft_id_to_target_id")


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head with its weights. model: a `DraftModel` (kvasir.models.drafting). The rest is as in `LoadedModel`."""

    model: HeadModel
    config: Mapping[str, Any]
    dtype: str
    num_parameters: int
    bytes: int
    held: int
    mapped: int
    formats: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def with_head(
    loaded: LoadedModel,
    files: ModelFiles,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    options: LoadOptions | None = None,
    report: Report | None = None,
) -> LoadedModel:
    """The model with the head in `files` as its draft model. The others are of the head, as for `load_model`.
    Raises ConfigError if the executor cannot draft; what `load_head` raises."""
    options = options or LoadOptions()
    hold = _packer(loaded, device, options, report)
    head = load_head(files, loaded.lender or loaded.model, dtype, device, hold, options.mesh, progress)
    return attach(loaded, head.model, head)


def _packer(
    loaded: LoadedModel, device: str, options: LoadOptions, report: Report | None
) -> Callable[[str], Any] | None:
    """Makes the packer of the model's executor for a dtype."""
    if loaded.executor == "graph":
        from kvasir.runner.device_packing import DevicePacker

        if options.quantize:
            raise ConfigError("the graph executor does not quantize a head", "leave out the quantization of drafters")
        return partial(DevicePacker, device=device)
    packer = partial(Packer, quantize=options.quantize, threads=options.threads, report=report)
    return packer if loaded.executor == "program" else None


def load_head(
    files: ModelFiles,
    target: Any,
    dtype: str = "auto",
    device: str = "cpu",
    packer: Callable[[str], Any] | None = None,
    mesh: Mesh = SOLO,
    progress: Progress | None = None,
) -> LoadedHead:
    """A head for a model that is in memory. dtype: as for models. packer: makes the packer of an executor for a dtype,
    None for torch tensors. Raises UnsupportedModel or ModelFileError, also for a head of another model."""
    head, config, source = open_head(files, target)
    dtype = choose_dtype(dtype, source, device)
    hold = packer(dtype) if packer else None
    if mesh.size > 1:
        split(head, mesh, source, dtype, hold)
    check_room(weight_bytes(head, source, dtype, hold), device)
    filled = fill(head, source, place_of(hold, dtype, device), progress, hold)
    formats, notes = (hold.formats, (*hold.notes, *hold.quantize_note())) if hold else ({}, ())
    size = sum(path.stat().st_size for path in files.weights)
    held = filled.bytes + sum(formats.values())
    return LoadedHead(head, config, dtype, filled.parameters, size, held, filled.mapped, formats, notes)


def is_head(files: ModelFiles) -> bool:
    """Whether a checkpoint is that of a head, and not of a model. Reads no tensors."""
    if files.kind == "gguf":
        source = GGUFSource(files.weights[0])
        architecture = source.model.metadata.get("general.architecture")
        source.close()
        return architecture in ("dflash", "eagle3", "gemma4-assistant")
    assert files.config is not None, "a safetensors folder needs a config.json"
    config = read_hf_config(files.config)
    return is_assistant(config) or is_eagle3(config) or is_dflash(config)


def tables_of(files: ModelFiles) -> tuple[str, ...]:
    """The tables of its model that a head uses. Reads only the tensors of a draft vocabulary."""
    config, source = open_checkpoint(files)
    if is_assistant(config):
        return (EMBED,)
    found = read_tensors(source, absolute=config.get("model_type") == GGUF_TYPE)
    return tuple(name for name, own in ((EMBED, found.embed), (HEAD, found.head)) if not own)


def open_head(files: ModelFiles, target: Any) -> tuple[HeadModel, dict[str, Any], WeightSource]:
    """A head without weights, its config, and its tensors under the names of a checkpoint."""
    config, source = open_checkpoint(files)
    if is_assistant(config):
        return Gemma4Assistant(Gemma4Assistant.Config.from_hf(config), target), config, source
    if is_dflash(config):
        config |= {TENSORS: read_tensors(source, absolute=False)}
        return DFlash(DFlash.Config.from_hf(config), target), config, source
    if not is_eagle3(config):
        names = config.get("architectures") or config.get("model_type")
        raise UnsupportedModel(f"{quoted(names)} is not a head that drafts", f"supported: {', '.join(HEADS)}")
    config |= {TENSORS: read_tensors(source, absolute=config.get("model_type") == GGUF_TYPE)}
    return Eagle3(Eagle3.Config.from_hf(config), target), config, source


def read_tensors(source: WeightSource, absolute: bool) -> HeadTensors:
    """What a head's config takes from its tensors. absolute: whether the table of the draft vocabulary holds the
    target's ids, else how far they are from the draft's. Raises ModelFileError for a table of another kind."""
    stored = {name.removeprefix("model."): name for name in source.names()}
    if "mask_hidden" in stored:
        raise parallel("the checkpoint has a tensor mask_hidden")
    table = next((stored[name] for name in _TABLES if name in stored), None)
    ids = None if table is None else _read_table(source, table, absolute)
    return HeadTensors(ids, "embed_tokens.weight" in stored, "lm_head.weight" in stored)


def _read_table(source: WeightSource, name: str, absolute: bool) -> np.ndarray:
    info = source.info(name)
    if info.dtype not in ("I64", "I32") or len(info.shape) != 1 or not 0 < info.shape[0] <= MAX_VOCAB:
        raise ModelFileError(
            f"tensor {name} is {info.dtype} of shape {list(info.shape)}",
            "expected an int64 for each id that is drafted",
        )
    table = np.array(source.array(name), np.int64)
    if bool(((table < -MAX_VOCAB) | (table > MAX_VOCAB)).any()):  # no sum of such numbers overflows
        raise ModelFileError(
            f"tensor {name} has numbers from {table.min()} to {table.max()}", f"ids are below {MAX_VOCAB}"
        )
    return table if absolute else table + np.arange(len(table))
