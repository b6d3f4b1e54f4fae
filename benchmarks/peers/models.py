"""Makes the models for all engines: real shapes, random weights, in every format.

    python -m benchmarks.peers.models                      all models, into .peers/models
    python -m benchmarks.peers.models --only qwen3-0.6b

A model is a folder of bfloat16 safetensors, which is converted to a bf16 GGUF file; llama.cpp quantizes that file.
Models of other families (family_shapes.py) are GGUF files of one type, made without llama.cpp:

    python -m benchmarks.peers.models --only gemma-4-e2b
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import random_gguf
from benchmarks.peers.environments import llama_bin, llama_python, missing_llama
from benchmarks.peers.family_shapes import SHAPES, Shape
from benchmarks.peers.places import PEERS, ROOT, SHARED, PeerError

NAMES = ("qwen3-0.6b", "llama-1b")
QUANTIZED = ("Q4_K_M", "Q8_0", "Q4_0")
STORIES = SHARED / "models" / "gguf" / "stories260K-F32.gguf"


def model_folder(folder: Path, name: str) -> Path:
    return folder / "models" / name


def model_gguf(folder: Path, name: str, kind: str) -> Path:
    """kind: bf16 or one of QUANTIZED."""
    return STORIES if name == "stories260K" else folder / "models" / f"{name}-{kind}.gguf"


def make(folder: Path, name: str) -> None:
    """Makes the files that do not exist yet. Raises PeerError."""
    tools = SHARED / "bench"
    if not tools.exists():
        raise PeerError(f"{tools} does not exist: it contains the scripts that make these models")
    where, bf16 = model_folder(folder, name), model_gguf(folder, name, "bf16")
    where.parent.mkdir(parents=True, exist_ok=True)
    _file(where / "model.safetensors", lambda _: _run(sys.executable, tools / "make_bench_model.py", name, where))
    _file(bf16, lambda part: _run(sys.executable, tools / "hf_to_gguf.py", where, part))
    for kind in QUANTIZED:
        _file(model_gguf(folder, name, kind), lambda part, kind=kind: _quantize(folder, bf16, part, kind))


def make_family(folder: Path, shape: Shape) -> None:
    """Makes the file if it does not exist yet."""
    path = model_gguf(folder, shape.name, shape.kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    args = shape.architecture, shape.add, shape.tensors(), shape.kind, shape.layers
    _file(path, lambda part: random_gguf.write(part, *args))


def _quantize(folder: Path, bf16: Path, to: Path, kind: str) -> None:
    if missing := missing_llama(folder):
        raise PeerError(missing)
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(llama_bin(folder))}
    _run(llama_python(folder), "-m", "benchmarks.peers.workers.llama_quantize", bf16, to, kind, env=env)


def _file(path: Path, make: Callable[[Path], None]) -> None:
    """Makes a file under a temporary name first, so that an incomplete file is never used."""
    if path.exists():
        return
    part = path.with_name(path.name + ".part")
    make(part)
    if part.exists():
        part.rename(path)
    print(f"made {path}", flush=True)


def _run(*command: object, env: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    if subprocess.run(["nice", *words], cwd=ROOT, env=env, stdout=subprocess.DEVNULL).returncode:
        raise PeerError(f"command failed: {' '.join(words)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=PEERS, help="folder of the peers")
    parser.add_argument(
        "--only", action="append", choices=(*NAMES, *SHAPES), help="default: those of benchmarks.peers.run"
    )
    args = parser.parse_args()
    try:
        for name in args.only or NAMES:
            if name in SHAPES:
                make_family(args.dir.resolve(), SHAPES[name])
            else:
                make(args.dir.resolve(), name)
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
