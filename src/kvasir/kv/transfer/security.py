"""Who may exchange blocks: on a socket file processes of this user; over TCP those with a certificate of a trusted
authority and the key.

The certificates of all engines are usually one file, which is then also the authority: engines trust the file's owner
and not the names of machines. Both ends prove that they have the key, which never crosses the connection.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from kvasir.errors import ConfigError

MIN_KEY, MAX_KEY = 16, 4096  # bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """key: shared by all engines; may be empty if only socket files are used. cert: PEM file with certificate and
    private key. authority: PEM file of the authorities that other engines' certificates come from."""

    key: bytes = b""
    cert: Path | None = None
    authority: Path | None = None

    def proof(self, side: bytes, *heard: bytes) -> bytes:
        """What shows that a side ("client" or "server") has the key; heard: what both ends have said so far."""
        return hmac.digest(self.key, b"\0".join((b"kvasir blocks", side, *heard)), "sha256")

    def proves(self, given: bytes, side: bytes, *heard: bytes) -> bool:
        """Whether the other end has the key."""
        return hmac.compare_digest(given, self.proof(side, *heard))

    def context(self, server: bool) -> ssl.SSLContext:
        """TLS 1.3 with certificates on both sides. Raises ConfigError."""
        if not self.cert or not self.key:
            raise ConfigError(
                "blocks over TCP need a key and a certificate",
                "give --transfer-key and --transfer-cert, or a socket file",
            )
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(self.cert, password=_no_password)
            context.load_verify_locations(self.authority or self.cert)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate {self.cert} cannot be used: {error}") from None
        return context


NO_CREDENTIALS = Credentials()  # for socket files


def _no_password() -> str:
    raise ValueError("its private key is encrypted")


def read_key(path: Path) -> bytes:
    """The key in a file that only this user can read, without surrounding white space. Raises ConfigError."""
    try:
        info = os.stat(path)
        key = path.read_bytes()[: MAX_KEY + 1].strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
        raise ConfigError(f"{path} is accessible to other users", f"chmod 600 {path}")
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise ConfigError(f"the key in {path} has {len(key)} bytes", f"expected {MIN_KEY} to {MAX_KEY}")
    return key
