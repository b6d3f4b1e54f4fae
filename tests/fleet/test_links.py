"""Connections to replicas elsewhere that break in every way; and a relay that breaks them."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager

import pytest

from tests.fleet import namespaces
from tests.fleet.links import break_links
from tests.fleet.relay import Relay


@asynccontextmanager
async def relayed():
    """A relay before a server that echoes, and a connection through it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[1])
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    try:
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        yield relay, reader, writer
    finally:
        writer.close()
        await relay.stop()
        server.close()


async def test_a_relay_changes_a_bit_or_loses_a_byte():
    async with relayed() as (relay, reader, writer):
        for fault, found in ((relay.corrupt, b"xello"), (relay.lose, b"ello")):
            done = asyncio.create_task(fault())
            await asyncio.sleep(0)
            writer.write(b"hello")
            assert await reader.readexactly(len(found)) == found
            assert await done


async def test_a_relay_cuts_and_refuses():
    async with relayed() as (relay, reader, _):
        assert await relay.cut()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        refusing = asyncio.create_task(relay.refuse(0.2))
        await asyncio.sleep(0)
        reader, _ = await asyncio.open_connection("127.0.0.1", relay.port)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        assert await refusing


async def test_a_relay_stalls():
    async with relayed() as (relay, reader, writer):
        stalling = asyncio.create_task(relay.stall(0.1))
        await asyncio.sleep(0)
        writer.write(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.02)
        assert await stalling and await reader.readexactly(1) == b"x"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
async def test_streams_survive_broken_connections():
    tally = await break_links(0.0, seed=1)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.survived["streams"] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
def test_streams_survive_networks_that_go_down():
    if reason := namespaces.missing():
        pytest.skip(f"no network namespaces: {reason}")
    tally = namespaces.in_namespace(0.0, seed=1)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.fired["link down until the host counts as dead"] == 1
