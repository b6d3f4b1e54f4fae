"""Names of models: `[host/][namespace/]model[:tag]`, in Ollama's syntax.

    qwen3            qwen3:latest
    org/repo:Q4_K_M  a repository of the Hugging Face hub (host hf.co); the tag selects one of its GGUF files
    hf.co/org/repo   the same repository

Case is kept, but names that differ only in case are the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvasir.errors import InvalidRequest

LATEST = "latest"
HUB = "hf.co"
_HUBS = (HUB, "huggingface.co")
_MAX_PART = 96
_MAX_NAME = 200  # a name is also a file name
_PART = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{_MAX_PART - 1}}}")
_SCHEMES = ("https://", "http://")


@dataclass(frozen=True, slots=True)
class Name:
    """A well-formed name. host and namespace may be "". `str` is the form shown in lists."""

    model: str
    tag: str = LATEST
    namespace: str = ""
    host: str = ""

    @property
    def key(self) -> str:
        """Equal for names of the same model; valid as a file name and unambiguous, since no part contains a "+"."""
        host = self.host.lower() or (HUB if self.namespace else "")
        return "+".join((HUB if host in _HUBS else host, self.namespace, self.model, self.tag)).lower()

    @property
    def repository(self) -> str | None:
        """`org/repo` if the name refers to the hub, else None."""
        on_hub = self.namespace and (self.host.lower() in _HUBS or not self.host)
        return f"{self.namespace}/{self.model}" if on_hub else None

    def __str__(self) -> str:
        return "/".join(part for part in (self.host, self.namespace, self.model) if part) + f":{self.tag}"


def parse_name(text: str) -> Name:
    """Raises InvalidRequest for a malformed name."""
    for scheme in _SCHEMES:
        text = text.removeprefix(scheme)
    path, _, tag = text.partition(":") if ":" in text.rpartition("/")[2] else (text, "", LATEST)
    *places, model = path.split("/")
    if len(text) > _MAX_NAME or len(places) > 2 or not all(map(_is_part, (*places, model, tag))):
        raise InvalidRequest(
            f"{text[:_MAX_NAME]!r} is not a model's name",
            "expected [host/][namespace/]model[:tag], of letters, digits, '_', '-' and '.'",
            param="model",
        )
    host, namespace = ["", "", *places][-2:]
    return Name(model, tag, namespace, host)


def is_name(text: str) -> bool:
    try:
        return bool(parse_name(text))
    except InvalidRequest:
        return False


def _is_part(text: str) -> bool:
    return _PART.fullmatch(text) is not None and ".." not in text
