"""TLS: the server's certificate, and the authorities of the clients' certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvasir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. ca: clients must show a certificate signed by one of its authorities."""

    cert: Path
    key: Path
    ca: Path | None = None

    @property
    def files(self) -> list[Path]:
        return [self.cert, self.key, *([self.ca] if self.ca else ())]

    def context(self) -> ssl.SSLContext:
        """A context from the current contents of the files. Raises ConfigError if they are malformed or do not
        match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            hint = "expected a certificate and its key in PEM"
            raise ConfigError(f"{self.cert} with {self.key}: {_reason(error)}", hint) from None
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.ca}: {_reason(error)}", "expected certificates in PEM") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
