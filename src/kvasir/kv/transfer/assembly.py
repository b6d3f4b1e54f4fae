"""Assembly: a part at a receiver, of which some pieces have arrived."""

from __future__ import annotations

from bisect import bisect_left

from kvasir.kv.transfer.block_socket import WireError
from kvasir.kv.transfer.frames import checksum_of_pieces

# Each takes about 160 bytes beside the part. A sender makes 8 of the keys of a kind of layers, and 8 of the values.
MAX_PIECES = 256


class Assembly:
    """The memory of a part of `num_bytes` bytes. Not thread-safe. A piece may come twice, because its sender did not
    hear that it had arrived. Pieces that overlap otherwise, or lie outside, are the work of a broken or hostile
    sender."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._memory = bytearray(num_bytes)
        self._spans: list[tuple[int, int]] = []  # (offset, bytes), by offset, without overlap
        self._checks: dict[int, int] = {}  # CRC-32 of the pieces, by offset
        self._present = 0

    def add(self, offset: int, payload: memoryview, crc: int) -> None:
        """Copies a piece with this CRC-32. Raises WireError for one that cannot belong to the part, or is not what came
        before."""
        size = payload.nbytes
        if not size or offset < 0 or offset + size > self.num_bytes:
            raise WireError("a piece lies outside its part")
        at = bisect_left(self._spans, (offset, 0))
        if at < len(self._spans) and self._spans[at] == (offset, size):
            if self._checks[offset] != crc:
                raise WireError("a piece came twice, with other bytes")
            return
        before, after = self._spans[:at][-1:], self._spans[at : at + 1]
        if any(sum(span) > offset for span in before) or any(offset + size > first for first, _ in after):
            raise WireError("pieces of a part overlap")
        if len(self._spans) >= MAX_PIECES:
            raise WireError("a part in too many pieces")
        self._spans.insert(at, (offset, size))
        self._memory[offset : offset + size] = payload
        self._checks[offset] = crc
        self._present += size

    def sealed(self, check: int) -> memoryview | None:
        """The whole part if all of it is here and the checksum over it is right, otherwise None."""
        if self._present != self.num_bytes:
            return None
        found = checksum_of_pieces((*span, self._checks[span[0]]) for span in self._spans)
        return memoryview(self._memory).toreadonly() if found == check else None
