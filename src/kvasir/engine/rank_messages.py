"""What the engine and a rank's process tell each other before they compute."""

from __future__ import annotations

import msgspec

from kvasir.config import EngineOptions


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank's process is. parent: the id of the engine's process. packing: the open file of the channel for
    adapters. segment, steps, rows, pipe: open files. threads: of this rank. spins: see SharedRank. meeting: the file
    where the ranks of a group find each other, "" if they meet in the segment. device: its kind. processors: that it
    runs on, None for any."""

    options: EngineOptions
    rank: int
    stage: int
    parent: int
    packing: int
    segment: int
    steps: int
    rows: int
    pipe: int
    threads: int
    spins: bool
    seconds: float
    meeting: str = ""
    device: str = "cpu"
    processors: list[int] | None = None


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class RankLoaded(_Message, frozen=True):
    """The model is loaded. held, mapped: bytes, as in LoadedModel. read: bytes of weights that a step of one row
    reads. streamed: bytes of them that each step reads from disk, -1 if they are not streamed. available: free bytes of
    the device."""

    held: int
    mapped: int
    read: int
    streamed: int
    available: int


class RankNeeds(_Message, frozen=True):
    """The rank asks how much memory its weights get (runner.allotment.Needs); answered with a RankShare."""

    fixed: int
    layers: tuple[int, ...]


class RankShare(_Message, frozen=True):
    """Bytes for the weights of the rank, if they are streamed; 0 if they are not."""

    budget: int


class RankFailed(_Message, frozen=True):
    """It is not: an error for users."""

    message: str
    hint: str


class RankReady(_Message, frozen=True):
    """The program is made."""


class RankSizes(msgspec.Struct, frozen=True):
    """The sizes of the program and its cache: see Program and NativeCache. exports: rows that rank 0 reads after a
    step, by their names."""

    num_blocks: tuple[int, ...]
    block_size: int
    kv_dtype: str
    max_model_len: int
    max_tokens: int
    max_rows: int
    max_drafted: int
    exports: tuple[str, ...] = ()


RankEvent = RankNeeds | RankLoaded | RankFailed | RankReady
encode = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(RankEvent).decode
decode_spec = msgspec.json.Decoder(RankSpec).decode
decode_share = msgspec.msgpack.Decoder(RankShare).decode
decode_sizes = msgspec.msgpack.Decoder(RankSizes).decode
