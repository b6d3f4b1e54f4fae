"""Short names of models, such as qwen3:0.6b: the package's table, which a user's file extends.

    qwen3            the size that the table gives, as qwen3:latest
    qwen3:0.6b       a repository of the hub, in the table's quantization
    qwen3:0.6b-q4_0  the same repository's file in another quantization
    qwen3:q8_0       the first, in another quantization

The user's file, names.toml in the folder `config_dir`, has lines such as "mine" = "org/name:Q4_K_M".
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from kvasir.environment import config_dir
from kvasir.errors import ConfigError
from kvasir.store.names import LATEST, is_name
from kvasir.weights.find import ASSETS, BUNDLED

_TABLE = ASSETS / "names.toml"
_MAX_BYTES = 1 << 20
_QUANTIZATION = re.compile(r"(i?q|tq)\d[a-z0-9_]*|bf16|f(p)?(16|32)|mxfp4")
_MAX_STEPS = 8  # from a name to another


def expand(ref: str) -> str | None:
    """The place of a short name, mostly `org/name:QUANTIZATION`; None if neither table has it. Raises ConfigError for
    a user's file that is not such a table."""
    if "/" in ref or not is_name(ref):
        return None
    table, text = _all_names(), ref.lower().removesuffix(f":{LATEST}")
    for step in range(_MAX_STEPS):
        found = table.get(text) or _quantized(text, table)
        if found is None and step:
            raise ConfigError(f"the short name {ref} leads to {text}, which is none", f"correct {_users_file()}")
        if found is None or "/" in found or found in BUNDLED:
            return found
        text = found.lower()
    raise ConfigError(f"the short name {ref} leads to names without end", f"correct {_users_file()}")


def known() -> list[str]:
    """All short names."""
    return sorted(_all_names())


def _quantized(text: str, table: dict[str, str]) -> str | None:
    """The repository of `name:size-quantization` or `name:quantization`."""
    name, _, tag = text.partition(":")
    size, dash, quantization = tag.partition("-")
    base, wanted = (f"{name}:{size}", quantization) if dash else (name, tag)
    target = table.get(base)
    if target is None or not _QUANTIZATION.fullmatch(wanted):
        return None
    if "/" not in target:  # the name's own size
        target = table.get(target.lower(), "")
    return f"{target.partition(':')[0]}:{wanted.upper()}" if "/" in target else None


def _all_names() -> dict[str, str]:
    path = _users_file()
    return {**_read(_TABLE), **(_parsed(path) if path.is_file() else {})}


def _users_file() -> Path:
    return config_dir() / "names.toml"


@cache
def _read(path: Path) -> dict[str, str]:
    return _parsed(path)


def _parsed(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES >> 20} MiB", "shorten it")
        table = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", 'its lines are such as "mine" = "org/name:Q4_K_M"'
        ) from None
    for name, target in table.items():
        if not is_name(name) or "/" in name or not isinstance(target, str) or not target:
            problem = f"{path}: {name[:80]!r} is no short name of a model"
            raise ConfigError(problem, 'write "name" or "name:size" = "org/name:QUANTIZATION"')
    return {name.lower(): target for name, target in table.items()}
