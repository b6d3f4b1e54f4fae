"""API keys: owner, scopes, service class, share and limits; the file that defines them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec
from starlette.requests import HTTPConnection

from kvasir.errors import ConfigError
from kvasir.types import ServiceClass

MAX_KEYS = 10_000
MAX_FILE = 16 << 20  # bytes
MOST = 1_000_000_000  # of anything per minute
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeyScope(StrEnum):
    """inference: to have something computed; management: to change what is served; special_tokens: to write control
    tokens into a conversation. Read-only requests need none."""

    INFERENCE = "inference"
    MANAGEMENT = "management"
    SPECIAL_TOKENS = "special_tokens"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None: no limit of its own. Tokens count prompts and generated tokens together. max_class:
    the best class that its requests may have."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    max_class: ServiceClass = ServiceClass.INTERACTIVE

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise ConfigError(f"{name} is {value}", f"expected 1 to {MOST}")

    def divided(self, count: int) -> KeyLimits:
        """The share of one of `count` servers, rounded down, but at least 1."""
        names = ("requests_per_minute", "tokens_per_minute", "concurrent")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: max(1, value // count) for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class Key:
    """name: the tenant, in logs, shares and cache namespaces. slo: the default class of its requests. weight: its share
    relative to other keys of a class. secret_sha256: digest of a secret that the server does not know; `secret` is
    empty then."""

    secret: str
    name: str
    slo: ServiceClass = ServiceClass.INTERACTIVE
    weight: float = 1.0
    limits: KeyLimits = KeyLimits()
    scopes: frozenset[KeyScope] = frozenset((KeyScope.INFERENCE,))
    secret_sha256: str = ""

    def __post_init__(self) -> None:
        if bool(self.secret) == bool(self.secret_sha256):
            raise ConfigError(f"key {self.name!r:.80}: expected either key or secret_sha256", "give one of them")
        if self.secret_sha256:
            if not _SHA256.fullmatch(self.secret_sha256):
                raise ConfigError(f"key {self.name!r:.80}: secret_sha256 is malformed", "expected 64 hex digits")
        elif len(self.secret) < 8 or not self.secret.isascii() or not self.secret.isprintable() or " " in self.secret:
            raise ConfigError("an API key is too weak or malformed", "use 8 or more printable ASCII characters")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"a key is named {self.name!r:.80}", "expected 1 to 64 of A-Z a-z 0-9 . _ -")
        if not 0.001 <= self.weight <= 1000:
            raise ConfigError(f"key {self.name}: weight is {self.weight}", "expected 0.001 to 1000")
        if self.slo.rank < self.limits.max_class.rank:
            raise ConfigError(f"key {self.name}: its class {self.slo.value} is above its max_class", "lower the class")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret."""
        return bytes.fromhex(self.secret_sha256) or hashlib.sha256(self.secret.encode()).digest()

    def __repr__(self) -> str:
        return f"Key({self.name})"  # the secret must not appear in logs


def check_distinct(keys: Sequence[Key]) -> None:
    """Raises ConfigError for a key or a name that occurs twice."""
    for what, values in (("key", [k.digest for k in keys]), ("name", [k.name for k in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"two API keys have the same {what}", f"each {what} must be unique")


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    max_class: ServiceClass = ServiceClass.INTERACTIVE


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    key: str = ""
    secret_sha256: str = ""
    scopes: frozenset[KeyScope] = frozenset((KeyScope.INFERENCE,))
    service_class: ServiceClass | None = msgspec.field(name="class", default=None)
    weight: float = 1.0
    limits: _Limits = msgspec.field(default_factory=_Limits)


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a JSON file that only its owner may read or write:

        [{"key": "...", "name": "ann", "scopes": ["inference", "management"], "class": "batch", "weight": 2,
          "limits": {"requests_per_minute": 60, "tokens_per_minute": 100000, "concurrent": 4, "max_class": "batch"}}]

    `secret_sha256` with 64 hex digits may replace `key`. All fields but these and `name` are optional: the default
    class is the best one allowed, the default scope is inference. A key without scopes may only read, for example
    /metrics. Raises ConfigError.
    """
    try:
        entries = msgspec.json.decode(read_private(path), type=list[_Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", "expected a list of keys") from None
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{path} has {len(entries)} keys", f"expected 1 to {MAX_KEYS}")
    try:
        keys = tuple(_to_key(entry) for entry in entries)
        check_distinct(keys)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.hint) from None
    return keys


def _to_key(entry: _Entry) -> Key:
    limits = KeyLimits(**msgspec.structs.asdict(entry.limits))
    slo = entry.service_class or limits.max_class
    return Key(entry.key, entry.name, slo, entry.weight, limits, entry.scopes, entry.secret_sha256.lower())


def read_private(path: Path, what: str = "API keys") -> bytes:
    """The bytes of a regular file that others cannot access. what: it holds. The open file is checked, so it cannot be
    swapped between check and read. Raises ConfigError."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE:
                raise ConfigError(f"{path} is not a regular file, or is too large", f"expected a file with {what}")
            if facts.st_mode & 0o077:
                raise ConfigError(f"{path} is accessible to other users", f"chmod 600 {path}")
            return file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", f"expected a file with {what}") from None


def _open_at_once(path: str, flags: int) -> int:
    """Opens without blocking if the file is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def owner_of(request: HTTPConnection) -> str:
    """The name of the key that a request came with; "" without keys."""
    key: Key | None = request.scope["state"].get("key")
    return key.name if key else ""
