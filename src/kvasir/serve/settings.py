"""The settings of a server: its address, its keys and allowed clients, and its bounds."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from kvasir.environment import user_path
from kvasir.errors import ConfigError
from kvasir.serve.auth.keys import Key, check_distinct
from kvasir.serve.http.networks import check_endpoint, is_loopback, networks
from kvasir.serve.http.tls import Tls

MIB = 1 << 20
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")  # RFC 9110


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Sizes in bytes and times in seconds unless a name states otherwise.

    api_keys: any of them opens every route; without keys only a loopback address may be bound.
    keys: the same with a name, scopes, a class, a share and limits. keys_file: their source, read again whenever it
    changes.
    model_names: names by which clients may call the model; responses carry the first. Empty: the engine's own name.
    allowed_hosts / allowed_origins: in addition to loopback names and the bound address; "*" allows all.
    max_logprobs: maximum candidates per token of a request.
    answer_memory: of all choices that are generated and not streamed; None: an eighth of the host's.
    share_cache: keys share one prefix cache instead of having one each.
    page: the web page is served. reasoning: models may think unless a request turns it off; False: only if it turns it
    on.
    trust_request_chat_template: a chat may have a template of its own.
    ignore_unknown_fields: a request with fields that are not known is served, and a header of the response lists them.
    vllm_metrics: /metrics also has metrics under the names of vLLM.
    ping: a stream sends a comment after a silence of this length, so that no proxy takes it for dead.
    access_log / audit_log: files of JSON lines about all requests, and about those that manage the server; "-" is the
    standard output.
    data_dir: where responses, files and batches are stored; None keeps them in memory, as long as the server runs.
    stored_count: responses of one key. stored_bytes: of all together, the same share for each key. stored_days: since a
    response was last used. max_background: responses of one key that are generated in the background at once.
    max_file: of one upload. file_bytes: of all files together, the same share for each key. file_count, batch_count: of
    one key. batch_width: lines of batches that run at once; None: by what the engines
    compute at once.
    tls_cert / tls_key / tls_ca: PEM files of the server's certificate, its key, and of the authorities that must have
    signed the clients' certificates; https if the first is given.
    max_connections: open at once. max_connections_per_address: of these from one address, or one /64 of IPv6.
    trusted_proxies: addresses and networks whose connections are not bounded by address; instead the addresses in their
    X-Forwarded-For are.
    cors_...: what pages of the allowed origins may send, for how many seconds browsers may cache that, and whether
    cookies are sent.
    lora_dirs: folders from which clients may load adapters. lora_resolve: a request may name a folder in one of them
    that is not loaded yet.
    drain: seconds for which requests may finish when the server, or a replica, ends. replaces_replicas: at SIGHUP.
    routers: servers in front of the same replicas, which share the limits of keys.
    otlp_endpoint: URL of the collector that gets traces. otlp_ratio: share of the requests that are traced, of those
    whose caller does not decide it.
    head_time / body_time / write_time: how long a client may take for its headers, its body, and to accept a chunk;
    write_time 0: no limit.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    keys_file: Path | None = None
    model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    share_cache: bool = False
    page: bool = True
    reasoning: bool = True
    trust_request_chat_template: bool = False
    ignore_unknown_fields: bool = False
    vllm_metrics: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    cors_headers: tuple[str, ...] = ("*",)
    cors_methods: tuple[str, ...] = ("GET", "HEAD", "POST", "DELETE")
    cors_max_age: int = 600
    cors_credentials: bool = False
    access_log: Path | None = None
    audit_log: Path | None = None
    max_body: int = 16 * MIB
    max_headers: int = 32 * 1024
    max_json_depth: int = 64
    max_prompts: int = 256
    max_answers: int = 1024
    max_embeddings: int = 2048
    max_logprobs: int = 20
    answer_memory: int | None = None
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    trusted_proxies: tuple[str, ...] = ()
    data_dir: Path | None = None
    stored_count: int = 10_000
    stored_bytes: int = 256 * MIB
    stored_days: float = 30.0
    max_background: int = 64
    max_file: int = 64 * MIB
    file_bytes: int = 256 * MIB
    file_count: int = 1000
    batch_count: int = 1000
    batch_width: int | None = None
    lora_dirs: tuple[Path, ...] = ()
    lora_resolve: bool = False
    head_time: float = 15.0
    body_time: float = 60.0
    write_time: float = 60.0
    keep_alive: float = 75.0
    ping: float = 15.0
    drain: float = 30.0
    replaces_replicas: bool = False
    routers: int = 1
    otlp_endpoint: str | None = None
    otlp_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}", "expected 0 to 65535")
        check_distinct(self.all_keys)
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_ca and not self.tls_cert):
            raise ConfigError("TLS needs a certificate and its key", "give --tls-cert and --tls-key")
        networks(self.trusted_proxies)
        for name in ("max_connections", "max_connections_per_address", "batch_width", "routers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "expected 1 or more")
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        if not 0.0 <= self.otlp_ratio <= 1.0:
            raise ConfigError(f"otlp_ratio is {self.otlp_ratio}", "expected 0 to 1")
        if not 0 <= self.write_time < math.inf:
            raise ConfigError(f"stream_idle_timeout is {self.write_time}", "give seconds, or 0 for no limit")
        if self.lora_resolve and not self.lora_dirs:
            raise ConfigError("lora_resolve without a folder", "give --lora-dir FOLDER")
        for folder in self.lora_dirs:
            if not user_path(folder).is_dir():
                raise ConfigError(f"--lora-dir {folder}: there is no such folder", "create it, or name another")
        if self.cors_max_age < 0:
            raise ConfigError(f"cors_max_age is {self.cors_max_age}", "expected 0 or more seconds")
        if self.cors_credentials and "*" in self.allowed_origins:
            raise ConfigError("credentials cannot be allowed for the origin *", "list the origins")
        for name in (*self.cors_headers, *self.cors_methods):
            if not _TOKEN.fullmatch(name):
                raise ConfigError(f"{name!r:.80} is no name of a header or method", "expected one, without commas")
        if not self.all_keys and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is a public address and no API key is set",
                "set a key, or listen on 127.0.0.1",
            )

    @property
    def tls(self) -> Tls | None:
        return Tls(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert and self.tls_key else None

    @property
    def all_keys(self) -> tuple[Key, ...]:
        return (*self.keys, *self.plain_keys)

    @property
    def plain_keys(self) -> tuple[Key, ...]:
        """The keys without names, named by their digests. They have the scope inference only."""
        return tuple(Key(k, hashlib.sha256(k.encode()).hexdigest()[:16]) for k in dict.fromkeys(self.api_keys))
