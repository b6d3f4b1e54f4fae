"""Models larger than memory: the matrices of their layers lie packed in a file, and move through a window of memory.

The embedding table, the head and everything small stay in memory. So do as many layers as fit; they are spread evenly
among the others, so that the disk is busy while they are computed. The other layers are read anew in each step, which
costs the same for one row as for hundreds (FlexGen, Sheng et al., 2023; ZeRO-Inference, Aminabadi et al., 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.environment import contents_dir, packed_dir
from kvasir.errors import ConfigError, DeviceFault, ModelFileError
from kvasir.ops import native
from kvasir.ops.linear.native import FORMATS
from kvasir.ops.linear.packed import PackedMatrix, allocate
from kvasir.parallel import SOLO, Mesh
from kvasir.program.calls import NO_HOOKS, Hooks
from kvasir.program.trace import Trace
from kvasir.quant.inputs import Inputs
from kvasir.runner.allotment import layer_modules, mib, too_little
from kvasir.runner.numerics import package_digest
from kvasir.weights.content import identity_of
from kvasir.weights.local import ModelFiles
from kvasir.weights.packed_file import (
    Damaged,
    PackedFile,
    PackedWriter,
    StoredMatrix,
    check_disk,
    open_packed,
    packed_folder,
    prune,
    unusable,
)
from kvasir.weights.packed_names import file_key, model_key
from kvasir.weights.window import LayerWindow

MOST_PLACES = 3  # for streamed layers: one that is computed, one that is read, one for when a read takes long
ENOUGH = 8  # layers that fit from which on there is a third place


class PackedLayers:
    """The matrices of layers on their way through a file, while a model is loaded: a Packer gives them to it, or gets
    them from it if an earlier start has written the file. matrices: by name, without their bytes."""

    def __init__(self, model: Any, file: PackedFile | None, writer: PackedWriter | None):
        self.file, self._writer = file, writer
        self.matrices: dict[str, PackedMatrix] = {}
        self._names = layer_modules(model)

    def find(self, leaf: Any, name: str, shape: tuple[int, int], inputs: Inputs | None) -> PackedMatrix | None:
        """The matrix, without its bytes, if the file has it. Raises ModelFileError if the file has another one."""
        path, _ = self._names.get(id(leaf), ("", 0))
        stored = self.file.matrices.get(f"{path}.{name}") if self.file else None
        if stored is None or self.file is None:
            return None
        try:
            matrix = _without_bytes(stored, inputs)
        except (ValueError, ConfigError) as error:
            raise ModelFileError(f"{self.file.path}: {stored.name}: {error}", "remove the file") from error
        if matrix.shape != shape or matrix.nbytes != stored.nbytes:
            raise ModelFileError(f"{self.file.path} has another {stored.name} than the model", "remove the file")
        self.matrices[stored.name] = matrix
        return matrix

    def keep(self, leaf: Any, name: str, matrix: PackedMatrix) -> None:
        """Moves a matrix of a layer into the file; leaves any other where it is. Raises ConfigError."""
        path, layer = self._names.get(id(leaf), ("", 0))
        if not path or self._writer is None or not self._writer.takes(layer):
            return
        try:
            self._writer.add(
                f"{path}.{name}", layer, matrix.memory, format=matrix.format, rows=matrix.rows, cols=matrix.cols,
                segments=matrix.segments, activation=matrix.activation, scale=matrix.scale, note=matrix.note,
            )  # fmt: skip
        except OSError as error:
            raise unusable(error) from error
        self.matrices[f"{path}.{name}"] = matrix
        matrix.move(None)

    def finish(self) -> None:
        """Completes the file, after the last matrix. Raises OSError."""
        if self._writer:
            self.file, self._writer = self._writer.finish(), None

    def close(self) -> None:
        """Ends a load that has failed."""
        if self._writer:
            self._writer.abandon()
        if self.file:
            self.file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(matrix.nbytes for matrix in self.matrices.values())


def _without_bytes(stored: StoredMatrix, inputs: Inputs | None) -> PackedMatrix:
    """Raises ValueError or ConfigError for a matrix that there cannot be."""
    if stored.format not in FORMATS:
        raise ValueError(f"unknown format {stored.format!r}")
    asked = stored.activation if stored.activation in ("float32", "q8_row") else "auto"
    matrix = PackedMatrix(stored.format, stored.rows, stored.cols, stored.segments, asked, stored.note, inputs)
    if matrix.activation != stored.activation:
        raise ValueError(f"its rows are {stored.activation!r}")
    matrix.scale = stored.scale
    matrix.move(None)
    return matrix


@contextmanager
def packed_layers(
    model: Any, files: ModelFiles, needed: int, facts: Sequence[str], mesh: Mesh = SOLO, is_held: bool = False
) -> Iterator[PackedLayers]:
    """What a Packer of the model packs layers through. needed: bytes of the disk. facts: what decides, besides the
    files and the mesh, how they are packed. is_held: whether another process of the mesh holds the folder for this one.
    Raises ConfigError."""
    with nullcontext(_folder()) if is_held else held_folder() as folder, _explained():
        model_key, key = _keys(files, facts, mesh)
        file = open_packed(folder, key)
        if file is None:
            check_disk(folder, needed)
        layers = PackedLayers(model, file, None if file else PackedWriter(folder, key))
        try:
            yield layers
            layers.finish()
        except BaseException:
            layers.close()
            raise
        prune(folder, model_key, key)


@contextmanager
def held_folder() -> Iterator[Path]:
    """The folder of packed files, in which only processes of this mesh write. Raises ConfigError."""
    with _explained(), packed_folder(_folder()) as folder:
        yield folder


def _folder() -> Path:
    try:
        return packed_dir()
    except RuntimeError as error:  # there is no home
        raise ConfigError(f"packed weights cannot be kept: {error}", "set KVASIR_PACKED to a folder") from error


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable(error) from error


def _keys(files: ModelFiles, facts: Sequence[str], mesh: Mesh) -> tuple[str, str]:
    """Of a model, and of its packed file, whose key begins with that of the model. The files of all processes of a mesh
    have keys that differ at their ends."""
    model = model_key(files.weights)
    read = (*files.weights, *([files.config] if files.config else ()))
    shape = f"{mesh.size} ranks, {mesh.stages} stages"
    what = (*(identity_of(path, contents_dir()) for path in read), native.sources_digest(), package_digest(), *facts)
    return model, file_key(model, _digest((*what, shape)), mesh.stage * mesh.size + mesh.rank, mesh.size * mesh.stages)


def _digest(lines: Iterable[str]) -> str:
    return sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Split:
    """Which layers stay in memory. streamed: the others, in their order. places: for them. nbytes: that all take."""

    streamed: tuple[int, ...]
    places: int
    nbytes: int


def split_layers(sizes: Sequence[int], room: int) -> Split | None:
    """Streams as few layers of these sizes as make the rest fit into `room` bytes; None if not even one place fits.
    With room for several layers, two or three of them are places, so that a layer is read while another is computed."""
    count, most = len(sizes), max(sizes, default=0)
    wish = 1 if room < 2 * most else MOST_PLACES if room >= ENOUGH * most else 2
    for streamed in range(count + 1):
        chosen = tuple((2 * i + 1) * count // (2 * streamed) for i in range(streamed))
        place = max((sizes[i] for i in chosen), default=0)
        places = min(streamed, wish)
        total = sum(sizes) - sum(sizes[i] for i in chosen) + places * place
        if total <= room:
            return Split(chosen, places, total)
    return None


class WeightStream:
    """The weights of layers that pass through memory during each step. held: bytes that they take there. streamed: the
    layers of the trace that are read in each step, `per_step` bytes; of_all: these bytes of all processes of the model.
    numbers: of the streamed layers in the file. Closed with the executor."""

    def __init__(self, layers: PackedLayers, trace: Trace, budget: int, held: int):
        """budget: bytes for all weights, of which `held` are taken. Moves the matrices to where they will be. Raises
        ConfigError if the budget is too small, ModelFileError if the file is damaged."""
        assert layers.file
        self._file = layers.file
        groups = _groups(layers, trace)
        sizes = {number: layer.nbytes for number, layer in self._file.layers.items()}
        ordered = sorted(groups, key=groups.__getitem__)
        fixed = held + sum(size for number, size in sizes.items() if number not in groups)
        split = split_layers([sizes[number] for number in ordered], budget - fixed)
        if split is None:
            raise too_little(budget, fixed + max((sizes[number] for number in ordered), default=0))
        streamed = [ordered[i] for i in split.streamed]
        self.held, self.layers = fixed - held + split.nbytes, len(sizes)
        self.per_step = self.of_all = sum(sizes[number] for number in streamed)
        self.places = split.places
        homes: dict[int, np.ndarray] = {}
        try:
            for number in sizes.keys() - set(streamed):
                homes[number] = allocate(sizes[number])
                self._file.read(number, homes[number])
        except Damaged as error:
            raise ModelFileError(str(error), "start again: the file is then written anew") from error
        place = max((sizes[number] for number in streamed), default=0)
        memory = allocate(place * split.places) if streamed else np.empty(0, np.uint8)
        memory[:] = 0  # it is taken from what is free now
        places = [memory[i * place : (i + 1) * place] for i in range(split.places)]
        homes |= {number: places[k % len(places)] for k, number in enumerate(streamed)}
        self._settle(layers, homes, set(streamed))
        self.streamed = tuple(groups[number] for number in streamed)
        self.numbers = streamed
        numbers = dict(zip(self.streamed, streamed, strict=True))
        self.window = None
        if streamed:
            read = lambda layer, memory: self._file.read(numbers[layer], memory)  # noqa: E731
            self.window = LayerWindow(read, self.streamed, places, [sizes[number] for number in streamed])

    def _settle(self, layers: PackedLayers, homes: Mapping[int, np.ndarray], streamed: Collection[int]) -> None:
        for name, matrix in layers.matrices.items():
            stored = self._file.matrices[name]
            read = partial(self._copy, stored) if stored.layer in streamed else None
            matrix.move(homes[stored.layer][stored.offset :], read)

    def _copy(self, stored: StoredMatrix) -> np.ndarray:
        """The bytes of a matrix, read for it alone. Raises DeviceFault."""
        memory = allocate(self._file.layers[stored.layer].nbytes)
        try:
            self._file.read(stored.layer, memory)
        except Damaged as error:
            raise DeviceFault(str(error)) from error
        return memory[stored.offset : stored.offset + stored.nbytes]

    @property
    def hooks(self) -> Hooks:
        """What a program of the model calls around its layers."""
        if self.window is None:
            return NO_HOOKS
        window = self.window
        return Hooks(window.before, lambda layer, _: window.after(layer))

    @property
    def read(self) -> tuple[int, float]:
        """Bytes that all processes have read for steps, in which each reads its share, and the seconds that steps have
        waited for those of this process."""
        if self.window is None:
            return 0, 0.0
        return self.window.bytes_read * self.of_all // self.per_step, self.window.waited

    @property
    def folder(self) -> Path:
        """Where its file is."""
        return self._file.path.parent

    @property
    def note(self) -> str:
        """What was decided, for users."""
        return (
            f"the weights are streamed: {self.layers - len(self.streamed)} of {self.layers} layers stay in memory, "
            f"{len(self.streamed)} ({mib(self.per_step)}) are read from {self._file.path} in each step, "
            f"{self.places} at a time"
        )

    def close(self) -> None:
        """Ends the reads; idempotent. No step may run any more."""
        if self.window:
            self.window.close()
        self._file.close()


def _groups(layers: PackedLayers, trace: Trace) -> dict[int, int]:
    """The layers of the file that can be streamed, with their numbers in the trace: all of their matrices are used in
    one layer, and nowhere else."""
    assert layers.file
    uses: dict[int, set[int]] = {}
    borders = [*pairwise((0, *trace.ends)), (trace.ends[-1] if trace.ends else 0, len(trace.graph.nodes))]
    for layer, (begin, end) in enumerate(borders):
        for node in trace.graph.nodes[begin:end]:
            for matrix in _matrices(node.inputs):
                uses.setdefault(id(matrix), set()).add(layer)
    found: dict[int, set[int]] = {}
    for name, matrix in layers.matrices.items():
        used = uses.get(id(matrix), {-1})
        found.setdefault(layers.file.matrices[name].layer, set()).update(used)
    single = {number: next(iter(used)) for number, used in found.items() if len(used) == 1}
    taken = Counter(single.values())
    return {number: layer for number, layer in single.items() if 0 <= layer < len(trace.ends) and taken[layer] == 1}


def _matrices(inputs: Iterable[Any]) -> Iterator[PackedMatrix]:
    for value in inputs:
        if isinstance(value, PackedMatrix):
            yield value
        elif isinstance(value, list | tuple):
            yield from _matrices(value)
