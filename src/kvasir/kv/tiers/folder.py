"""Private folders: only this user can write or read their files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvasir.errors import ConfigError


def check_private(path: Path) -> None:
    """Raises ConfigError unless `path` is a folder (not a link), owned by this user and closed to other users."""
    try:
        info = os.lstat(path)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path} is not a folder", "a symbolic link is refused too: give the folder itself")
    if info.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user")
    if info.st_mode & 0o077:
        raise ConfigError(f"{path} is accessible to other users", f"chmod 700 {path}")


def make_private(path: Path) -> None:
    """Creates the folder with mode 0700 if missing, and checks it. Raises ConfigError as `check_private`, or if it
    cannot be created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{path} cannot be created: {e.strerror}") from None
    check_private(path)
