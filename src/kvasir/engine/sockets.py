"""The folder of an engine's socket: private to this user, and removed once the engine is connected.

Its name contains the id of the process that made it, so that the folder of a killed process is found and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from kvasir.environment import socket_base
from kvasir.errors import ConfigError

SOCKET = "engine.sock"
LONGEST_BASE = 60  # bytes; the whole path of a socket may have about 100
_NAME = re.compile(r"kvasir-engine-(\d+)-\w+")


def make_socket_path() -> Path:
    """A path for a socket in a new folder of mode 0700. Raises ConfigError if the folder cannot be made."""
    base = socket_base()
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = Path("/tmp")
    remove_stale(base)
    try:
        return Path(tempfile.mkdtemp(prefix=f"kvasir-engine-{os.getpid()}-", dir=base)) / SOCKET
    except OSError as error:
        hint = "set TMPDIR or XDG_RUNTIME_DIR to a writable folder"
        raise ConfigError(
            f"no folder for the engine's socket can be created in {base}: {error.strerror}", hint
        ) from error


def remove_socket(path: Path) -> None:
    """Removes the socket and its folder, if they exist. Connections stay open."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def remove_stale(base: Path) -> None:
    """Removes this user's socket folders if their maker is dead and nothing listens on the socket."""
    with contextlib.suppress(OSError):
        for folder in list(base.iterdir()):
            found = _NAME.fullmatch(folder.name)
            if found and _is_ours(folder) and not psutil.pid_exists(int(found[1])) and not _listens(folder / SOCKET):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    return False


def _listens(path: Path) -> bool:
    """Whether a process listens there. Also finds processes with other process ids, as in another container."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
