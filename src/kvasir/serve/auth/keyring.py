"""KeyRing: the current keys of a server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir.serve.auth.keys import Key, check_distinct, read_keys

log = logging.getLogger("kvasir.serve")


class KeyRing:
    """Used on one event loop. A running request keeps the key that it came with."""

    def __init__(
        self,
        keys: Sequence[Key],
        changed: Callable[[Sequence[Key]], None],
        file: Path | None = None,
        plain: Sequence[Key] = (),
    ):
        """keys: those in use at first. changed: called with all keys whenever they change. file: read by `reload`.
        plain: the keys that no file holds."""
        self._file = file
        self._plain = plain
        self._changed = changed
        self._keys: Sequence[Key] = ()
        self._blind = secrets.token_bytes(32)
        self.take(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def named(self, name: str) -> Key | None:
        """The key of this name; None for "" while the server has no keys. Raises KeyError."""
        if not name and not self._keys:
            return None
        return self._by_name[name]

    def find(self, secret: bytes) -> Key | None:
        """The key of this secret. Looked up by a digest that outsiders cannot compute, so the lookup time reveals
        nothing."""
        return self._by_digest.get(self._blinded(hashlib.sha256(secret).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")

    async def reload(self) -> None:
        """Reads the file again. Raises ConfigError for an invalid file; the keys are unchanged then."""
        keys = await asyncio.to_thread(self._read)
        if keys != self._keys:
            before, after = {key.name for key in self._keys}, {key.name for key in keys}
            log.info("%d API keys; added: %d, removed: %d", len(keys), len(after - before), len(before - after))
            self.take(keys)

    def _read(self) -> Sequence[Key]:
        assert self._file is not None
        keys = (*read_keys(self._file), *self._plain)
        check_distinct(keys)
        return keys

    def take(self, keys: Sequence[Key]) -> None:
        """Replaces the keys."""
        self._keys = keys
        self._by_digest = {self._blinded(key.digest): key for key in keys}
        self._by_name = {key.name: key for key in keys}
        self._changed(keys)
