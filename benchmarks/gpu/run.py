"""The cells of a run: what is measured, in which order, and the file that keeps it."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gpu import reference
from benchmarks.gpu.decode import decode
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.exactness import exactness, shapes_of
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.measure import Place, clocks
from benchmarks.gpu.models import ALL_SHAPES, config_of, random_model
from benchmarks.gpu.prefill import prefill
from benchmarks.gpu.probe import probe
from kvasir.cli.machine import machine_facts, software_facts

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 6 << 30  # bytes of the device for everything but weights, keys and values


@dataclass(frozen=True)
class Sizes:
    """What the cells of a run are measured with. exact: input rows of single products."""

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    exact: tuple[int, ...]
    beside: tuple[int, ...]  # sequences of transformers


QUICK = Sizes((1, 8, 64, 256), (1024,), (512, 2048), (1, 64), (1, 8))
FULL = Sizes((1, 2, 8, 32, 64, 128, 256), (1024, 8192), (128, 512, 2048), (1, 16, 64, 256), (1, 8, 64))
SMALL = Sizes((1, 3), (70,), (5,), (1,), (1,))  # for the interpreter


@dataclass(frozen=True)
class Cell:
    """needs: (shape, format) of the engine that `measure` takes, None for none."""

    key: str
    measure: Callable[[Any], dict[str, Any]]
    needs: tuple[str, str] | None = None


class Run:
    """One run over the cells; results are written to `path` after each."""

    def __init__(self, place: Place, shapes: list[str], formats: list[str], path: Path, *, full: bool, minutes: float):
        self.place, self.shapes, self.formats, self.path, self.full = place, shapes, formats, path, full
        self.sizes = FULL if full else QUICK if place.is_cuda else SMALL
        self.deadline = time.monotonic() + 60 * minutes
        self.console = Console()
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.cells: dict[str, Any] = self.results.setdefault("cells", {})
        self.code = digest()
        self._engine: tuple[tuple[str, str], Engine] | None = None

    def measure(self) -> list[str]:
        """Measures what is missing; the keys of cells that are left."""
        begun = time.monotonic()
        self.results.update(machine=machine_facts(), software=software_facts() | {"triton": triton.__version__})
        self.results.update(gpu=gpu_facts(self.place), date=datetime.now(UTC).isoformat(timespec="seconds"))
        if self.results.get("probe", {}).get("code") != self.code:
            self.results["probe"] = probe(self.place) | {"code": self.code}
            self._write()
        todo = [cell for cell in self.list() if not self._has(cell.key)]
        left: list[str] = []
        columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("", total=len(todo))
            for cell in todo:
                if time.monotonic() > self.deadline:
                    left.append(cell.key)
                    continue
                bar.update(task, description=cell.key)
                self._do(cell)
                bar.advance(task)
        self._close()
        self.results["seconds"] = round(self.results.get("seconds", 0.0) + time.monotonic() - begun, 1)
        self._write()
        return left

    def list(self) -> Iterator[Cell]:
        """All cells, the most telling first."""
        s = self.sizes
        for format in self.formats:
            for shape in self.shapes:
                both = shape, format
                for context in s.contexts:
                    for count in s.sequences:
                        key = f"decode/{shape}/{format}/{count}x{context}"
                        yield Cell(key, lambda e, n=count, c=context: self._decode(e, n, c), both)
                for tokens in s.chunks:
                    key = f"prefill/{shape}/{format}/{tokens}"
                    yield Cell(key, lambda e, n=tokens: prefill(e, 0, n, self.results["probe"]), both)
                for count in (s.sequences[0], s.sequences[-1]):
                    pieces = [(row, s.contexts[0] - 1, 1) for row in range(count)]
                    yield Cell(f"kernels/{shape}/{format}/{count}", lambda e, p=pieces: kernels(e, p), both)
        for shape in self.shapes:
            for count in s.beside:
                for context in s.contexts[:1]:
                    key = f"transformers/{shape}/{count}x{context}"
                    yield Cell(key, lambda _, a=(shape, count, context): self._reference(*a))
        for count in s.exact:
            for format in self.formats:
                for shape in self.shapes:
                    for name in shapes_of(shape):
                        key = f"exactness/{shape}/{format}/{name}/{count}"
                        yield Cell(
                            key, lambda _, a=(shape, format, name, count): exactness(self.place, *a, full=self.full)
                        )

    def table(self) -> str:
        """The decode, prefill and exactness cells in a few words each."""
        lines = []
        for key, cell in self.cells.items():
            if "error" in cell or "skipped" in cell:
                lines.append(f"{key}: {cell.get('error') or cell.get('skipped')}")
            elif "of_limit" in cell:
                lines.append(f"{key}: {cell['step_ms']['median']:.3f} ms, {cell['of_limit']:.0%} of the limit")
            elif cell.get("cost") is not None:
                lines.append(f"{key}: {cell['cost']:+.1%} of free tiles, {cell['ours_to_cublas']:.2f} of cuBLAS's time")
            elif "step_ms" in cell:
                lines.append(f"{key}: {cell['step_ms']['median']:.3f} ms")
        return "\n".join(lines)

    def _has(self, key: str) -> bool:
        return self.cells.get(key, {}).get("code") == self.code and "error" not in self.cells[key]

    def _do(self, cell: Cell) -> None:
        begun = time.monotonic()
        try:
            found = cell.measure(self._engine_of(*cell.needs) if cell.needs else self._close())
        except Exception as error:  # one cell's fault is a result; the others are measured
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        found |= {"code": self.code, "seconds": round(time.monotonic() - begun, 2), "clocks": clocks()}
        self.cells[cell.key] = found
        self._write()
        self.place.wait()  # a fault of the device ends the run, its cell in the file

    def _decode(self, engine: Engine, sequences: int, context: int) -> dict[str, Any]:
        if sequences > engine.rows:
            return {"skipped": f"the device's memory holds {engine.rows} such sequences"}
        return decode(engine, sequences, context, self.results["probe"])

    def _reference(self, shape: str, sequences: int, context: int) -> dict[str, Any]:
        if reason := reference.missing():
            return {"skipped": reason}
        return reference.reference(self.place, shape, sequences, context)

    def _engine_of(self, shape: str, format: str) -> Engine:
        if self._engine is None or self._engine[0] != (shape, format):
            self._close()
            model = random_model(config_of(shape), format, self.place.device)
            most, tokens = max(self.sizes.contexts), max(*self.sizes.chunks, *self.sizes.sequences)
            length = max(most, *self.sizes.chunks)
            rows = self._rows(model, length)
            self._engine = (shape, format), Engine(model, self.place, rows=rows, length=length, tokens=tokens)
        return self._engine[1]

    def _rows(self, model: Any, length: int) -> int:
        """As many sequences as fit, at most those that are asked for."""
        item = sum(kind.block_bytes(64, 2) for kind in model.cache_spec())
        fits = (self.place.free_bytes() - RESERVE) // (item * -(-length // 64)) if self.place.is_cuda else 1 << 20
        return max(1, min(max(self.sizes.sequences), fits))

    def _close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None
        gc.collect()
        if self.place.is_cuda:
            torch.cuda.empty_cache()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(part, self.path)


def gpu_facts(place: Place) -> dict[str, Any]:
    if not place.is_cuda:
        return {"name": "none: Triton's interpreter, whose times mean nothing"}
    found = torch.cuda.get_device_properties(0)
    return {
        **{"name": found.name, "sm": f"{found.major}{found.minor}", "processors": found.multi_processor_count},
        **{"memory_bytes": found.total_memory, "l2_bytes": found.L2_cache_size, "cuda": torch.version.cuda},
        "clocks": clocks(),
    }


def digest() -> str:
    """Of the code that is measured: cells of other code are measured again."""
    found = hashlib.sha256()
    for folder in (ROOT / "src" / "kvasir", ROOT / "benchmarks" / "gpu"):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def check(shapes: list[str]) -> None:
    if unknown := set(shapes) - set(ALL_SHAPES):
        raise SystemExit(f"unknown shapes: {', '.join(sorted(unknown))}; there are {', '.join(ALL_SHAPES)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Padding rows compute with whatever memory holds, and the interpreter's NumPy warns of it."""
    import numpy as np

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


__all__ = ["Run", "check", "quiet"]
