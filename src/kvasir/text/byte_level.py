"""GPT-2's byte letters: byte-level BPE spells each of the 256 bytes as one printable character.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and its published encoder.
Printable Latin-1 bytes stand for themselves; the other 68 bytes map to the code points from 256 on, in ascending order,
so the space is `Ġ` and the newline `Ċ`.
"""


def _letters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


LETTERS = _letters()
_BYTES = {letter: byte for byte, letter in LETTERS.items()}


def bytes_of(token: str) -> bytes:
    """The bytes that a token spells. A token with a character that is not a byte letter is encoded as UTF-8 text."""
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return token.encode()
