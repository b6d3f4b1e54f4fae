"""Vocabularies of real sizes for models with random weights: letters, pairs of letters, and unused entries up to the
model's number of tokens. What llama.cpp and Kvasir need to load a file is there; texts are cut into short tokens."""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase, printable
from typing import Any

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
SPACE = "▁"  # U+2581, SentencePiece's visible space
_PAIRS = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]


def byte_level(writer: Any, size: int, pre: str, specials: dict[str, int], **roles: int) -> None:
    """Byte-level BPE. specials: texts and ids of control tokens. roles: `bos=`, `eos=` and others, by id."""
    tokens = _filled(size, [*_byte_letters(), *_PAIRS], specials)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    _add(writer, tokens, roles)
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in _PAIRS])


def gemma(writer: Any, size: int, specials: dict[str, int], **roles: int) -> None:
    """BPE over text with visible spaces; a byte without a token of its own has one such as <0x0A>."""
    known = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [SPACE, *(c for c in printable if not c.isspace())]
    tokens = _filled(size, [*known, *letters, *_PAIRS], specials)
    tokens = [(text, BYTE if text in known else kind) for text, kind in tokens]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_scores([0.0] * size)
    _add(writer, tokens, roles)
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in _PAIRS])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


def unigram(writer: Any, size: int, specials: dict[str, int], unknown: int, **roles: int) -> None:
    """SentencePiece unigram; longer pieces are likelier than their letters."""
    letters = [SPACE, *(c for c in printable if not c.isspace())]
    tokens = _filled(size, [*letters, *_PAIRS], specials)
    tokens[unknown] = tokens[unknown][0], UNKNOWN
    scores = {NORMAL: -8.0, UNUSED: -10000.0}
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(kind, 0.0) for _, kind in tokens])
    _add(writer, tokens, {"unk": unknown, **roles})
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def wordpiece(writer: Any, size: int, specials: dict[str, int], **roles: int) -> None:
    """WordPiece; tokens that begin a word have a visible space, others have none."""
    letters = [c for c in printable if not c.isspace() and not c.isupper()]
    pieces = [*(SPACE + c for c in letters), *letters, *(SPACE + pair for pair in _PAIRS), *_PAIRS]
    tokens = _filled(size, pieces, specials)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    _add(writer, tokens, roles)


def _filled(size: int, pieces: list[str], specials: dict[str, int]) -> list[tuple[str, int]]:
    """(text, kind) by id: the special tokens at their ids, the pieces at the first free ones."""
    taken = {i: text for text, i in specials.items()}
    found, rest = [], iter(pieces)
    for i in range(size):
        if i in taken:
            found.append((taken[i], CONTROL))
        elif (piece := next(rest, None)) is not None:
            found.append((piece, NORMAL))
        else:
            found.append((f"[unused{i}]", UNUSED))
    return found


def _add(writer: Any, tokens: list[tuple[str, int]], roles: dict[str, int]) -> None:
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    for role, i in roles.items():
        getattr(writer, f"add_{role}_token_id")(i)


def _byte_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]
