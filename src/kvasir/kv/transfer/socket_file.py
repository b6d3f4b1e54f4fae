"""Socket files that only this user can connect to: of mode 0600, in a folder of mode 0700."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from kvasir.errors import ConfigError
from kvasir.kv.tiers.folder import check_private, make_private

MAX_PATH = 100  # bytes; every system accepts socket names of this length


def check_path(path: Path) -> None:
    """Raises ConfigError if the path is too long for a socket, or its folder is not private."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(f"{path} is too long for a socket's name", f"at most {MAX_PATH} bytes")
    if path.parent.exists():
        check_private(path.parent)


def listen_private(path: Path) -> socket.socket:
    """A listening socket file of mode 0600 in a folder of mode 0700. Raises ConfigError if the path is unusable, or if
    another process listens there."""
    check_path(path)
    make_private(path.parent)
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))  # the private folder protects it until the mode is set
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as e:
        listener.close()
        raise ConfigError(f"{path}: {e.strerror}") from None
    return listener


def _remove_dead(path: Path) -> None:
    """Removes the socket of a dead server. Raises ConfigError if a server is alive or the file is not a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise ConfigError(f"{path} is in use by another engine", "choose another path")
