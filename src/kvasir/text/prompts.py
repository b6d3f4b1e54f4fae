"""The prompts of an embedding model: texts that are put before its inputs, by name ("query", "document").

Source: `config_sentence_transformers.json` of sentence-transformers folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kvasir.errors import InvalidRequest, ModelFileError, quoted
from kvasir.json_file import read_json_object

FILE = "config_sentence_transformers.json"
_MOST = 1024  # prompts
_LONGEST = 1 << 16  # characters


@dataclass(frozen=True, slots=True)
class Prompts:
    """named: prompts by name. default: the name of the one for inputs whose request names none, "" for none."""

    named: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default: str = ""

    def of(self, name: str | None) -> str:
        """The prompt with a name, the default one for None. Raises InvalidRequest for an unknown name."""
        if name is None:
            return self.named.get(self.default, "")
        if name not in self.named:
            known = f"it has {', '.join(self.named)}" if self.named else "it has none; leave it out"
            raise InvalidRequest(f"this model has no prompt {quoted(name)}", known, param="prompt_name")
        return self.named[name]

    def first(self, *names: str) -> str:
        """The first of these prompts that the model has, else the default one."""
        return next((self.named[name] for name in names if name in self.named), self.of(None))


def read_prompts(folder: Path) -> Prompts:
    """The prompts of a folder, none if it does not state any. Raises ModelFileError for a malformed file."""
    path = folder / FILE
    if not path.is_file():
        return Prompts()
    values = read_json_object(path)
    named, default = values.get("prompts") or {}, values.get("default_prompt_name") or ""
    if not isinstance(named, Mapping) or len(named) > _MOST or not all(_fits(text) for text in named.values()):
        raise ModelFileError(f"{path}: prompts is not an object with texts of moderate size")
    if not isinstance(default, str) or (default and default not in named):
        raise ModelFileError(f"{path}: default_prompt_name is {default!r:.80}", "expected the name of a prompt")
    return Prompts(MappingProxyType(dict(named)), default)


def _fits(text: object) -> bool:
    return isinstance(text, str) and len(text) <= _LONGEST and not any(0xD800 <= ord(c) < 0xE000 for c in text)
