"""Options of `kvasir serve` for its operator, in addition to addresses and keys; see docs/operation.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvasir.config import option

# ruff: noqa: RUF009 - what `option` makes is a field


@dataclass(frozen=True, slots=True)
class OperationOptions:
    api_workers: int = option(
        1,
        "Processes that speak HTTP and text before one engine; more than one serves more tokens per second.",
        *("--api-workers", "--api-server-count", "-asc"),
    )
    routers: int = option(
        1, "Servers in front of the same replicas, this one included, which share the limits of keys."
    )
    tls_cert: Path | None = option(None, "PEM file of the server's certificate chain; enables HTTPS.")
    tls_key: Path | None = option(None, "PEM file of the certificate's private key, unencrypted.")
    tls_ca: Path | None = option(None, "PEM file of CAs; clients must present a certificate signed by one.")
    access_log: Path | None = option(None, "Access log, one JSON line per request (-: standard output).")
    otlp_endpoint: str | None = option(
        None,
        "Address of an OpenTelemetry collector that gets traces, over OTLP/HTTP (http://localhost:4318).",
        *("--otlp-traces-endpoint", "--otlp-endpoint"),
    )
    otlp_ratio: float = option(
        1.0, "Share of requests that are traced, of those whose caller does not decide it.", "--otlp-traces-ratio"
    )
    audit_log: Path | None = option(None, "Audit log of management requests (default: in --data-dir).")
    cors_header: list[str] | None = option(None, "Headers that web pages may send (repeatable; default: any).")
    cors_method: list[str] | None = option(None, "Methods that web pages may use (repeatable; default: all served).")
    cors_max_age: int = option(600, "Seconds browsers may cache preflight responses.")
    cors_credentials: bool = option(False, "Allow credentials from named origins, for a proxy that needs cookies.")
    max_connections: int = option(4096, "Maximum open connections; beyond it, only health, metrics and management.")
    max_connections_per_address: int = option(1024, "The same per client address, or per /64 of IPv6.")
    trusted_proxy: list[str] | None = option(
        None, "Address or network of a proxy whose X-Forwarded-For is trusted (repeatable)."
    )
    data_dir: Path | None = option(
        None, "Folder for responses, files and batches (default: in memory, until the server stops)."
    )
    batch_width: int | None = option(
        None, "Lines of batches that run at once (default: a quarter more than all engines compute at once)."
    )
    engine_timeout: float = option(
        20.0, "Seconds without progress on pending work before an engine is killed and restarted."
    )
    stream_idle_timeout: float = option(
        60.0, "Seconds after which a client that reads nothing is disconnected (0: never)."
    )
    lora_dir: list[Path] | None = option(
        None, "Folder from which clients with the scope management may load adapters (repeatable)."
    )
    lora_resolve: bool = option(False, "Load the adapter NAME from the folder NAME in --lora-dir on first use.")
    share_cache: bool = option(False, "Share one prefix cache among all keys instead of one per key.")
    alias: list[str] | None = option(None, "Further name by which clients may call the model (repeatable).")
    page: bool = option(True, "Serve the web page.")
    reasoning: Literal["auto", "off"] = option("auto", "off: models think only in requests that ask for it.")
    trust_request_chat_template: bool = option(False, "Take a chat template from a request's field chat_template.")
    ignore_unknown_fields: bool = option(
        False, "Serve requests with fields that are not known, and list these in X-Kvasir-Ignored-Fields."
    )
    vllm_metrics: bool = option(False, "Give metrics under the names of vLLM as well.")

    def settings(self) -> dict[str, Any]:
        """The options as fields of ServeSettings."""
        fields: dict[str, Any] = {
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "tls_ca": self.tls_ca,
            "access_log": self.access_log,
            "routers": self.routers,
            "otlp_endpoint": self.otlp_endpoint,
            "otlp_ratio": self.otlp_ratio,
            "audit_log": self.audit_log,
            "max_connections": self.max_connections,
            "max_connections_per_address": self.max_connections_per_address,
            "trusted_proxies": tuple(self.trusted_proxy or ()),
            "cors_max_age": self.cors_max_age,
            "cors_credentials": self.cors_credentials,
            "data_dir": self.data_dir,
            "batch_width": self.batch_width,
            "write_time": self.stream_idle_timeout,
            "share_cache": self.share_cache,
            "page": self.page,
            "reasoning": self.reasoning != "off",
            "trust_request_chat_template": self.trust_request_chat_template,
            "ignore_unknown_fields": self.ignore_unknown_fields,
            "vllm_metrics": self.vllm_metrics,
            "lora_dirs": tuple(self.lora_dir or ()),
            "lora_resolve": self.lora_resolve,
        }
        if self.cors_header:
            fields["cors_headers"] = tuple(self.cors_header)
        if self.cors_method:
            fields["cors_methods"] = tuple(method.upper() for method in self.cors_method)
        return fields
