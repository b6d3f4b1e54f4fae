"""Names and records: what is read back is what was asked for, or nothing."""

import struct
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import GroupFacts, StoredBlock, StoreFacts, chain, layout, root_key
from kvasir.kv.tiers.record import Unusable
from kvasir.plan import pack_ids
from tests.kv._tiers import BLOCK_SIZE, FACTS, blocks_of, payload_of

BLOCK = blocks_of(2)[1]


def sealed(facts: StoreFacts = FACTS, block: StoredBlock = BLOCK, group: int = 0) -> bytes:
    payload = payload_of(block, group, facts)
    return record.seal(facts, block, group, memoryview(payload)) + payload


def unsealed(
    data: bytes, facts: StoreFacts = FACTS, block: StoredBlock = BLOCK, group: int = 0, size: int | None = None
) -> bytes:
    """Reads as from a file of `data`; a read beyond its end is a fault of the reader."""
    rest = memoryview(data)

    def fill(buffer: memoryview) -> None:
        nonlocal rest
        assert len(buffer) <= record.max_size(facts, group), "more than a record can have was to be read"
        assert len(buffer) <= len(rest), "read beyond the end"
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]

    return bytes(record.unseal(facts, block, group, len(data) if size is None else size, fill))


def reason(*args, **kwargs) -> str:
    with pytest.raises(Unusable) as e:
        unsealed(*args, **kwargs)
    return e.value.reason


def test_a_key_is_the_chain_of_all_ids_before():
    ids = pack_ids([1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = chain(b"ns", ids, 4)
    assert first.parent == root_key(b"ns") == sha256(b"ns").digest()
    assert first.key == sha256(first.parent + struct.pack("<4i", 1, 2, 3, 4)).digest()
    assert second == StoredBlock(b"ns", first.key, struct.pack("<4i", 5, 6, 7, 8))
    assert chain(b"ns", ids[:12], 4) == []


def test_keys_differ_by_namespace_and_by_any_id_before():
    keys = [b.key for b in blocks_of(8)]
    assert not set(keys) & {b.key for b in blocks_of(8, b"other")}
    assert not set(keys) & {b.key for b in blocks_of(8, first=1)}
    assert keys[:5] == [b.key for b in blocks_of(5)]


def test_round_trip():
    for group in (0, 1):
        assert unsealed(sealed(group=group), group=group) == payload_of(BLOCK, group)


@given(st.integers(0, len(sealed()) - 1), st.integers(1, 255))
def test_no_flipped_byte_passes(at, flip):
    data = bytearray(sealed())
    data[at] ^= flip
    assert reason(bytes(data)) in ("truncated", "corrupt", "stale", "foreign")


def test_no_flipped_bit_passes_anywhere():
    whole = sealed()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1
        reason(bytes(data))


def test_no_other_length_passes():
    whole = sealed()
    for length in range(len(whole)):
        assert reason(whole[:length]) == "truncated"
    assert reason(whole + b"\0") == "truncated"


@given(st.binary(max_size=400))
def test_no_garbage_passes(data):
    reason(data)
    reason(sealed()[: record.PREFIX.size] + data)
    head = record.PREFIX.pack(record.MAGIC, record.FORMAT, len(data), 0, b"")
    assert reason(head + data) in ("corrupt", "foreign", "stale")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (sealed(replace(FACTS, numerics="n0")), "stale"),
        (sealed(replace(FACTS, model="tiny@2")), "foreign"),
        (sealed(replace(FACTS, model="tiny@2", numerics="n0")), "foreign"),
        (sealed(replace(FACTS, groups=(GroupFacts("full bf16", 96),))), "foreign"),
        (sealed(replace(FACTS, groups=(GroupFacts("full f32", 64),))), "foreign"),
        (sealed(replace(FACTS, block_size=8)), "foreign"),
        (sealed(block=blocks_of(2, b"other")[1]), "foreign"),
        (sealed(block=StoredBlock(b"other", BLOCK.parent, BLOCK.ids)), "foreign"),
        (sealed(block=StoredBlock(BLOCK.namespace, bytes(32), BLOCK.ids)), "foreign"),
        (sealed(block=blocks_of(1)[0]), "foreign"),
        (sealed(group=1), "foreign"),
    ],
)
def test_a_sound_record_of_something_else_does_not_pass(made, expected):
    assert reason(made) == expected


def test_another_format_is_stale():
    data = bytearray(sealed())
    data[8:12] = struct.pack("<I", record.FORMAT + 1)
    assert reason(bytes(data)) == "stale"


@pytest.mark.parametrize(("header", "payload"), [(1 << 31, 0), (0, 1 << 62), (2**32 - 1, 2**64 - 1), (100, 1 << 40)])
def test_sizes_that_a_record_claims_are_never_allocated(header, payload):
    data = record.PREFIX.pack(record.MAGIC, record.FORMAT, header, payload, bytes(32))
    reason(data + bytes(100), size=record.PREFIX.size + header + payload)


def test_a_record_with_the_right_header_and_another_payload_size():
    short = payload_of(BLOCK)[:-1]
    head = record.seal(FACTS, BLOCK, 0, memoryview(short))
    assert reason(head + short) == "corrupt"


def test_the_longest_names_fit_a_header():
    facts = StoreFacts("\U0001f600" * 1024, "\U0001f600" * 1024, 4096, (GroupFacts("\U0001f600" * 1024, 1 << 32),) * 64)
    block = StoredBlock(b"n" * 4096, bytes(32), bytes(4 * 4096))
    assert facts.admits(block, 63)
    head = record.seal(facts, block, 63, memoryview(b""))
    assert len(head) <= record.PREFIX.size + record.MAX_HEADER


def test_facts_are_bounded():
    good = (GroupFacts("full", 1),)
    for wrong in (
        ("m" * 1025, "n", 4, good),
        ("m", "n", 0, good),
        ("m", "n", 4097, good),
        ("m", "n", 4, ()),
        ("m", "n", 4, good * 65),
        ("m", "n", 4, (GroupFacts("full", 0),)),
        ("m", "n", 4, (GroupFacts("l" * 1025, 1),)),
    ):
        with pytest.raises(ValueError):
            StoreFacts(*wrong)


def test_facts_admit_only_names_of_their_sizes():
    assert FACTS.admits(BLOCK, 1)
    assert not FACTS.admits(BLOCK, 2)
    assert not FACTS.admits(BLOCK, -1)
    for wrong in ({"ids": bytes(4 * BLOCK_SIZE + 4)}, {"parent": b""}, {"namespace": bytes(4097)}):
        assert not FACTS.admits(replace(BLOCK, **wrong), 0)


def test_layouts_differ_where_the_bytes_do():
    one = layout("full", "bf16", (0, 1), "heads=8 dim=128", "layer,kv,head,token,dim")
    assert one == layout("full", "bf16", [0, 1], "heads=8 dim=128", "layer,kv,head,token,dim")
    assert one != layout("full", "bf16", (0, 2), "heads=8 dim=128", "layer,kv,head,token,dim")
    assert replace(FACTS, numerics="n0").digest() != FACTS.digest() == replace(FACTS).digest()
