"""Parts that are sent in pieces while they are computed: only complete, checked parts become visible, whatever breaks
and whatever a sender claims."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.transfer import exchange as exchanges
from kvasir.kv.transfer import frames, outbox
from kvasir.kv.transfer import inbox as inboxes
from kvasir.kv.transfer.assembly import Assembly
from kvasir.kv.transfer.block_socket import FRAME, WireError
from kvasir.kv.transfer.inbox import Inbox
from kvasir.kv.transfer.outbox import Growing
from kvasir.types import Transfer
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until
from tests.kv.test_transfer import ROOM, Two, cert, two  # noqa: F401
from tests.kv.test_transfer_hostile import PAYLOAD, SOUND, assert_closed, assert_sound, say, sender, server, where  # noqa: F401

SIZE = FACTS.groups[0].num_bytes
CUTS = (0, 7, 32, 33, 90, SIZE)
SPANS = list(pairwise(CUTS))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(exchanges, "FIRST_PAUSE", 0.01)


@pytest.fixture(params=["push", "fetch"])
def local(tmp_path, request) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(stack, str(tmp_path / "run" / "blocks"), request.param == "push")


def grow(pair: Two, blocks: list[StoredBlock]) -> list[Growing]:
    found = [pair.first.outbox.grow("a", block, 0, SIZE) for block in blocks]
    return [growing for growing in found if growing]


def add(growing: list[Growing], spans: list[tuple[int, int]] = SPANS) -> None:
    """Adds layer after layer of all blocks, as a step computes them."""
    for first, last in spans:
        for one in growing:
            one.add(first, memoryview(payload_of(one.block)[first:last]))


def end(pair: Two, growing: list[Growing]) -> None:
    for one in growing:
        one.seal()
    pair.first.outbox.finish("a")
    until(lambda: pair.second.inbox.settled("a"))


def assert_arrived(pair: Two, blocks: list[StoredBlock]) -> None:
    assert [load(pair.second.inbox, block) for block in blocks] == [payload_of(block) for block in blocks]
    until(lambda: pair.first.outbox.num_bytes == 0)
    assert pair.second.inbox.stats().num_bytes == 0


def test_blocks_become_visible_when_they_are_complete(two):  # noqa: F811
    blocks = blocks_of(6)
    two.begin("a")
    growing = grow(two, blocks)
    assert two.first.outbox.room == ROOM - 6 * SIZE, "memory is reserved before there are bytes"
    add(growing, SPANS[::-1][:3])
    until(lambda: two.second.inbox.stats().num_bytes == 6 * SIZE)
    assert not two.arrived(blocks[:1])
    two.put("a", blocks[5:], group=1)
    add(growing, SPANS[:2])
    growing[0].seal()
    until(lambda: two.arrived(blocks[:1]))
    assert not two.arrived(blocks[:2])
    end(two, growing[1:])
    assert load(two.second.inbox, blocks[5], 1) == payload_of(blocks[5], 1)
    assert_arrived(two, blocks)
    stats = two.first.outbox.stats
    assert stats.parts == {"sent": 7} and stats.grown == 6
    assert stats.bytes_sent == 6 * SIZE + FACTS.groups[1].num_bytes


def test_a_dropped_block_is_not_waited_for_and_others_arrive(local):
    blocks = blocks_of(4)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing[:3])
    assert growing[1].drop() and not growing[1].drop()
    local.first.outbox.finish("a")
    add(growing[3:])
    growing[1].seal()
    assert not local.second.inbox.settled("a")
    for one in (growing[0], *growing[2:]):
        one.seal()
    until(lambda: local.second.inbox.settled("a"))
    assert not local.arrived(blocks[1:2])
    assert_arrived(local, [blocks[0], *blocks[2:]])


@pytest.mark.parametrize("after", [False, True], ids=["before it is kept", "after it is kept"])
def test_links_that_break_between_pieces_are_made_again(local, monkeypatch, after):
    count, whole = [0], local.second.inbox.keep
    for name in ("piece", "seal"):

        def breaking(*args, real=getattr(local.second.inbox, name)) -> int:
            count[0] += 1
            breaks = count[0] % 5 == 1
            if breaks and not after:
                raise OSError("the cable is cut")
            answer = real(*args)
            if breaks:
                raise OSError("the cable is cut after it")
            return answer

        monkeypatch.setattr(local.second.inbox, name, breaking)
    monkeypatch.setattr(local.second.inbox, "keep", lambda *args: pytest.fail("sent as a whole") and whole(*args))
    blocks = blocks_of(8)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing)
    end(local, growing)
    assert_arrived(local, blocks)


def test_a_receiver_that_forgot_the_pieces_gets_the_block_as_a_whole(local):
    """As one that has restarted, or ran out of memory for a while."""
    blocks = blocks_of(5)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing, SPANS[:3])
    until(lambda: local.second.inbox.stats().num_bytes == 5 * SIZE)
    inbox = local.second.inbox
    with inbox._changed:
        inbox._drop_growing(inbox._incoming["a"])
    assert inbox.stats().num_bytes == 0
    add(growing, SPANS[3:])
    end(local, growing)
    assert_arrived(local, blocks)


def test_damage_that_a_checksum_of_a_piece_misses_is_found_at_the_end(local, monkeypatch):
    """The checksum over the whole block covers what was put together."""
    real = Assembly.add
    monkeypatch.setattr(Assembly, "add", lambda self, at, payload, crc: real(self, at, payload, crc ^ (at == 32)))
    blocks = blocks_of(3)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing)
    end(local, growing)
    assert_arrived(local, blocks)


def test_a_piece_damaged_on_its_way_is_sent_again(local, monkeypatch):
    real, damaged = frames.checksum_of_piece, []

    def once(name, offset, size, crc):
        wrong = len(damaged) < 3
        damaged.append(name)
        return real(name, offset, size, crc) ^ wrong

    monkeypatch.setattr(frames, "checksum_of_piece", once)
    blocks = blocks_of(3)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing)
    end(local, growing)
    assert_arrived(local, blocks)


def test_a_sender_that_dies_in_the_middle_leaves_nothing(local, monkeypatch):
    monkeypatch.setattr(inboxes, "STALL_SECONDS", 0.2)
    blocks = blocks_of(4)
    local.begin("a")
    growing = grow(local, blocks)
    add(growing[:2])
    growing[0].seal()
    until(lambda: local.arrived(blocks[:1]))
    local.first.close(0.0)
    until(lambda: local.second.inbox.settled("a"))
    assert not local.arrived(blocks[:2])
    local.second.inbox.forget("a")
    assert local.second.inbox.stats().num_bytes == 0


def test_a_transfer_whose_time_is_over_gives_its_memory_back(local):
    assert local.first.outbox.open(Transfer("a", "", 0.05))
    growing = grow(local, blocks_of(3))
    add(growing, SPANS[:2])
    until(lambda: not local.first.outbox.is_open("a"))
    add(growing, SPANS[2:])
    growing[0].seal()
    assert local.first.outbox.num_bytes == 0 and local.first.outbox.room == ROOM


# -- what senders claim ------------------------------------------------------------------------------------------


def keep(inbox: Inbox, first: int, last: int, id: str = "t", block: StoredBlock = blocks_of(1)[0]) -> int:
    payload = memoryview(payload_of(block)[first:last])
    return inbox.piece(id, block, 0, first, payload, zlib.crc32(payload))


def test_pieces_reserve_their_part_and_give_it_back():
    """However a transfer ends, and whoever claims the most parts."""
    blocks = blocks_of(5)
    for how in ("done", "forget", "full"):
        inbox = Inbox(FACTS, 3 * SIZE)
        inbox.expect(Transfer("t"))
        assert [keep(inbox, 0, 1, block=block) for block in blocks[:3]] == [frames.KEPT] * 3
        assert inbox.stats().num_bytes == 3 * SIZE
        if how == "full":
            assert keep(inbox, 0, 1, block=blocks[3]) == frames.DROPPED and inbox.settled("t")
        else:
            getattr(inbox, how)("t")
        assert inbox.stats().num_bytes == 0
    assert keep(inbox, 1, 2) == frames.DROPPED, "the transfer is over"


def test_pieces_that_are_never_completed_make_room_after_a_while(monkeypatch):
    inbox = Inbox(FACTS, 2 * SIZE)
    assert [keep(inbox, 0, 1, id) for id in "ab"] == [frames.KEPT] * 2
    assert keep(inbox, 0, 1, "c") == frames.DROPPED
    monkeypatch.setattr(inboxes, "ORPHAN_SECONDS", -1.0)
    assert keep(inbox, 0, 1, "d") == frames.KEPT and inbox.stats().num_bytes == SIZE


def test_forgotten_transfers_give_back_their_pieces(monkeypatch):
    monkeypatch.setattr(inboxes, "MAX_INCOMING", 3)
    inbox = Inbox(FACTS, 8 * SIZE)
    for id in "abcdef":
        keep(inbox, 0, 1, id)
    assert inbox.stats().num_bytes == 3 * SIZE


@given(st.lists(st.tuples(st.integers(-5, SIZE + 5), st.integers(0, SIZE + 5)), max_size=12))
def test_only_disjoint_pieces_inside_the_part_are_put_together(spans):
    """A plain model: a set of covered positions."""
    data, assembly, kept = PAYLOAD, Assembly(SIZE), dict[int, int]()
    for offset, size in spans:
        piece = memoryview((data * 3)[offset % SIZE : offset % SIZE + size])
        inside = offset >= 0 and size and offset + size <= SIZE
        free = not any(offset < at + length and at < offset + size for at, length in kept.items())
        if inside and (free or kept.get(offset) == size):
            assembly.add(offset, piece, zlib.crc32(piece))
            kept[offset] = size
        else:
            with pytest.raises(WireError):
                assembly.add(offset, piece, zlib.crc32(piece))
    check = frames.checksum_of_pieces((at, n, zlib.crc32(data[at : at + n])) for at, n in kept.items())
    sealed = assembly.sealed(check)
    assert (sealed is not None) == (sum(kept.values()) == SIZE)
    assert sealed is None or bytes(sealed) == data
    assert assembly.sealed(check ^ 1) is None


def test_the_pieces_of_a_part_are_bounded():
    """What is remembered of each takes memory beside the part, which nothing else bounds."""
    assembly = Assembly(1 << 16)
    before = sys.getsizeof(assembly._spans) + sys.getsizeof(assembly._checks)
    with pytest.raises(WireError, match="too many pieces"):
        for offset in range(0, 1 << 16, 2):
            assembly.add(offset, memoryview(b"x"), offset)
    assert sys.getsizeof(assembly._spans) + sys.getsizeof(assembly._checks) - before < 1 << 14


def test_a_piece_that_comes_twice_must_be_the_same():
    assembly = Assembly(4)
    for _ in range(2):
        assembly.add(0, memoryview(b"ab"), zlib.crc32(b"ab"))
    with pytest.raises(WireError, match="other bytes"):
        assembly.add(0, memoryview(b"xy"), zlib.crc32(b"xy"))


def piece(
    offset: int, payload: bytes, kind: int = frames.PIECE, size: int | None = None, check: int | None = None
) -> bytes:
    size = len(payload) if size is None else size
    if check is None:
        check = frames.checksum_of_piece(SOUND, offset, size, zlib.crc32(payload))
    head = (
        frames.PART_HEAD.pack(check, len(SOUND))
        if kind == frames.PIECE
        else frames.SLOT_HEAD.pack(0, check, len(SOUND))
    )
    body = head + frames.SPAN.pack(offset, size) + SOUND + payload
    return FRAME.pack(kind, len(body)) + body


def seal(rest: bytes = b"") -> bytes:
    body = frames.PART_HEAD.pack(0, len(SOUND)) + SOUND + rest
    return FRAME.pack(frames.SEAL, len(body)) + body


LIES = {
    "beyond the part": piece(SIZE - 1, b"ab"),
    "far beyond": piece((1 << 64) - 1, b"a"),
    "an empty piece": piece(0, b""),
    "a longer piece": piece(0, PAYLOAD + b"x"),
    "another size": piece(0, b"abc", size=2),
    "a wrong checksum": piece(0, b"abc", check=5),
    "a slice without memory": piece(0, b"", frames.SLICE, size=4),
    "an overlap": piece(0, PAYLOAD[:9]) + piece(8, PAYLOAD[8:20]),
    "twice, with other bytes": piece(0, b"abc") + piece(0, b"xyz"),
    "an end with bytes": seal(b"x"),
    "no span": FRAME.pack(frames.PIECE, 8) + bytes(8),
    "cut off": piece(0, b"abc")[:-1],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_false_pieces_end_the_link_and_nothing_else(server, lie):  # noqa: F811
    with sender(server) as found:
        say(found, lie)
        assert_closed(found)
    server.inbox.forget("t")
    assert server.inbox.stats().num_bytes == 0 and server.inbox.has([blocks_of(1)[0].key]) == 0
    assert_sound(server)


def test_an_end_without_pieces_is_answered(server):  # noqa: F811
    with sender(server) as found:
        found.sock.sendall(seal())
        assert bytes(found.body(found.head({frames.TAKEN: 1})[1])) == bytes((frames.INCOMPLETE,))
    assert_sound(server)
