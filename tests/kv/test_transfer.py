"""Blocks between two exchanges: everything arrives as it was sent, whoever connects and whatever breaks."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.errors import ConfigError, InvalidRequest
from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.transfer import exchange as exchanges
from kvasir.kv.transfer import inbox, outbox, stream
from kvasir.kv.transfer.exchange import parse_peer
from kvasir.kv.transfer.link import parse_address
from kvasir.kv.transfer.security import Credentials, read_key
from kvasir.types import Transfer
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until
from tests.kv._transfer import KEY, Weights, certificate, exchange

ROOM = 1 << 20
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(exchanges, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(exchanges, "UNKNOWN_SECONDS", 0.3)


@pytest.fixture(scope="module")
def cert(tmp_path_factory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


class Two:
    """An exchange that sends and one that takes. push: the first one connects, else the second one."""

    def __init__(
        self, stack: ExitStack, address: str, push: bool, first: dict | None = None, second: dict | None = None
    ):
        self.push = push
        listening, connecting = (second, first) if push else (first, second)
        server = stack.enter_context(exchange(address, **(listening or {})))
        self.address = server.address
        client = stack.enter_context(exchange(None, self.address, **(connecting or {})))
        self.first, self.second = (client, server) if push else (server, client)

    def begin(self, id: str, seconds: float = 30.0) -> None:
        """Opens a transfer at both ends."""
        assert self.first.outbox.open(Transfer(id, self.address if self.push else "", seconds))
        self.second.expect(Transfer(id, "" if self.push else self.address, seconds))

    def put(self, id: str, blocks: list[StoredBlock], group: int = 0) -> None:
        for block in blocks:
            self.first.outbox.put(id, block, group, memoryview(payload_of(block, group)))

    def arrived(self, blocks: list[StoredBlock], group: int = 0) -> bool:
        return self.second.inbox.has([block.key for block in blocks], group) == len(blocks)


@pytest.fixture(params=["push", "fetch", "push over TCP", "fetch over TCP"])
def two(tmp_path, request) -> Iterator[Two]:
    with ExitStack() as stack:
        more: dict = {}
        address = str(tmp_path / "run" / "blocks")
        if "TCP" in request.param:
            if not shutil.which("openssl"):
                pytest.skip("no openssl to make certificates with")
            more = {"credentials": Credentials(KEY, request.getfixturevalue("cert"))}
            address = "127.0.0.1:0"
        yield Two(stack, address, request.param.startswith("push"), more, more)


@pytest.fixture(params=["push", "fetch"])
def local(tmp_path, request) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(stack, str(tmp_path / "run" / "blocks"), request.param == "push")


def assert_equal(two: Two, blocks: list[StoredBlock], group: int = 0) -> None:
    assert [load(two.second.inbox, block, group) for block in blocks] == [payload_of(b, group) for b in blocks]


def test_parts_arrive_as_they_were_sent(two):
    blocks = blocks_of(20)
    two.begin("a")
    two.put("a", blocks[:7])
    until(lambda: two.arrived(blocks[:7]))  # chunk by chunk, before the end
    assert not two.second.inbox.settled("a")
    two.put("a", blocks[7:])
    two.put("a", blocks[18:], group=1)
    two.first.outbox.finish("a")
    until(lambda: two.second.inbox.settled("a"))
    assert_equal(two, blocks)
    assert_equal(two, blocks[18:], group=1)
    assert two.second.inbox.stats().num_bytes == 0, "what was loaded leaves the inbox"
    until(lambda: two.first.outbox.num_bytes == 0)
    assert two.first.outbox.stats.parts == {"sent": 22}


def test_several_transfers_at_once(two):
    names = [f"t{i}" for i in range(10)]
    blocks = {name: blocks_of(6, first=1000 * i) for i, name in enumerate(names)}
    for name in names:
        two.begin(name)
    for i in range(6):
        for name in names:
            two.put(name, blocks[name][i : i + 1])
    for name in names:
        two.first.outbox.finish(name)
    until(lambda: all(two.second.inbox.settled(name) for name in names))
    for name in names:
        assert_equal(two, blocks[name])


def test_a_link_that_breaks_is_made_again(local, monkeypatch):
    """Every third part breaks the link, before or after it is kept; nothing is lost and nothing is kept twice."""
    blocks, count = blocks_of(30), [0]
    keep = local.second.inbox.keep

    def breaking(*args) -> bool:
        count[0] += 1
        if count[0] % 3 == 1:
            raise OSError("the cable is cut")
        kept = keep(*args)
        if count[0] % 3 == 2:
            raise OSError("the cable is cut after it")
        return kept

    monkeypatch.setattr(local.second.inbox, "keep", breaking)
    local.begin("a")
    local.put("a", blocks)
    local.first.outbox.finish("a")
    until(lambda: local.second.inbox.settled("a"))
    assert_equal(local, blocks)
    assert local.second.inbox.stats().saves == {"saved": 30}


def test_damage_on_the_way_is_noticed_and_the_part_sent_again(local, monkeypatch):
    blocks, damaged = blocks_of(10), []
    real = stream.frames.checksum

    def once(name, payload):
        wrong = threading.current_thread().name.startswith("kv-") and len(damaged) < 3
        if wrong:
            damaged.append(name)
        return real(name, payload) ^ wrong

    monkeypatch.setattr(stream.frames, "checksum", once)
    local.begin("a")
    local.put("a", blocks)
    local.first.outbox.finish("a")
    until(lambda: local.second.inbox.settled("a"))
    assert_equal(local, blocks)
    assert damaged


def test_a_sender_that_dies_is_not_waited_for_long(local, monkeypatch):
    monkeypatch.setattr(inbox, "STALL_SECONDS", 0.3)
    blocks = blocks_of(4)
    local.begin("a")
    local.put("a", blocks[:2])
    until(lambda: local.arrived(blocks[:2]))
    local.first.close(0.0)
    until(lambda: local.second.inbox.settled("a"))
    assert_equal(local, blocks[:2])


def test_a_receiver_that_dies_keeps_no_memory(local):
    blocks = blocks_of(4)
    local.second.close(0.0)
    assert local.first.outbox.open(Transfer("a", local.address if local.push else "", 0.3))
    local.put("a", blocks)
    assert local.first.outbox.num_bytes > 0
    until(lambda: not local.first.outbox.is_open("a"))
    assert local.first.outbox.num_bytes == 0
    local.put("a", blocks)
    assert local.first.outbox.num_bytes == 0 and local.first.outbox.room == ROOM


# -- who may exchange blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("push", [True, False])
def test_other_weights_are_refused(tmp_path, push):
    with ExitStack() as stack:
        two = Two(stack, str(tmp_path / "run" / "blocks"), push, second={"weights": Weights("others")})
        two.begin("a", 5.0)
        two.put("a", blocks_of(3))
        two.first.outbox.finish("a")
        until(lambda: two.second.inbox.settled("a") or not two.first.outbox.is_open("a"))
        assert two.second.inbox.stats().saves == {} and not two.arrived(blocks_of(1))


@pytest.mark.parametrize(
    "facts", [replace(FACTS, numerics="n2"), replace(FACTS, block_size=8), replace(FACTS, groups=FACTS.groups[:1])]
)
def test_other_numerics_and_layouts_are_refused(tmp_path, facts):
    with ExitStack() as stack:
        two = Two(stack, str(tmp_path / "run" / "blocks"), True, second={"facts": facts})
        two.begin("a")
        two.put("a", blocks_of(3))
        until(lambda: not two.first.outbox.is_open("a"))
        assert two.second.inbox.stats().saves == {}


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("late", ["first", "second"])
def test_weights_that_are_identified_late_only_delay(tmp_path, push, late):
    weights = Weights(None)
    with ExitStack() as stack:
        two = Two(stack, str(tmp_path / "run" / "blocks"), push, **{late: {"weights": weights}})
        two.begin("a")
        two.put("a", blocks_of(3))
        two.first.outbox.finish("a")
        time.sleep(0.05)
        assert not two.arrived(blocks_of(1))
        weights.value = Weights().value
        until(lambda: two.second.inbox.settled("a"))
        assert_equal(two, blocks_of(3))


@needs_openssl
@pytest.mark.parametrize("wrong", ["key", "certificate"])
def test_over_tcp_a_wrong_key_or_certificate_gets_nothing(tmp_path, cert, wrong):
    other = Credentials(b"x" * 20, cert) if wrong == "key" else Credentials(KEY, certificate(tmp_path))
    with ExitStack() as stack:
        two = Two(stack, "127.0.0.1:0", True, {"credentials": other}, {"credentials": Credentials(KEY, cert)})
        two.begin("a", 0.5)
        two.put("a", blocks_of(3))
        until(lambda: not two.first.outbox.is_open("a"))
        assert two.second.inbox.stats().saves == {}


@pytest.mark.parametrize("credentials", [Credentials(), Credentials(KEY), Credentials(b"", Path("/nowhere"))])
def test_tcp_needs_a_key_and_a_certificate(credentials):
    with pytest.raises(ConfigError, match="key and a certificate"), exchange("127.0.0.1:0", credentials=credentials):
        pass
    with pytest.raises(ConfigError, match="key and a certificate"), exchange(None, "10.0.0.1", credentials=credentials):
        pass


def test_a_key_must_be_private_and_long(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == KEY
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_key(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_every_address_of_the_machine_is_none_to_connect_to(address, cert):
    with pytest.raises(ConfigError, match="every address"), exchange(address, credentials=Credentials(KEY, cert)):
        pass


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x", "host:70000", "host:-1", "host:५"])
def test_malformed_addresses_are_refused(text):
    with pytest.raises(ConfigError):
        parse_address(text)


def test_an_engine_connects_only_where_it_was_told_to(tmp_path):
    known = ("10.0.0.1", "10.0.0.2:7000", "[::1]:7000", str(tmp_path / "run" / "blocks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Credentials, "context", lambda self, server: None)
        with exchange(None, *known) as found:
            for address in ("10.0.0.1:5", "10.0.0.1:7000", "10.0.0.2:7000", "[::1]:7000", known[3]):
                found.check(Transfer("x", address), Transfer("x", address))
            for address in ("10.0.0.2:7001", "10.0.0.3:7000", "/etc/passwd", f"{known[3]}x", "10.0.0.1.evil:7000", "x"):
                with pytest.raises(InvalidRequest):
                    found.check(Transfer("x", address), None)
            for transfer in (Transfer(""), Transfer("x" * 65), Transfer("é"), Transfer("a\n"), Transfer("a", "", -1.0)):
                with pytest.raises(InvalidRequest):
                    found.check(None, transfer)
    assert parse_peer("10.0.0.1").port == 0


# -- bounds ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_kept_and_not_sent(tmp_path):
    size = FACTS.groups[0].num_bytes
    with ExitStack() as stack:
        two = Two(stack, str(tmp_path / "run" / "blocks"), True, second={"max_bytes": 3 * size})
        two.begin("a")
        two.put("a", blocks_of(10))
        two.first.outbox.finish("a")
        until(lambda: two.second.inbox.settled("a"))
        until(lambda: two.first.outbox.num_bytes == 0)
        assert two.second.inbox.stats().num_bytes == 3 * size
        assert_equal(two, blocks_of(10)[:3])
        two.begin("b")  # and then there is room again
        two.put("b", blocks_of(3, first=500))
        two.first.outbox.finish("b")
        until(lambda: two.second.inbox.settled("b"))
        assert_equal(two, blocks_of(3, first=500))


def test_parts_that_nobody_asks_for_make_room(tmp_path, monkeypatch):
    size = FACTS.groups[0].num_bytes
    with ExitStack() as stack:
        two = Two(stack, str(tmp_path / "run" / "blocks"), True, second={"max_bytes": 4 * size})
        for name, first in (("a", 0), ("b", 500), ("c", 900)):
            assert two.first.outbox.open(Transfer(name, two.address))
            two.put(name, blocks_of(3, first=first))
            two.first.outbox.finish(name)
            until(lambda name=name: not two.first.outbox.is_open(name))
        assert two.second.inbox.stats().num_bytes <= 4 * size
        assert two.arrived(blocks_of(3, first=900))


def test_held_transfers_make_room_for_new_ones(tmp_path):
    size = FACTS.groups[0].num_bytes
    with exchange(tmp_path / "run" / "blocks", max_bytes=5 * size) as first:
        for name, start in (("a", 0), ("b", 500), ("c", 900)):
            assert first.outbox.open(Transfer(name))
            assert first.outbox.room >= 3 * size
            for block in blocks_of(3, first=start):
                first.outbox.put(name, block, 0, memoryview(payload_of(block)))
            first.outbox.finish(name)
            assert first.outbox.num_bytes <= 5 * size
        assert not first.outbox.is_open("a") and first.outbox.is_open("c")
        assert not first.outbox.open(Transfer("c")), "its id is in use"


def test_few_addresses_have_senders_at_a_time(tmp_path, monkeypatch):
    """A client that may name every port of a host makes no thread for each."""
    monkeypatch.setattr(outbox, "MAX_SENDERS", 3)
    with exchange(None, tmp_path / "run" / "0") as first:
        opened = [first.outbox.open(Transfer(str(i), str(tmp_path / "run" / str(i)), 0.2)) for i in range(6)]
        assert opened == [True] * 3 + [False] * 3
        assert first.outbox.open(Transfer("again", str(tmp_path / "run" / "0")))
