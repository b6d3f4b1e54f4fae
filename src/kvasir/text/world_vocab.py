"""RWKV's "world" vocabulary: tokens are strings of bytes, and a text takes the longest one that matches at each place.

Source: the published vocabulary file (rwkv_vocab_v20230424.txt of BlinkDL/RWKV-LM) and its reader. A line has an id,
the token as a literal of Python, and its number of bytes:

    257 b'\\x00\\x00' 2
    262 '\\n\\n' 2

Files of llama.cpp spell a token without quotes, with the same escapes. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvasir.errors import ModelFileError
from kvasir.text.byte_level import LETTERS
from kvasir.text.special_tokens import END_OF_TEXT
from kvasir.text.table import MAX_IDS

MAX_BYTES = 256  # of a token; the longest published one has 128
MAX_FILE_BYTES = 16 << 20

_LINE = re.compile(r"(\d{1,8}) (b?)('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\") (\d{1,8})")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_META = frozenset("\\.^$*+?()[]{}|")


def vocab_file(folder: Path) -> Path | None:
    """The vocabulary file in a model folder; None if there is none."""
    found = sorted(folder.glob("rwkv_vocab_v*.txt"))
    return found[0] if len(found) == 1 else None


def read_world(path: Path) -> dict[int, bytes]:
    """The bytes of each id. Raises ModelFileError for a malformed file."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelFileError(f"{path.name} has {path.stat().st_size} bytes", f"expected at most {MAX_FILE_BYTES}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name} is not UTF-8 text") from error
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.rstrip("\r"):
            continue
        match = _LINE.fullmatch(line.rstrip("\r"))
        token = match and _literal(match[3][1:-1], is_bytes=bool(match[2]))
        if not match or token is None or len(token) != int(match[4]) or int(match[1]) in tokens:
            raise ModelFileError(
                f"{path.name}: line {number} is {line!r:.80}", "expected a new id, a string and its number of bytes"
            )
        tokens[int(match[1])] = token
    return tokens


def _literal(text: str, *, is_bytes: bool) -> bytes | None:
    """The bytes of a literal of Python without its quotes; None if it has other escapes than repr writes."""

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1 and int(code[1:], 16) <= 0x10FFFF:
            return chr(int(code[1:], 16))
        if code in "\\'\"" or code in _NAMED:
            return _NAMED.get(code, code)
        raise ValueError(code)

    try:
        found = _ESCAPE.sub(plain, text)
        return found.encode("latin-1" if is_bytes else "utf-8")
    except ValueError:  # also of a character that cannot be encoded
        return None


def unescaped(text: str) -> bytes:
    """The bytes of a token as llama.cpp's files spell it: \\n, \\r, \\t and \\xAB, and any other character after a
    backslash stands for itself."""
    parts = re.split(r"\\(x[0-9a-fA-F]{2}|.)", text, flags=re.DOTALL)
    found = bytearray()
    for i, part in enumerate(parts):
        if i % 2 == 0:
            found += part.encode()
        elif len(part) == 3:
            found.append(int(part[1:], 16))
        else:
            found += _NAMED.get(part, part).encode()
    return bytes(found)


def world_tokenizer(tokens: Mapping[int, bytes], controls: Mapping[int, str]) -> Tokenizer:
    """A tokenizer of these tokens. controls: the texts of ids that are markers, not text.

    The library has no such model: its splitter takes the longest token, as a pattern over byte letters, and a table of
    words gives the ids. Raises ModelFileError for tokens that are empty, too long, twice there, or lack a byte.
    """
    spelled: dict[str, int] = {}
    for i, token in tokens.items():
        if not 0 < len(token) <= MAX_BYTES or not 0 <= i < MAX_IDS or i in controls:
            raise ModelFileError(f"the token {i} of the vocabulary is {token!r:.80}",
                                 f"expected 1 to {MAX_BYTES} bytes, and an id of its own")  # fmt: skip
        if spelled.setdefault(spelling(token), i) != i:
            raise ModelFileError(f"two tokens of the vocabulary are {token!r:.80}")
    if missing := [byte for byte, letter in LETTERS.items() if letter not in spelled]:
        raise ModelFileError(f"the vocabulary has no token for the byte {missing[0]}", "expected one for each byte")
    pattern = longest(spelled.keys())
    named = {(END_OF_TEXT if text in spelled else text): i for i, text in controls.items()}
    tokenizer = Tokenizer(models.WordLevel({**spelled, **named}, unk_token="<unk>"))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([letters, pre_tokenizers.Split(Regex(pattern), "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in named])
    return tokenizer


def spelling(token: bytes) -> str:
    """A token in byte letters."""
    return "".join([LETTERS[byte] for byte in token])


def longest(words: Collection[str]) -> str:
    """A regular expression that matches the longest word at a place: alternatives part where words do, and a word that
    others continue ends in an optional group."""
    root: dict[str, dict] = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _rendered(root)


def _rendered(node: Mapping[str, dict]) -> str:
    parts = [(f"\\{c}" if c in _META else c) + _rendered(inner) for c, inner in node.items() if c]
    if not parts:
        return ""
    group = _joined(parts)
    return f"{group}?" if "" in node else group if len(parts) > 1 else parts[0]


def _joined(parts: Sequence[str]) -> str:
    return f"(?:{'|'.join(parts)})"
