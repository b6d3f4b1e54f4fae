"""Encodings of embeddings in responses."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

import msgspec


def raw(value: object) -> msgspec.Raw:
    """The value as encoded JSON. Encoding vector by vector in a thread lets other threads run in between."""
    return msgspec.Raw(msgspec.json.encode(value))


def base64_of(vector: Sequence[float]) -> str:
    """The vector as base64 of little-endian float32."""
    data = array("f", vector)
    if sys.byteorder == "big":
        data.byteswap()
    return base64.b64encode(data.tobytes()).decode()
