"""Launches kernels through Triton's own launch path, with a driver that pretends to have a GPU and only notes what
reaches it: `python -m tests.compiled.launching`, not under the interpreter.

This finds what neither the interpreter nor the compilation of recorded launches does: arguments that the generated
binder of a kernel confuses, options that it does not know, and launches that this package's tests compile for other
types, constants or alignments than Triton does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kvasir.ops.launch
from benchmarks.gpu.engine import SPECS, Engine
from benchmarks.gpu.measure import Place
from benchmarks.gpu.models import config_of, random_model
from kvasir.ops.compiling import compile_all
from kvasir.ops.launch import Launch, launch
from tests.compiled.compiling import case_of
from tests.compiled.sets import SETS, launches_in

Seen = list[tuple[Any, tuple[int, ...], tuple[Any, ...]]]  # source, grid, arguments


class Launcher:
    """What Triton makes for each compiled kernel."""

    seen: Seen = []  # noqa: RUF012 - of all launchers

    def __init__(self, source: Any, metadata: Any):
        self._source = source

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *more: Any) -> None:
        self.seen.append((self._source, (x, y, z), more[4:]))  # after the metadata and hooks


class Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    """An H100 that computes nothing."""

    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0


class Stub:
    """A kernel without code, for launches whose compilation is of no interest here."""

    def __init__(self, source: Any, **options: Any):
        self.run = Launcher(source, None)
        self.function, self.packed_metadata = 1, ()

    def launch_metadata(self, *args: Any) -> None: ...


def through(launches: Iterable[Launch]) -> list[str]:
    """Launches everything; what differs between a launch and what reached the driver."""
    wrong: list[str] = []
    for found in launches:
        Launcher.seen.clear()
        launch(found.kernel, found.grid, *found.args, **found.constants, **found.options)
        [(source, grid, args)] = Launcher.seen
        wrong += [f"{found.name}: {text}" for text in _differences(found, source, grid, args)]
    return wrong


def _differences(found: Launch, source: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> Iterable[str]:
    names = [p.name for p in found.kernel.params]
    given = iter(found.args)
    wanted = [found.constants[name] if name in found.constants else next(given) for name in names]
    if len(args) != len(names):
        yield f"{len(args)} arguments reached the driver, not {len(names)}"
    for name, want, got in zip(names, wanted, args, strict=False):
        if want is not got and not (isinstance(want, int | float | str | bool) and want == got):
            yield f"{name} reached the driver as {type(got).__name__} {got!r:.60}"
    if grid != (*found.grid, 1, 1)[:3]:
        yield f"grid {grid}, not {found.grid}"
    case = case_of(found)
    if dict(case.signature) != dict(source.signature):
        differing = set(case.signature) ^ set(source.signature.items())
        yield f"signature differs: {sorted(differing)}"
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    if dict(case.constants) != constants:
        yield f"constants differ: {constants} {dict(case.constants)}"
    aligned = tuple(sorted(path[0] for path, kinds in source.attrs.items() if ["tt.divisibility", 16] in kinds))
    if case.aligned != aligned:
        yield f"other alignment: {[names[i] for i in {*case.aligned} ^ {*aligned}]}"


def main() -> int:
    kvasir.ops.launch.has_pdl = lambda: True  # type: ignore[assignment]
    driver.set_active(Driver())  # type: ignore[arg-type]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        knobs.cache.dir = folder
        engine = Engine(random_model(config_of("tiny"), "Q4_K", "cpu"), Place("cpu"), rows=2, length=64, tokens=64)
        launches = engine.executor.replays.launches()
        shown: list[tuple[int, int]] = []
        total = compile_all(launches, lambda done, total: shown.append((done, total)))
        if shown != [(done, total) for done in range(1, total + 1)] or not total:
            wrong.append(f"the progress of compiling {total} kernels was {shown}")
        compiled = sorted(Path(folder).glob("*/*"))
        wrong += through(launches)
        if sorted(Path(folder).glob("*/*")) != compiled:
            wrong.append("launches compiled kernels that should have been there")
        for spec in SPECS:
            compute, sample, _ = engine.step([(0, 0, 5), (1, 3, 1)], spec)
            compute()
            sample()
        engine.close()
    JITFunction.create_binder = _stubbed(JITFunction.create_binder)
    more = [found for name in SETS for found in launches_in(name)]
    for kernel in {found.kernel for found in more}:
        kernel.device_caches.clear()
    wrong += through(more)
    count = len(launches) + len(more)
    print("\n".join(dict.fromkeys(wrong)) or f"{count} launches reached the driver as they are meant")
    return bool(wrong)


def _stubbed(create: Any) -> Any:
    """`create_binder`, which imports the compiler anew for each kernel."""

    def binder(self: Any) -> Any:
        made = create(self)
        self.compile = Stub
        return made

    return binder


if __name__ == "__main__":
    sys.exit(main())
