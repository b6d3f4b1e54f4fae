"""Messages of an engine are taken in their order, whenever its receiver ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvasir.engine.receiver import Receiver


class Socket:
    """Has messages; `arrive` hands the first one to whoever waits, who runs later."""

    def __init__(self, *messages: bytes):
        self.messages = list(messages)
        self.waiting: asyncio.Future[bytes] | None = None

    def recv(self) -> asyncio.Future[bytes]:
        self.waiting = asyncio.get_running_loop().create_future()
        return self.waiting

    def arrive(self) -> None:
        if self.messages and self.waiting and not self.waiting.done():
            self.waiting.set_result(self.messages.pop(0))

    async def poll(self, _: int) -> bool:
        if self.messages and self.waiting and self.waiting.done():
            asyncio.get_running_loop().call_soon(self.arrive)
        return bool(self.messages)


@pytest.mark.parametrize("turns", range(4))
async def test_no_message_is_missed_before_later_ones(turns):
    """The receiver ends `turns` of the loop before or after a message arrived for it."""
    taken: list[bytes] = []
    socket: Any = Socket(b"1", b"2", b"3")
    receiver = Receiver(socket, taken.append)
    await asyncio.sleep(0)
    ending = asyncio.create_task(receiver.end())
    for _ in range(turns):
        await asyncio.sleep(0)
    socket.arrive()
    await asyncio.wait_for(ending, 5)
    assert taken == [b"1", b"2", b"3"]


async def test_what_waits_is_left_alone_when_it_is_cancelled():
    taken: list[bytes] = []
    socket: Any = Socket(b"1")
    receiver = Receiver(socket, taken.append)
    await asyncio.sleep(0)
    receiver.cancel()
    socket.arrive()
    await asyncio.sleep(0)
    assert taken == []


@pytest.mark.parametrize("turns", range(1, 6))
async def test_an_end_that_is_cancelled_does_not_go_on(turns):
    """Else an engine that is stopped while it buries its dead process would start another one, and never stop."""
    socket: Any = Socket()
    receiver = Receiver(socket, print)
    await asyncio.sleep(0)
    went_on = []

    async def bury() -> None:
        await receiver.end()
        await asyncio.sleep(0)
        went_on.append(True)

    burying = asyncio.create_task(bury())
    for _ in range(turns):
        if not burying.done():
            await asyncio.sleep(0)
    if burying.done():
        return
    burying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(burying, 5)
    assert not went_on


async def test_what_fails_in_taking_a_message_is_raised_at_the_end():
    def fails(message: bytes) -> None:
        raise ValueError(message)

    socket: Any = Socket(b"1")
    receiver = Receiver(socket, fails)
    await asyncio.sleep(0)
    socket.arrive()
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="1"):
        await receiver.end()
