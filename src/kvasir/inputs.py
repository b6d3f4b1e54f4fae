"""The inputs of a sequence besides its token ids: embeddings, positions, a bias by distance, adapters.

    position    0    1    2    3    4    5    6    7
    ids         t0   t1   .    .    .    .    t6   t7
    span                  [ one content      ]            replaces the ids' embeddings, or is added to them
    adapter                         x, from 4 on ....

Keys and values at a position depend on all inputs up to it. Inputs that apply from the first position on make up the
`scope`: sequences of different scopes share no prefix. An input that begins later is a *mark* at its first position:
everything before it is the same as without it.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvasir.errors import InvalidRequest

HASH_BYTES = 32
MAX_ADAPTERS_OF_REQUEST = 8
MAX_ADAPTER_SCALE = 1e6

# Features of inputs that not every executor supports, with their names in error messages.
FEATURES = {
    "spans": "embeddings in the place of tokens",
    "added": "embeddings that are added to tokens",
    "layers": "embeddings at several layers",
    "both_ways": "spans that attend in both directions",
    "encoded": "an encoder's output for cross-attention",
    "positions": "explicit positions",
    "axes": "positions with three axes",
    "bias": "an attention bias by distance",
    "second": "a second text with a token type of its own",
    "adapters": "several adapters, or an adapter with a scale or a first position",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Embeddings at the positions [start, start + length): an image, a clip of audio, or a part of one.

    content: hash of the encoder's input. first: index of the span's first embedding in those of the content. added: the
    embeddings are added to those of the ids and do not replace them. layers: before these, further embeddings of the
    same content are added to the hidden state. both_ways: its positions attend to each other in both directions, so a
    step computes the whole span or nothing of it.
    """

    start: int
    length: int
    content: bytes
    first: int = 0
    added: bool = False
    layers: tuple[int, ...] = ()
    both_ways: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Source:
    """The encoder input `data`, which gives `length` embeddings. content: SHA-256 of `data`, the key of the output."""

    content: bytes
    length: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter, multiplied by `scale`, for the tokens from position `start` on.

    content: hash of what it computes; path: of its files; nbytes: of its tensors. The engine fills these in when it
    takes the request, which keeps them if the name is loaded anew or unloaded."""

    name: str
    scale: float = 1.0
    start: int = 0
    content: str = ""
    path: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """All inputs besides ids and adapters. spans: ascending, without overlaps.

    positions: int32, one or three (`axes`) for each token of the prompt, which rotate its queries and keys; empty for
    0, 1, 2 ... Each later token gets the greatest position so far plus one, on all axes.
    bias: float32, indexed by the distance from a query back to a key, added to their attention score; the last value
    applies to all greater distances.
    encoded: hash of the content whose encoder output the cross-attention layers read.
    second: the position from which on tokens belong to the second text of a pair and have token type 1, 0 for none.
    """

    spans: tuple[Span, ...] = ()
    positions: bytes = b""
    axes: int = 1
    bias: bytes = b""
    encoded: bytes = b""
    second: int = 0

    def __bool__(self) -> bool:
        return bool(self.spans or self.positions or self.bias or self.encoded or self.second)


NONE = Inputs()


def asked(inputs: Inputs, adapters: Sequence[tuple[float, int]]) -> Iterator[str]:
    """The FEATURES that an executor needs for these inputs. adapters: (scale, start) of each."""
    spans = inputs.spans
    found = {
        "spans": any(not s.added for s in spans),
        "added": any(s.added for s in spans),
        "layers": any(s.layers for s in spans),
        "both_ways": any(s.both_ways for s in spans),
        "encoded": inputs.encoded,
        "positions": inputs.positions,
        "axes": inputs.positions and inputs.axes > 1,
        "bias": inputs.bias,
        "second": inputs.second,
        "adapters": len(adapters) > 1 or any(scale != 1.0 or start for scale, start in adapters),
    }
    return (name for name, wanted in found.items() if wanted)


def check(inputs: Inputs, adapters: Sequence[Adapter], prompt_len: int) -> None:
    """Raises InvalidRequest if an input or an adapter is invalid. prompt_len: in tokens."""
    end = 0
    for span in inputs.spans:
        if not end <= span.start < span.end <= prompt_len:
            where = f"[{span.start}, {span.end})"
            expected = f"expected ascending, disjoint spans within the prompt's {prompt_len} tokens"
            raise InvalidRequest(f"a span of embeddings at positions {where}", expected, "spans")
        if len(span.content) != HASH_BYTES:
            message = f"a content hash of {len(span.content)} bytes"
            raise InvalidRequest(message, f"expected {HASH_BYTES}", "spans")
        if list(span.layers) != sorted({*span.layers}) or min(span.layers, default=0) < 0:
            raise InvalidRequest(f"layers {span.layers} of a span", "expected ascending numbers >= 0", "spans")
        end = span.end
    if not 0 <= inputs.second < prompt_len:
        message = f"a second text that begins at position {inputs.second}"
        raise InvalidRequest(message, f"expected a position within the prompt's {prompt_len} tokens", "second")
    if len(inputs.encoded) not in (0, HASH_BYTES):
        message = f"a content hash of {len(inputs.encoded)} bytes"
        raise InvalidRequest(message, f"expected {HASH_BYTES}", "encoded")
    _check_positions(inputs, prompt_len)
    if len(inputs.bias) % 4 or not all(map(math.isfinite, _floats(inputs.bias))):
        raise InvalidRequest("the attention bias by distance is not a list of finite numbers", "give float32", "bias")
    if len(adapters) > MAX_ADAPTERS_OF_REQUEST:
        found = f"{len(adapters)} adapters for one request"
        raise InvalidRequest(found, f"expected at most {MAX_ADAPTERS_OF_REQUEST}", "adapters")
    for adapter in adapters:
        if not abs(adapter.scale) <= MAX_ADAPTER_SCALE or adapter.start < 0:  # also NaN
            found = f"an adapter with scale {adapter.scale} from position {adapter.start} on"
            expected = f"expected a scale of at most {MAX_ADAPTER_SCALE:g} and a position >= 0"
            raise InvalidRequest(found, expected, "adapters")


def check_sources(inputs: Inputs, sources: Sequence[Source]) -> None:
    """Raises InvalidRequest unless each content has exactly one source, with the right hash and enough embeddings."""
    lengths = {source.content: source.length for source in sources}
    if len(lengths) < len(sources):
        raise InvalidRequest("the same source is given twice", "give each content once", "sources")
    for source in sources:
        if sha256(source.data).digest() != source.content or source.length < 1:
            raise InvalidRequest(
                "the data of a source does not match its content hash",
                "set the hash to the SHA-256 of the data",
                "sources",
            )
    for span in inputs.spans:
        if not 0 <= span.first < span.first + span.length <= lengths.get(span.content, 0):
            last, found = span.first + span.length, lengths.get(span.content, 0)
            message = f"a span of embeddings {span.first} to {last}; its source gives {found}"
            raise InvalidRequest(message, "give a source with as many embeddings as the span has positions", "sources")
    if inputs.encoded and inputs.encoded not in lengths:
        raise InvalidRequest("the content for cross-attention has no source", "give its source", "sources")


def _check_positions(inputs: Inputs, prompt_len: int) -> None:
    if inputs.axes not in (1, 3):
        raise InvalidRequest(f"positions with {inputs.axes} axes", "expected 1 or 3", "positions")
    if not inputs.positions:
        return
    numbers, wanted = len(inputs.positions) / 4, prompt_len * inputs.axes
    if numbers != wanted:
        message = f"{numbers:g} positions for {prompt_len} tokens with {inputs.axes} axes"
        raise InvalidRequest(message, f"expected {wanted}", "positions")
    if min(_ints(inputs.positions)) < 0:
        raise InvalidRequest("a position is negative", "expected numbers >= 0", "positions")


def in_effect(adapters: Sequence[Adapter], position: int) -> tuple[tuple[str, float], ...]:
    """(content, scale) of the adapters that apply at a position, in their order."""
    return tuple((a.content, a.scale) for a in adapters if a.start <= position)


def scope(inputs: Inputs, adapters: Sequence[Adapter]) -> bytes:
    """A hash of the inputs that apply to the whole sequence; empty if there are none."""
    found = inputs.bias, inputs.encoded, in_effect(adapters, 0)
    return _hash(found) if any(found) else b""


def marks(inputs: Inputs, adapters: Sequence[Adapter]) -> dict[int, bytes]:
    """For each position where inputs begin, in ascending order, their hash. Sequences with equal ids, scopes and marks
    up to a position have equal keys and values up to it."""
    found: dict[int, list] = defaultdict(list)
    odd = {p: at for p, (at, usual) in enumerate(places(inputs)) if any(x != usual for x in at)}
    for span in inputs.spans:
        inside = [(p - span.start, odd.pop(p)) for p in range(span.start, span.end) if p in odd]
        how = span.first, span.added, span.layers, span.both_ways
        found[span.start].append((span.length, span.content, how, inside))
    for position, at in odd.items():
        found[position].append(at)
    for start in {a.start for a in adapters if a.start}:
        found[start].append(in_effect(adapters, start))
    if inputs.second:
        found[inputs.second].append("second")
    return {position: _hash(parts) for position, parts in sorted(found.items())}


def places(inputs: Inputs) -> Iterator[tuple[tuple[int, ...], int]]:
    """For each token with given positions: (the positions on all axes, the default position)."""
    numbers, axes, usual = _ints(inputs.positions), inputs.axes, 0
    for i in range(0, len(numbers), axes):
        at = tuple(numbers[i : i + axes])
        yield at, usual
        usual = max(usual, *(x + 1 for x in at))


def _hash(value: object) -> bytes:
    return sha256(repr(value).encode()).digest()


def _ints(data: bytes) -> array[int]:
    return array("i", data)


def _floats(data: bytes) -> array[float]:
    return array("f", data)
