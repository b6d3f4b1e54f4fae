"""Messages of any length between two ends."""

from __future__ import annotations

import threading

import pytest

from kvasir.parallel.channel import Channel


@pytest.mark.parametrize("length", [0, 1, 3 << 20])
def test_messages_arrive_whole_and_in_order(length):
    one, other = Channel.pair()
    sent = [bytes([i]) * (length + i) for i in range(3)]
    sender = threading.Thread(target=lambda: [one.send(message) for message in sent])
    sender.start()
    assert [bytes(other.receive()) for _ in sent] == sent
    sender.join()
    other.send(b"answer")
    assert one.receive() == b"answer"
    one.close()
    other.close()


@pytest.mark.parametrize("begun", [b"", b"\x05\0\0"])
def test_a_closed_end_is_an_error(begun):
    one, other = Channel.pair()
    one._socket.sendall(begun)
    one.close()
    with pytest.raises(EOFError, match="closed"):
        other.receive()
    with pytest.raises(OSError):
        other.send(b"x" * (1 << 20))
    other.close()
