"""The folder of compiled kernels: private to this user, and one for each version of the kernels, of the compiler and of
the GPU. A process runs the machine code in it, so a folder that others can change is never used.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvasir.environment import kernels_dir

KEPT = 4  # folders of versions, the one in use included
_PREFIX = "triton-"


def sources_key(package: Path) -> str:
    """A hash of all sources of the package that contain Triton kernels."""
    found = hashlib.sha256()
    for path in sorted(package.glob("**/*.py")):
        text = path.read_bytes()
        if b"@triton.jit" in text:
            found.update(path.relative_to(package).as_posix().encode() + b"\0" + hashlib.sha256(text).digest())
    return found.hexdigest()[:16]


def kernel_folder(triton: str, target: str) -> tuple[Path, str]:
    """The folder for kernels that this version of Triton compiles for a target ("sm_90"), and a note for the user, or
    "". If the usual place cannot be used, it is a new folder that is removed when this process exits."""
    name = f"{_PREFIX}{triton}-{target}-{sources_key(Path(__file__).parents[1])}"
    try:
        base = kernels_dir()
        return _made(base, name), ""
    except _Unusable as reason:
        problem = str(reason)
    except (OSError, RuntimeError) as error:  # a RuntimeError: there is no home
        problem = getattr(error, "strerror", None) or str(error)
    fresh = Path(tempfile.mkdtemp(prefix="kvasir-kernels-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh, f"all kernels are compiled anew: {problem}; set KVASIR_KERNELS to a private folder"


class _Unusable(Exception):
    """A folder that must not be used; the message says why."""


def _made(base: Path, name: str) -> Path:
    """The folder `name` in `base`, both private, as the one used last. Raises _Unusable, OSError."""
    base.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (base, base / name):
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder)
    os.utime(base / name)
    _prune(base, name)
    return base / name


def _check(folder: Path) -> None:
    """Raises _Unusable if anyone but this user and root could change the folder's contents, or replace it."""
    if folder.is_symlink():
        raise _Unusable(f"{folder} is a link")
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise _Unusable(f"{folder} belongs to another user")
    if found.st_mode & 0o077:
        raise _Unusable(f"{folder} is open to other users")
    for parent in folder.resolve().parents:
        found = parent.stat()
        # In a folder with the sticky bit, others cannot rename what is not theirs.
        open_to_all = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or open_to_all:
            raise _Unusable(f"other users can replace what lies in {parent}")


def _prune(base: Path, name: str) -> None:
    """Removes the folders of other versions but for those used last."""
    with contextlib.suppress(OSError):
        others = [f for f in base.iterdir() if f.name.startswith(_PREFIX) and f.name != name and not f.is_symlink()]
        others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in others[KEPT - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)
