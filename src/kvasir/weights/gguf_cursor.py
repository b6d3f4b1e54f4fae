"""Sequential reading of a GGUF file's values; see gguf.py for the format."""

import struct
from typing import NoReturn

import numpy as np

from kvasir.weights.mapped import MappedFile

MAX_NESTING = 4  # of arrays; the format has no limit

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# Minimum bytes of a value of each type, which bound a count before its elements are read.
_MIN_BYTES = {kind: dtype.itemsize for kind, dtype in _NUMBERS.items()} | {_BOOL: 1, _STRING: 8, _ARRAY: 12}


class Cursor:
    """A position in a file that advances as values are read.

    Nothing is read or allocated before it is known to lie inside the file. All readers raise `ModelFileError`. what: a
    name of the value, for messages.
    """

    def __init__(self, file: MappedFile):
        self.file = file
        self.map = file.map
        self.size = file.size
        self.position = 0

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        """Raises `ModelFileError` that names the file."""
        self.file.refuse(problem, hint)

    def need(self, count: int, item_bytes: int, what: str) -> None:
        """Checks that `count` items of at least `item_bytes` each fit in the rest of the file."""
        left = self.size - self.position
        if count * item_bytes > left:
            self.refuse(
                f"{count} {what} at byte {self.position} need {count * item_bytes} bytes or more, "
                f"but the file has {left} left",
                "the file is damaged or was not downloaded completely",
            )

    def take(self, nbytes: int, what: str) -> bytes:
        """The next `nbytes` bytes."""
        self.need(nbytes, 1, what)
        start = self.position
        self.position += nbytes
        return self.map[start : self.position]

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, f"bytes of {what}"))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, f"bytes of {what}"))[0]

    def string(self, what: str, max_bytes: int | None = None) -> str:
        """A length, then that many bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            self.refuse(f"{what} at byte {self.position} is {length} bytes long, expected at most {max_bytes}")
        try:
            return self.take(length, f"bytes of {what}").decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} before byte {self.position} is not UTF-8: {error.reason}")

    def strings(self, count: int, what: str) -> list[str]:
        """An array's strings. A fast loop, because vocabularies have hundreds of thousands."""
        source, position, size, unpack = self.map, self.position, self.size, _U64.unpack_from
        texts = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(source, position)[0]
                if position > size:
                    raise struct.error
                texts.append(source[start:position].decode())
        except struct.error:
            self.refuse(f"string {len(texts)} of {what} reaches beyond the file's {size} bytes")
        except UnicodeDecodeError as error:
            self.refuse(f"string {len(texts)} of {what} is not UTF-8: {error.reason}")
        self.position = position
        return texts

    def value(self, kind: int, what: str) -> object:
        """A metadata value: int, float, bool, str or an array."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, 1)
        numbers = self.numbers(kind, 1, what)
        return numbers[0].item()

    def array(self, what: str, depth: int) -> object:
        """An array: numbers and bools as a numpy array, strings and arrays as a list."""
        kind, count = self.u32(f"the element type of {what}"), self.u64(f"the length of {what}")
        self.need(count, _MIN_BYTES.get(kind, 0), f"elements of {what}")
        if kind == _STRING:
            return self.strings(count, what)
        if kind != _ARRAY:
            return self.numbers(kind, count, what)
        if depth == MAX_NESTING:
            self.refuse(f"{what} nests arrays deeper than {MAX_NESTING} levels")
        return [self.array(what, depth + 1) for _ in range(count)]

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        """`count` numbers or bools, copied from the file."""
        if kind == _BOOL:
            flags = np.frombuffer(self.take(count, f"bools of {what}"), np.uint8)
            if flags.size and flags.max() > 1:
                self.refuse(f"{what} has a bool of value {flags.max()}, expected 0 or 1")
            return flags.astype(bool)
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self.refuse(f"{what} has the unknown value type {kind}, expected 0 to 12")
        return np.frombuffer(self.take(count * dtype.itemsize, f"bytes of {what}"), dtype)
