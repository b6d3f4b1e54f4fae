"""BlockExchange: how one engine sends blocks to others and takes blocks from them.

Each engine may listen at an address. Either end of a transfer may connect: the sender to push as blocks are computed,
or the receiver to fetch what the sender holds for it. An engine connects only to addresses that it was given, never to
one that only a request names.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from kvasir.errors import ConfigError, InvalidRequest
from kvasir.kv.tiers.block import StoreFacts
from kvasir.kv.tiers.later import Identity
from kvasir.kv.transfer import frames
from kvasir.kv.transfer.acceptor import Acceptor
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.frames import MAX_ID
from kvasir.kv.transfer.inbox import Inbox
from kvasir.kv.transfer.link import Address, Greeting, Link, Listener, Refused, connect, parse_address
from kvasir.kv.transfer.outbox import FIRST_PAUSE, LONGEST_PAUSE, Outbox
from kvasir.kv.transfer.security import NO_CREDENTIALS, Credentials
from kvasir.kv.transfer.stream import PartReceiver
from kvasir.types import Transfer

log = logging.getLogger("kvasir.kv")

MAX_SECONDS = 3600
FIELD = "kv_transfer_params"
FETCHES = 8  # transfers fetched at a time
CLOSE_SECONDS = 5.0
UNKNOWN_SECONDS = 0.5  # a sender may not have noticed yet that an earlier link has broken


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """listen: own address; None: only this engine connects. peers: addresses that it may connect to, as HOST:PORT, HOST
    for all ports of a host, or paths. max_bytes: bound of the outbox, and of the inbox."""

    listen: Address | None = None
    peers: tuple[str, ...] = ()
    credentials: Credentials = NO_CREDENTIALS
    max_bytes: int = 1 << 30
    sends: bool = True
    takes: bool = True


class BlockExchange:
    """Owns an outbox, an inbox and the links. facts: of the engine's blocks; of its model, the identity is exchanged.
    address: where other engines can connect; "" if they cannot.

    Raises ConfigError if the address cannot be listened on, or its credentials cannot be used."""

    def __init__(self, facts: StoreFacts, identity: Identity, options: ExchangeOptions):
        self.options = options
        self._facts = facts
        self._identity = identity
        self._greeting = Greeting(options.credentials, self._digest, self._offers)
        self.outbox = Outbox(facts, options.max_bytes, self._open_link)
        self.inbox = Inbox(facts, options.max_bytes)
        self.engine_id = secrets.token_hex(8)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._links: set[BlockSocket] = set()
        self._fetchers = ThreadPoolExecutor(FETCHES, "kv-fetch")
        if any(parse_peer(peer).path is None for peer in options.peers):
            options.credentials.context(server=False)
        self.address, self._acceptor = "", None
        if options.listen:
            listener = Listener(options.listen, options.credentials)
            self.address = str(listener.address)
            self._acceptor = Acceptor(listener, self._greeting, self._serve, "kv-transfer")

    @property
    def ready(self) -> bool:
        """Whether the weights are identified, so that blocks can be exchanged."""
        return self._identity.value is not None

    def _digest(self) -> bytes | None:
        model = self._identity.value
        return None if model is None else replace(self._facts, model=model).digest()

    # -- the scheduler's side ------------------------------------------------------------------------------------

    def check(self, sends: Transfer | None, takes: Transfer | None) -> None:
        """Raises InvalidRequest for a transfer that this engine takes no part in."""
        for transfer, able, verb in ((sends, self.options.sends, "send"), (takes, self.options.takes, "take")):
            if transfer is not None:
                if not able:
                    raise InvalidRequest(f"this engine does not {verb} blocks", "see --role", FIELD)
                self._check(transfer)

    def _check(self, transfer: Transfer) -> None:
        if not (0 < len(transfer.id) <= MAX_ID and transfer.id.isascii() and transfer.id.isprintable()):
            raise InvalidRequest("the id of the transfer is invalid", f"expected up to {MAX_ID} characters", FIELD)
        if not 0 < transfer.seconds <= MAX_SECONDS:
            raise InvalidRequest("the time limit of a transfer is out of range", f"up to {MAX_SECONDS}", FIELD)
        if transfer.address and not self.knows(transfer.address):
            message = f"{transfer.address!r} is not an engine that this one may connect to"
            raise InvalidRequest(message, "name it with --transfer-peer", FIELD)

    def knows(self, address: str) -> bool:
        """Whether this engine may connect to an address that a request names."""
        try:
            wanted = parse_address(address)
        except ConfigError:
            return False
        allowed = [parse_peer(peer) for peer in self.options.peers]
        return any(
            wanted in (peer, replace(peer, port=wanted.port if not peer.port else peer.port)) for peer in allowed
        )

    def expect(self, transfer: Transfer) -> None:
        """A request waits for a transfer; fetches it if it has an address."""
        self.inbox.expect(transfer)
        if transfer.address and not self._closing.is_set():
            with suppress(RuntimeError):  # closed meanwhile
                self._fetchers.submit(self._fetch, transfer)

    # -- links ---------------------------------------------------------------------------------------------------

    def _open_link(self, address: str) -> Link:
        return connect(parse_address(address), self._greeting)

    def _offers(self, transfer: str) -> bool:
        return self.options.sends and self.outbox.claim(transfer)

    def _serve(self, link: Link, wants: str) -> None:
        """Serves an engine that has connected to this one."""
        if wants:
            self.outbox.serve(link, wants)
        elif self.options.takes:
            self._receive(link)

    def _receive(self, link: Link, until: Callable[[str], bool] = lambda transfer: False) -> None:
        with self._lock:
            self._links.add(link)
        try:
            if not self._closing.is_set():
                PartReceiver(link, self._facts, self.inbox).run(until)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _fetch(self, transfer: Transfer) -> None:
        """Fetches a transfer from the engine that holds it; gives up when its request no longer waits."""
        pause, begun = FIRST_PAUSE, time.monotonic()
        address = parse_address(transfer.address)
        while not self._closing.is_set() and not self.inbox.settled(transfer.id):
            try:
                link = connect(address, self._greeting, transfer.id)
                pause, begun = FIRST_PAUSE, time.monotonic()
                self._receive(link, lambda ended: ended == transfer.id)
                return
            except Refused as refused:
                patient = UNKNOWN_SECONDS if refused.reason == frames.UNKNOWN else 0.0
                if refused.reason != frames.UNREADY and time.monotonic() - begun >= patient:
                    log.warning("%s gives no blocks to this engine: %s", address, refused)
                    break
            except ConfigError as error:
                log.warning("no blocks can be fetched from %s: %s", address, error)
                break
            except (OSError, WireError) as error:
                log.info("fetching blocks from %s: %s", address, error)
            except Exception:
                log.exception("fetching blocks failed")
                break
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self.inbox.done(transfer.id)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Sends what is to be pushed until the timeout (seconds), then ends all links."""
        deadline = time.monotonic() + timeout
        self._identity.close()
        self.outbox.close(timeout)
        self._closing.set()
        threads = self._acceptor.close() if self._acceptor else []
        with self._lock:
            for link in self._links:
                link.shut()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        for thread in threads:
            thread.join(max(0.1, deadline - time.monotonic()))


def parse_peer(text: str) -> Address:
    """Reads an address that may lack its port: then all ports of the host. Raises ConfigError."""
    return parse_address(text if "/" in text or text.rpartition(":")[2].isdigit() else f"{text}:0")


def peers_of(texts: Sequence[str]) -> tuple[str, ...]:
    """The peers, checked. Raises ConfigError."""
    for text in texts:
        parse_peer(text)
    return tuple(texts)
