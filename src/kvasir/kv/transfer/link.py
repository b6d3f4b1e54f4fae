"""Opens the connections between engines that exchange blocks: sockets, TLS, and the greeting (frames).

address    a path with a slash, of a socket file; or HOST:PORT, over TCP with TLS
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import msgspec

from kvasir.environment import user_path
from kvasir.errors import ConfigError
from kvasir.kv.tiers.folder import check_private
from kvasir.kv.transfer import block_socket, frames
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.frames import Hello
from kvasir.kv.transfer.security import Credentials
from kvasir.kv.transfer.socket_file import check_path, listen_private

GREETING_SECONDS = 5.0


class Refused(Exception):
    """The other end takes no part in this transfer. reason: one of frames.REASONS."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}: {frames.REASONS[reason]}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine can be reached: a socket file, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return str(self.path) if self.path else f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Reads PATH (with a slash) or HOST:PORT. Raises ConfigError."""
    if "/" in text:
        return Address(user_path(text).absolute())
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address for blocks", "expected HOST:PORT, or a path with a slash")
    return Address(host=host, port=int(port))


class Link(BlockSocket):
    """A greeted connection. local: whether it is a socket file, over which descriptors can be passed."""

    def __init__(self, sock: socket.socket):
        super().__init__(sock)
        self.local = sock.family == socket.AF_UNIX


@dataclass(frozen=True, slots=True)
class Greeting:
    """What an end says of itself. digest(): of its facts (StoreFacts.digest); None while its weights are not yet
    identified. offers(id): whether it can send this transfer."""

    credentials: Credentials
    digest: Callable[[], bytes | None]
    offers: Callable[[str], bool] = lambda transfer: False


# -- the end that connects ---------------------------------------------------------------------------------------


def connect(address: Address, greeting: Greeting, wants: str = "") -> Link:
    """A link to the engine at an address. wants: what it is to send, usually the id of a transfer; "" to send. Raises
    Refused, OSError, WireError, and ConfigError for a socket file that others could replace."""
    digest = greeting.digest()
    if digest is None:
        raise Refused(frames.UNREADY)
    sock = _socket_to(address, greeting.credentials)
    try:
        link = Link(sock)
        link.begin(GREETING_SECONDS)
        _introduce(link, greeting.credentials, Hello(frames.VERSION, digest, secrets.token_bytes(32), wants))
        return link
    except BaseException:
        sock.close()
        raise


def _socket_to(address: Address, credentials: Credentials) -> socket.socket:
    if address.path is None:
        context = credentials.context(server=False)
        plain = socket.create_connection((address.host, address.port), GREETING_SECONDS)
        return _over_tls(plain, context, server=False)
    check_path(address.path)
    check_private(address.path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(GREETING_SECONDS)
        sock.connect(os.fspath(address.path))
        if not block_socket.of_this_user(sock):
            raise WireError("the engine belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def _over_tls(sock: socket.socket, context: ssl.SSLContext, server: bool) -> ssl.SSLSocket:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(GREETING_SECONDS)
        return context.wrap_socket(sock, server_side=server)
    except BaseException:
        sock.close()
        raise


def _introduce(link: Link, credentials: Credentials, hello: Hello) -> None:
    said = msgspec.msgpack.encode(hello)
    link.send(frames.HELLO, said)
    kind, length = link.head({frames.CHALLENGE: 64, frames.REFUSAL: frames.ANSWER_BYTES})
    answer = bytes(link.body(length))
    if kind == frames.REFUSAL:
        raise Refused(frames.read_reason(answer))
    nonce, proof = answer[:32], answer[32:]
    if not credentials.proves(proof, b"server", said, nonce):
        raise WireError("the other engine has another key")
    link.send(frames.PROOF, credentials.proof(b"client", said, nonce))
    kind, length = link.head({frames.WELCOME: 0, frames.REFUSAL: frames.ANSWER_BYTES})
    if kind == frames.REFUSAL:
        raise Refused(frames.read_reason(link.body(length)))


# -- the end that is connected to --------------------------------------------------------------------------------


class Listener:
    """A listening socket at an address. address: where it can be reached; a port of 0 is replaced by a free one.

    Raises ConfigError if the address is unusable or taken, or TLS lacks its files."""

    def __init__(self, address: Address, credentials: Credentials):
        self._context = None
        if address.path is None:
            self._context = credentials.context(server=True)
            self.sock = _listen_tcp(address)
            address = Address(host=address.host, port=self.sock.getsockname()[1])
        else:
            self.sock = listen_private(address.path)
        self.address = address
        self.sock.settimeout(0.2)

    def accept(self) -> socket.socket:
        """The next connection, not greeted yet. Raises OSError: there was none for a while."""
        return self.sock.accept()[0]

    def greet(self, sock: socket.socket, greeting: Greeting) -> tuple[Link, str]:
        """Answers the greeting of a new connection; returns the link and the transfer that the client wants, "" if it
        sends. Closes the connection and raises OSError, WireError or Refused if it may not."""
        try:
            if self._context:
                sock = _over_tls(sock, self._context, server=True)
            elif not block_socket.of_this_user(sock):
                raise WireError("the client belongs to another user")
            link = Link(sock)
            link.begin(GREETING_SECONDS)
            return link, _answer(link, greeting)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        """Closes the socket, and removes its file."""
        self.sock.close()
        if self.address.path:
            self.address.path.unlink(missing_ok=True)


def _listen_tcp(address: Address) -> socket.socket:
    if _is_unspecified(address.host):
        message = f"{address} is every address of this machine, and other engines need one to connect to"
        raise ConfigError(message, "give the machine's own address or name")
    try:
        return socket.create_server((address.host, address.port), family=_family(address.host), backlog=64)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _answer(link: Link, greeting: Greeting) -> str:
    _, length = link.head({frames.HELLO: frames.HELLO_BYTES})
    said = bytes(link.body(length))
    hello, nonce = frames.read_hello(said), secrets.token_bytes(32)
    link.send(frames.CHALLENGE, nonce, greeting.credentials.proof(b"server", said, nonce))
    _, length = link.head({frames.PROOF: 32})
    if not greeting.credentials.proves(bytes(link.body(length)), b"client", said, nonce):
        _refuse(link, frames.DENIED)
    digest = greeting.digest()
    if digest is None:
        _refuse(link, frames.UNREADY)
    if hello.digest != digest:
        _refuse(link, frames.FOREIGN)
    if hello.wants and not greeting.offers(hello.wants):
        _refuse(link, frames.UNKNOWN)
    link.send(frames.WELCOME)
    return hello.wants


def _refuse(link: Link, reason: str) -> None:
    link.send(frames.REFUSAL, reason.encode())
    raise Refused(reason)
