"""Client addresses: which addresses count as one client, which proxies are trusted, and for which client they
forward; and addresses of services that the server calls."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import Scope

from kvasir.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def party(address: str | None) -> str:
    """The group of addresses that counts as one client: an IPv4 address, or a /64 of IPv6, which one subscriber has. ""
    for all connections without an address."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks of these texts. Raises ConfigError for a text that is neither an address nor a network."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(f"trusted proxy: {error}", "expected an address, or a network like 10.0.0.0/8") from error


def trusted(address: str, proxies: Iterable[Network]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in network for network in proxies)


def forwarded(scope: Scope, proxies: tuple[Network, ...]) -> str | None:
    """The client that a trusted proxy forwards for: the last address of X-Forwarded-For that is not a trusted proxy
    itself. None for a request that no trusted proxy forwards."""
    if not proxies or not trusted((scope.get("client") or ("",))[0], proxies):
        return None
    given = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for").decode("latin-1")
    for part in reversed(given.split(",")):
        address = _bare(part.strip())
        if not trusted(address, proxies):
            return address if party(address) else None
    return None


def _bare(text: str) -> str:
    """The address without the port and the brackets that some proxies add."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def is_loopback(host: str) -> bool:
    """Whether a name or address (without port and brackets) can only mean this machine."""
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether binding this address means all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def check_endpoint(url: str) -> None:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{url!r:.200} is no address of a collector", "expected one like http://localhost:4318")
