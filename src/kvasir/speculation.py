"""Speculation as users choose it: which drafters propose ids, and how many. No choice changes a token of an answer.

    auto                        ngram and suffix
    off
    ngram                       prompt lookup: what followed the last ids earlier in the sequence
    suffix                      what followed them in earlier answers to the same key
    draft=MODEL                 a smaller model, or an assistant of Gemma 4
    eagle3=PATH                 an EAGLE-3 head
    dflash=PATH                 a DFlash or DSpark drafter, which guesses a block of ids at once
    mtp                         the heads for multi-token prediction in the model's checkpoint

Several are joined by commas; the first that has a good guess is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError, InvalidRequest, quoted

LOOKUPS = ("ngram", "suffix")  # need ids only
WEIGHTS = ("draft", "eagle3", "dflash", "mtp")  # are computed by the runner; an engine has one of them at most
METHODS = (*LOOKUPS, *WEIGHTS)
HEADS = ("eagle3", "dflash")  # have a checkpoint that is no model's
SOURCES = ("draft", *HEADS)  # are read from a model or a path
MAX_DRAFTED = 16  # drafted ids of a row in a step: each needs a row of logits
QUANTIZED = ("q8", "q4", "none")
EXPECTED = "expected auto, off, or a list of ngram, suffix, draft=MODEL, eagle3=PATH, dflash=PATH and mtp"


@dataclass(frozen=True, slots=True)
class Drafters:
    """The drafters of an engine. methods: names of METHODS in the order in which they are asked. source: the model or
    path of the one that has weights."""

    methods: tuple[str, ...] = ()
    source: str = ""

    @property
    def weights(self) -> str:
        """The method that the runner computes, "" for none."""
        return next((name for name in self.methods if name in WEIGHTS), "")


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request wants of the engine's drafters. methods: those to ask; None for all, () for none. most: drafted
    ids of a step, at most; None for the engine's limit."""

    methods: tuple[str, ...] | None = None
    most: int | None = None


def parse(text: str) -> Drafters:
    """The drafters that an option names. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if parts == ["off"]:
        return Drafters()
    if parts == ["auto"]:
        return Drafters(LOOKUPS)
    methods, sources = [], []
    for part in parts:
        name, _, source = part.partition("=")
        if name not in METHODS or name in methods:
            raise ConfigError(f"speculate is {quoted(text)}", EXPECTED)
        if (name in SOURCES) != bool(source):
            raise ConfigError(f"speculate has {quoted(part)}", EXPECTED)
        methods.append(name)
        sources += [source] if source else []
    if sum(name in WEIGHTS for name in methods) > 1:
        raise ConfigError(f"speculate is {quoted(text)}", "an engine has one drafter with weights at most")
    return Drafters(tuple(methods), "".join(sources))


def check_own(drafters: Drafters, dtype: str | None, quantize: str | None, length: int | None) -> None:
    """Checks the options that a drafter with weights has of its own: draft_dtype, draft_quantize, draft_max_model_len.
    Raises ConfigError for a value that is out of range, and for one that no drafter of the engine takes."""
    if quantize is not None and quantize not in QUANTIZED:
        raise ConfigError(f"draft_quantize is {quoted(quantize)}", f"expected one of {', '.join(QUANTIZED)}")
    if length is not None and length < 1:
        raise ConfigError(f"draft_max_model_len is {length}", "expected at least 1")
    given = {"draft_dtype": dtype, "draft_quantize": quantize}
    for name, value in given.items():
        if value is not None and not drafters.source:
            hint = "it is for draft=MODEL, eagle3=PATH or dflash=PATH, which have files of their own; leave it out"
            raise ConfigError(f"{name} without such a drafter", hint)
    if length is not None and not drafters.weights:
        raise ConfigError(
            "draft_max_model_len without a drafter that has weights",
            "add draft=MODEL, eagle3=PATH, dflash=PATH or mtp to speculate",
        )


def wanted(value: Any) -> Speculation:
    """What a request's `speculation` asks for: {"method": a name, a list of names, "auto" or "off",
    "num_speculative_tokens": a number}, in the range of what an engine can do. Raises InvalidRequest."""

    def refuse(what: str, hint: str) -> InvalidRequest:
        return InvalidRequest(what, hint, param="speculation")

    if not isinstance(value, dict):
        raise refuse("speculation is not an object", 'for example {"method": "ngram"}')
    if unknown := set(value) - {"method", "num_speculative_tokens"}:
        raise refuse(f"speculation has {quoted(min(unknown))}", "it takes method and num_speculative_tokens")
    most = value.get("num_speculative_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise refuse(f"num_speculative_tokens is {quoted(most)}", "expected a number from 0 on")
    most = None if most is None else min(most, MAX_DRAFTED)
    method = value.get("method", "auto")
    if method in ("auto", None):
        return Speculation(None, most)
    names = () if method == "off" else (method,) if isinstance(method, str) else method
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name in METHODS for name in names):
        raise refuse(f"speculation has the method {quoted(method)}", f"expected auto, off, or of {', '.join(METHODS)}")
    return Speculation(tuple(dict.fromkeys(names)), most)
