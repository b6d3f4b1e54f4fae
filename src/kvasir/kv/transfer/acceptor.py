"""Acceptor: serves each connection to a listener on a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.link import Greeting, Link, Listener, Refused

log = logging.getLogger("kvasir.kv")

MAX_CONNECTIONS = 64


class Acceptor:
    """Greets each connection to `listener`, then calls `serve(link, wants)` and closes the link when it returns. wants:
    the transfer that the client named, "" if none. Connections beyond MAX_CONNECTIONS are closed at once. name: prefix
    of the threads' names."""

    def __init__(self, listener: Listener, greeting: Greeting, serve: Callable[[Link, str], None], name: str):
        self._listener, self._greeting, self._serve, self._name = listener, greeting, serve, name
        self._lock = threading.Lock()
        self._links: set[BlockSocket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            with suppress(OSError):  # there was none for a while, or descriptors ran out
                self._admit(self._listener.accept())

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._threads) >= MAX_CONNECTIONS:
                sock.close()
                return
            waiting = BlockSocket(sock)
            self._links.add(waiting)
            thread = threading.Thread(target=self._attend, args=(waiting,), name=f"{self._name}-serve", daemon=True)
            self._threads.add(thread)
        thread.start()

    def _attend(self, waiting: BlockSocket) -> None:
        link = waiting
        try:
            link, wants = self._listener.greet(waiting.sock, self._greeting)
            with self._lock:
                self._links.add(link)
            if not self._closing.is_set():
                self._serve(link, wants)
        except Refused as refused:
            log.info("refused another engine: %s", refused)
        except (OSError, WireError) as error:
            log.debug("a link of another engine ended: %s", error)
        except Exception:
            log.exception("a link of another engine failed")
        finally:
            with self._lock:
                self._links -= {waiting, link}
                self._threads.discard(threading.current_thread())
            link.close()

    def close(self) -> list[threading.Thread]:
        """Closes the listener and ends all links. Returns the threads that served them; they may still run."""
        self._closing.set()
        self._thread.join()
        self._listener.close()
        with self._lock:
            for link in self._links:
                link.shut()
            return [*self._threads]
