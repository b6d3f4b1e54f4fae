"""Notes that clients of a host leave for each other."""

from __future__ import annotations

import asyncio

from kvasir.engine.board import Board
from kvasir.engine.client import Exchanges
from kvasir.engine.fake import FakeEngine
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine
from tests.engine.test_process import until


def test_each_gets_the_notes_of_the_others():
    board, got = Board(), {name: [] for name in "abc"}
    take = {name: got[name].append for name in got}
    board.leave_note(take["a"], b"a1")
    assert got == {"a": [], "b": [], "c": []}
    board.leave_note(take["b"], b"b1")
    board.leave_note(take["a"], b"a2")
    assert got == {"a": [b"b1"], "b": [b"a1", b"a2"], "c": []}
    board.leave(take["a"])
    board.leave(take["a"])
    board.leave_note(take["c"], b"c1")
    assert got == {"a": [b"b1"], "b": [b"a1", b"a2", b"c1"], "c": [b"b1"]}


async def test_notes_pass_through_a_host_and_those_of_clients_that_leave_are_gone(tmp_path):
    engine = FakeEngine()
    await engine.start()
    host = EngineHost(engine)
    tmp_path.chmod(0o700)
    await host.listen_unix(tmp_path / "s")
    clients = [RemoteEngine(HostAddress(tmp_path / "s")) for _ in range(3)]
    got: list[list[bytes]] = [[], [], []]
    try:
        for client in clients:
            await client.start()
            assert isinstance(client, Exchanges) and not isinstance(engine, Exchanges)
        clients[0].exchange(b"from 0", got[0].append)
        clients[1].exchange(b"from 1", got[1].append)
        await until(lambda: got == [[b"from 1"], [b"from 0"], []])
        await clients[0].stop()
        await until(lambda: host.num_clients == 2)
        clients[2].exchange(b"from 2", got[2].append)
        await until(lambda: got == [[b"from 1"], [b"from 0", b"from 2"], [b"from 1"]])
        clients[1].exchange(bytes(2 << 20), got[1].append)  # too long: the host ends the connection
        await until(lambda: host.num_clients == 1)
    finally:
        await asyncio.gather(*(client.stop() for client in clients))
        await host.close()
        await engine.stop()
