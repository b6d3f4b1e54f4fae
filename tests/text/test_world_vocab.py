"""RWKV's vocabulary: the rules of the published reader, from the text file and from a GGUF's metadata."""

from __future__ import annotations

import json
import random

import pytest

from kvasir.errors import ModelFileError
from kvasir.text.chat import ChatTemplate
from kvasir.text.detokenize import Detokenizer
from kvasir.text.special_tokens import END_OF_TEXT
from kvasir.text.tokenizer import Tokenizer
from kvasir.text.world_vocab import longest, read_world, unescaped
from kvasir.weights.local import gguf_chat_templates
from tests.text.vocabularies import CONTROL, NORMAL, UNUSED, local_folder, local_gguf, metadata

WORDS = [
    *(
        b"\n\n",
        b"\x00\x00",
        b"ab",
        b"abc",
        b"abcdef",
        b"bc",
        b"User",
        b" User",
        b"'s",
        b"\"'",
        b"\\n",
        b"(.*)+?[x]{2}|$^",
    ),
    *("é".encode(), "é".encode()[:1] + b"\xff", "中文".encode(), "中".encode(), "😀".encode()[:3], b"<s>", b" " * 64),
]
TOKENS = {i + 1: token for i, token in enumerate([*(bytes([b]) for b in range(256)), *WORDS])}


def line(i: int, token: bytes) -> str:
    """As the published file has it: text where the bytes are text."""
    try:
        return f"{i} {token.decode()!r} {len(token)}"
    except UnicodeDecodeError:
        return f"{i} {token!r} {len(token)}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rwkv_vocab_v20230424.txt").write_text("\n".join(line(*item) for item in TOKENS.items()) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": END_OF_TEXT, "eos_token": "\n\n"}))
    return tmp_path


def of_gguf() -> Tokenizer:
    kinds = [("<s>", CONTROL, 0.0), *((repr(token)[2:-1], NORMAL, 0.0) for token in TOKENS.values())]
    return local_gguf(
        metadata("rwkv", [*kinds, ("[PAD]", UNUSED, 0.0)], bos_token_id=0, eos_token_id=0, eot_token_id=257)
    )


def reference(text: str) -> list[int]:
    """The published reader's rule: the longest token at each byte."""
    data, ids, known, at = text.encode(), [], {token: i for i, token in TOKENS.items()}, 0
    while at < len(data):
        size = next(n for n in range(64, 0, -1) if data[at : at + n] in known and at + n <= len(data))
        ids.append(known[data[at : at + size]])
        at += size
    return ids


TEXTS = [
    "",
    "abcdef abcde abcd abc",
    "User: é中文😀\n\n\n",
    "it's \\n (.*)+?[x]{2}|$^",
    "<s>",
    " " * 200,
    "\x00\x00\x00",
]


def test_the_longest_token_is_taken_at_each_byte(folder):
    tokenizers, rng = (local_folder(folder), of_gguf()), random.Random(3)
    pieces = ["a", "b", "c", "abcdef"[:5], "é", "中文", "😀", "\n", " User", "'", "\\", "<s", " "]
    for text in (*TEXTS, *("".join(rng.choices(pieces, k=30)) for _ in range(200))):
        for tokenizer in tokenizers:
            assert tokenizer.encode(text, False, False) == reference(text), repr(text)
            assert tokenizer.decode(reference(text)) == text


def test_markers_and_the_ends_of_a_turn(folder):
    from_folder, from_gguf = local_folder(folder), of_gguf()
    assert (from_folder.bos_id, from_folder.eos_ids) == (0, (257,))
    assert (from_gguf.bos_id, {*from_gguf.eos_ids}) == (0, {0, 257})
    assert from_folder.encode(f"{END_OF_TEXT}ab") == [0, *reference("ab")]
    assert from_folder.encode(END_OF_TEXT, parse_special=False) == reference(END_OF_TEXT)
    # "<s>" is a token of the text too, so the file's marker has the other name.
    assert from_gguf.encode("<s>") == reference("<s>") and from_gguf.encode(END_OF_TEXT) == [0]
    text = f"{END_OF_TEXT}User: {END_OF_TEXT}"
    foreign = [(len(text) - len(END_OF_TEXT), len(text))]
    assert from_folder.encode(text, False, True, foreign) == [0, *reference(text[len(END_OF_TEXT) :])]


def test_pieces_of_characters_are_joined(folder):
    tokenizer = local_folder(folder)
    ids = [i for byte in "é😀".encode() for i in (byte + 1,)]
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "", "😀"]
    assert tokenizer.token_bytes(257 + 13) == b"\xc3\xff"


@pytest.mark.parametrize(
    "bad",
    ["300 __import__('os') 12", "300 'ab' 3", "1 'zz' 2", "300 b'\\q' 2", "300 f'a' 1", "x 'a' 1", "300 '\\ud800' 3",
     "300 b'é' 1",      "300 'a' 'b' 5", "300 '' 0", f"300 '{'x' * 300}' 300", "300 'ab' 2"],
)  # fmt: skip
def test_bad_lines_are_refused(folder, bad):
    with (folder / "rwkv_vocab_v20230424.txt").open("a", encoding="utf-8") as file:
        file.write(bad + "\n")
    with pytest.raises(ModelFileError):
        local_folder(folder)


def test_every_byte_needs_a_token(folder):
    path = folder / "rwkv_vocab_v20230424.txt"
    path.write_text("\n".join(line(i, token) for i, token in TOKENS.items() if token != b"\x80"))
    assert 0x81 not in read_world(path)
    with pytest.raises(ModelFileError, match="byte 128"):
        local_folder(folder)


def test_escapes_of_files():
    assert unescaped(r"\xff\n\t\r\\\'a\"") == b"\xff\n\t\r\\'a\""
    assert longest(["a", "ab", "b."]) == r"(?:a(?:b)?|b\.)"


def test_the_template_that_files_only_name():
    templates = gguf_chat_templates({"tokenizer.chat_template": "rwkv-world"})
    chat = ChatTemplate(templates, {"bos_token": END_OF_TEXT})
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi! "}]
    expected = f"{END_OF_TEXT}System: Be kind.\n\nUser: Hi!\n\nAssistant:"
    assert chat.render(messages, add_generation_prompt=True).text == expected
