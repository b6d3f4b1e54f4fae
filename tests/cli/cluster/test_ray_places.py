"""Fleets on Ray elsewhere than in a terminal: replicas with roles behind TLS, and a server that Ray Serve runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.cluster.rays import SMALL, TOKEN, actors, cluster, fleet, free_port, healthy, wait_until_gone
from tests.cli.running import environment
from tests.e2e.server import serving
from tests.fleet.test_serve import SMALL as FLAGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KEY = "a-key-of-sufficient-length"
LONG = "The quick brown fox jumps over the lazy dog. " * 12
SERVE = """
import sys, ray
from ray import serve
from kvasir.cli.cluster.application import build
ray.init(address=sys.argv[1])
serve.start(proxy_location="Disabled")
for version in sys.stdin:
    given = {"config": sys.argv[2], "resource": "server", "version": version}
    serve.run(build(given), name="kvasir", route_prefix=None)
    print("runs", version, flush=True)
serve.shutdown()
"""


def asked(base: str, model: str, key: str = "") -> str:
    body = {"model": model, "prompt": LONG, "max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def secrets(folder: Path) -> dict[str, str]:
    """A key and a certificate for replicas: `reach` of a fleet."""
    cert, key = folder / "tls.crt", folder / "tls.key"
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=kvasir-replica", "-addext", "subjectAltName=DNS:kvasir-replica"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *new, *names, *files], check=True, capture_output=True)
    both, secret = folder / "both.pem", folder / "key"
    both.write_text(cert.read_text() + key.read_text())
    secret.write_text(KEY)
    for path in (both, secret):
        path.chmod(0o600)
    return {"key": str(secret), "cert": str(cert), "cert_key": str(key), "ca": str(cert)}


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
def test_models_with_roles_behind_tls(tmp_path):
    with serving("kvasir-mini", *FLAGS) as (base, _):
        expected = asked(base, "kvasir-mini")
    reach = secrets(tmp_path)
    transfer = {"transfer_key": reach["key"], "transfer_cert": str(tmp_path / "both.pem")}
    roles = {"prefill_replicas": 1, "decode_replicas": 1, **transfer}
    models = [{**SMALL, "served_model_name": "apart", **roles}, {**SMALL, "min_replicas": 0, "max_replicas": 1}]
    config = {"ray": {"num_cpus": 4}, "reach": reach, "models": models, "server": {"api_key": [KEY]}}
    with fleet(tmp_path, config) as (base, _):
        assert httpx.post(f"{base}/v1/completions", json={"prompt": "a"}).status_code == 401
        assert [asked(base, name, KEY) for name in ("apart", "kvasir-mini", "apart")] == [expected] * 3
        views = httpx.get(f"{base}/fleet", headers={"Authorization": f"Bearer {KEY}"}).json()["replicas"]
        assert len(views) == 2 and views[0]["moved"] >= 1, "prompts were handed over"


@contextmanager
def application(address: str, config: Path):
    """Ray Serve with the application of a fleet; call what it yields to deploy a version."""
    command = [sys.executable, "-c", SERVE, address, str(config)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(**TOKEN), **pipes) as driver:
        assert driver.stdin and driver.stdout

        def deploy(version: str) -> None:
            print(version, file=driver.stdin, flush=True)
            for line in driver.stdout or ():
                if re.match(f"runs {version}", line):
                    return
            raise AssertionError("the application did not start")

        yield deploy
        driver.stdin.close()
        driver.wait()


def server_of(config: Path) -> psutil.Process:
    """The process of the server that Serve runs."""
    words = ["fleet", str(config), "--supervised"]
    found = [p for p in psutil.process_iter(["cmdline"]) if all(w in (p.info["cmdline"] or ()) for w in words)]
    pids = {p.pid for p in found}
    [server] = [p for p in found if p.ppid() not in pids]  # a child that begins looks like its parent
    return server


def test_ray_serve_starts_a_server_again_which_finds_its_engines(tmp_path):
    port, path, log = free_port(), tmp_path / "fleet.yaml", tmp_path / "log"
    log.touch()
    config = {"models": [{**SMALL, "replicas": 2}], "server": {"port": port, "drain": 1}}
    path.write_text(json.dumps(config))
    base = f"http://127.0.0.1:{port}"
    with cluster() as address, application(address, path) as deploy:
        deploy("1")
        healthy(base, None, log)
        pids, answer = actors(base), asked(base, "kvasir-mini")
        first = server_of(path)
        first.kill()
        wait_until_gone([first.pid])
        healthy(base, None, log)
        assert actors(base) == pids, "the engines that were there"
        second = server_of(path)
        config["models"][0]["replicas"] = 1
        path.write_text(json.dumps(config))
        deploy("2")
        healthy(base, None, log)
        assert server_of(path).pid != second.pid
        assert actors(base) == pids[:1], "what has not changed goes on"
        assert asked(base, "kvasir-mini") == answer
        wait_until_gone(pids[1:])
    wait_until_gone(pids)  # the cluster has ended, and all with it
