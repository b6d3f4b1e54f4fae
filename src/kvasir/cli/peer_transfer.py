"""vLLM's --kv-transfer-config, and how it maps to our flags for engines that exchange blocks.

Which connector moves the blocks is of no consequence here: only the role is taken, and an address if there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvasir.config import EngineOptions
from kvasir.errors import ConfigError, ModelFileError, quoted
from kvasir.json_file import parse_object

FLAG = "--kv-transfer-config"
ROLES = {"kv_both": "both", "kv_producer": "prefill", "kv_consumer": "decode"}
# Fields of vLLM's KVTransferConfig that only matter to its connectors.
IDLE = (
    *("kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size"),
    *("kv_connector_extra_config", "kv_connector_module_path", "kv_load_failure_policy", "enable_permute_local_kv"),
)


def with_transfer_config(options: EngineOptions, text: str | None, notes: list[str]) -> EngineOptions:
    """The options with what the flag's JSON asks for; adds notes for the user. Raises ConfigError."""
    if text is None:
        return options
    try:
        given: dict[str, Any] = parse_object(text, FLAG)
    except ModelFileError as error:
        raise ConfigError(error.message, 'expected JSON like {"kv_role": "kv_producer"}') from None
    role = given.pop("kv_role", "kv_both")
    if not isinstance(role, str) or role not in ROLES:
        raise ConfigError(f"kv_role in {FLAG} is {quoted(role)}", f"expected one of {', '.join(ROLES)}")
    host, port = given.pop("kv_ip", None), given.pop("kv_port", None)
    idle = [name for name in given if name in IDLE]
    if unknown := [name for name in given if name not in IDLE]:
        raise ConfigError(f"{FLAG} has {quoted(unknown[0])}", "expected kv_role, kv_ip, kv_port")
    if idle:
        notes.append(f"{', '.join(idle)} of {FLAG} have no effect: blocks move over sockets of Kvasir's own")
    if (host is None) != (port is None) or not isinstance(host, str | None) or not isinstance(port, int | None):
        raise ConfigError(f"kv_ip and kv_port in {FLAG} belong together", "give a text and a number, or neither")
    listen = options.transfer_listen or (None if host is None else f"{host}:{port}")
    return replace(options, role=ROLES[role], transfer_listen=listen)
