"""The `tokenizer.ggml.*` keys of a GGUF as one validated value."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.text.special_tokens import END_OF_TEXT

PREFIX = "tokenizer.ggml."

# The values of `token_type`, which are SentencePiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MAX_TOKEN_CHARS = 4096  # the longest in use have a few hundred; the time to build merges is quadratic in it
NO_TOKEN = 0xFFFFFFFF  # some converters write this for "none"


@dataclass(frozen=True)
class Vocab:
    """`tokens`, `scores` and `kinds` are parallel and indexed by id. `name` is the model's name in lower case."""

    model: str
    pre: str
    name: str
    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    metadata: Mapping[str, object]

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> "Vocab":
        """Raises `ModelFileError` for missing keys, wrong types, unequal lengths and duplicate tokens."""
        model = _string(metadata, PREFIX + "model")
        tokens = _tokens(metadata)
        name = metadata.get("general.name", "")
        return cls(
            model=model,
            pre=_pre(metadata) if model == "gpt2" else "",
            name=name.lower() if isinstance(name, str) else "",
            tokens=tokens,
            scores=_scores(metadata, len(tokens), required=model in ("llama", "t5")),
            kinds=_kinds(metadata, len(tokens)),
            metadata=metadata,
        )

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def typed_tokens(self) -> Iterator[tuple[str, int]]:
        return zip(self.tokens, self.kinds, strict=True)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{PREFIX}{key} of the GGUF is {type(value).__name__}, expected a bool")
        return value

    def special_id(self, role: str, default: int | None) -> int | None:
        """The id in `<role>_token_id`, or `default` if the key is absent and the vocabulary has that id."""
        key = f"{PREFIX}{role}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{key} of the GGUF is {type(value).__name__}, expected an integer")
        if value in (NO_TOKEN, -1):
            return None
        if not 0 <= value < len(self.tokens):
            raise ModelFileError(f"{key} of the GGUF is {value}, but there are {len(self.tokens)} tokens")
        return value

    def merges(self) -> list[tuple[str, str]]:
        """The merges in order of rank; both halves and the result of each are tokens."""
        key = PREFIX + "merges"
        pairs = []
        for line in _array(self.metadata, key):
            if not isinstance(line, str):
                raise ModelFileError(f"{key} of the GGUF holds {type(line).__name__}, expected strings")
            cut = line.find(" ", 1)
            left, right = line[:cut], line[cut + 1 :]
            if cut < 0 or not (left in self.ids and right in self.ids and left + right in self.ids):
                raise ModelFileError(
                    f"{key} of the GGUF holds {line[:80]!r}, which does not join two tokens to a third"
                )
            pairs.append((left, right))
        return pairs

    def charsmap(self) -> bytes:
        """SentencePiece's compiled table of replacements: size of a double array (u32, bytes), the array, strings."""
        key = PREFIX + "precompiled_charsmap"
        if key not in self.metadata:
            return b""
        value = self.metadata[key]
        try:
            table = value if isinstance(value, bytes) else bytes(int(b) & 0xFF for b in _array(self.metadata, key))
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelFileError(f"{key} of the GGUF is not an array of bytes") from error
        _check_charsmap(table, key)
        return table


def _check_charsmap(table: bytes, key: str) -> None:
    """The library trusts the stated size of the double array, up to 4 GiB, and allocates twice as much."""
    size = int.from_bytes(table[:4], "little")
    if table and (size % 4 or not 4 <= size <= len(table) - 4):
        raise ModelFileError(
            f"{key} has an array of {size} bytes in a table of {len(table)}", "the tokenizer's file is damaged"
        )


def _string(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise ModelFileError(f"the GGUF has no {key}" if value is None else f"{key} of the GGUF is not a string")
    return value


def _pre(metadata: Mapping[str, object]) -> str:
    if PREFIX + "pre" not in metadata:
        raise UnsupportedModel(
            f"the GGUF does not name its pre-tokenizer ({PREFIX}pre), so its token ids are unknown",
            "convert the model again with a current converter, or use its Hugging Face folder",
        )
    return _string(metadata, PREFIX + "pre")


def _array(metadata: Mapping[str, object], key: str) -> list:
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"the GGUF has no {key}")
    tolist = getattr(value, "tolist", None)  # arrays of numbers are numpy arrays
    value = tolist() if callable(tolist) else value
    if not isinstance(value, list | tuple):
        raise ModelFileError(f"{key} of the GGUF is {type(value).__name__}, expected an array")
    return list(value)


def _tokens(metadata: Mapping[str, object]) -> tuple[str, ...]:
    key = PREFIX + "tokens"
    tokens = _array(metadata, key)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelFileError(f"{key} of the GGUF is empty or holds values that are not strings")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise ModelFileError(f"{key} of the GGUF holds a token of {longest} characters, over {MAX_TOKEN_CHARS}")
    named = tuple(token or f"[EMPTY_{i}]" for i, token in enumerate(tokens))
    if metadata.get(PREFIX + "model") == "rwkv" and named[0] in named[1:]:  # its marker is named like a text
        named = (END_OF_TEXT, *named[1:])
    if len(set(named)) != len(named):
        raise ModelFileError(f"{key} of the GGUF holds a token twice")
    return named


def _scores(metadata: Mapping[str, object], count: int, required: bool) -> tuple[float, ...]:
    key = PREFIX + "scores"
    if key not in metadata and not required:
        return (0.0,) * count
    scores = _of_length(metadata, key, count)
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise ModelFileError(f"{key} of the GGUF holds values that are not finite numbers")
    return tuple(float(score) for score in scores)


def _kinds(metadata: Mapping[str, object], count: int) -> tuple[int, ...]:
    key = PREFIX + "token_type"
    if key not in metadata:
        return (NORMAL,) * count
    kinds = _of_length(metadata, key, count)
    if not all(type(kind) is int and 0 <= kind <= BYTE for kind in kinds):
        raise ModelFileError(f"{key} of the GGUF holds values other than the types 1 to {BYTE}")
    return tuple(kind or NORMAL for kind in kinds)


def _of_length(metadata: Mapping[str, object], key: str, count: int) -> list:
    values = _array(metadata, key)
    if len(values) != count:
        raise ModelFileError(f"{key} of the GGUF has {len(values)} entries for {count} tokens")
    return values
