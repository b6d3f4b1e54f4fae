"""The Ray Serve application of a fleet, for RayService and `serve deploy`: Serve places the fleet's server and
starts it again when it dies. The server is the process of `kvasir fleet CONFIG`; no request passes through Serve.

    applications:
      - name: kvasir
        import_path: kvasir.cli.cluster.application:build
        args: {config: /etc/kvasir/fleet.yaml}
        route_prefix: null
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvasir.cli.cluster.config import read_config
from kvasir.environment import engine_environment
from kvasir.errors import ConfigError, EngineDead

HEALTH_SECONDS = 1.0  # between two looks at the process; Serve replaces it after three
END_SECONDS = 30.0  # for its end, beyond its drain
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def build(args: dict[str, Any]) -> Any:
    """The application. args: `config`, the absolute path of the fleet's file on the node of the server; if given,
    `resource`, a resource of the nodes where the server may be, and `version`, any text: another one makes Serve
    replace the server, which reads the file again. Raises ConfigError."""
    from ray import serve  # type: ignore[import-not-found]

    unknown = args.keys() - {"config", "resource", "version"}
    config = Path(str(args.get("config", "")))
    if unknown or not config.is_absolute():
        raise ConfigError(
            f"args of the application: {sorted(args)}", "expected config: /PATH, and perhaps resource, version"
        )
    drain = read_config(config).server.drain
    where = {"resources": {str(args["resource"]): 1}} if args.get("resource") else {}
    deployment = serve.deployment(
        ServerProcess,
        name="Server",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, **where},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=drain + END_SECONDS,
    )
    return deployment.bind(str(config), drain, str(args.get("version", "")))


class ServerProcess:
    """A deployment of Serve: the process of the server, which ends with it. version: only makes it another one."""

    def __init__(self, config: str, drain: float, version: str):
        import ray  # type: ignore[import-not-found]

        self._drain = drain
        server = read_config(Path(config)).server
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "kvasir.cli", "fleet", config, "--ray-address", address, "--supervised"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=engine_environment())
        while not _listens(WILDCARDS.get(server.host, server.host), server.port):
            self.check_health()
            time.sleep(0.2)

    def check_health(self) -> None:
        """Raises EngineDead if the process has ended; Serve then makes another one."""
        if (status := self._process.poll()) is not None:
            raise EngineDead(f"the fleet's server has ended with status {status}")

    async def __call__(self) -> str:
        return "The fleet's server has an address of its own."

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._drain + END_SECONDS)
        process.kill()


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
