"""`kvasir serve --api-workers` with the bundled model: the death of its engine, and https."""

from __future__ import annotations

import json
import shutil
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.cli.test_replica import command
from tests.serve.http.test_tls import make
from tests.serve.workers.running import until

SMALL = ("kvasir-mini", "--threads", "1", "--num-blocks", "60", "--port", "0", "--api-workers", "2")


def engine_of(server: psutil.Process) -> psutil.Process:
    [engine] = [p for p in server.children() if "kvasir.engine.worker" in p.cmdline()]
    return engine


@pytest.mark.slow
def test_streams_survive_the_death_of_the_engine():
    body = {"prompt": "Hello", "max_tokens": 250, "temperature": 0, "ignore_eos": True, "stream": True}
    with command("serve", *SMALL) as (process, url):

        def ask(begun: threading.Event) -> str:
            text = ""
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        begun.set()
            return text

        expected, engine = ask(threading.Event()), engine_of(psutil.Process(process.pid))
        with ThreadPoolExecutor(6) as pool:
            begun = threading.Event()
            got = [pool.submit(ask, begun) for _ in range(6)]
            assert begun.wait(120)
            engine.kill()
            assert not all(one.done() for one in got)
            assert [one.result() for one in got] == [expected] * 6
        until(lambda: httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"})  # in every worker


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")
def test_https(tmp_path):
    pair = make(tmp_path, "one")
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--data-dir", str(tmp_path / "data"))
    with command("serve", *SMALL, *tls) as (_, url):
        context = ssl.create_default_context(cafile=pair.cert)
        for _ in range(4):
            assert httpx.get(f"{url}/v1/models", verify=context, trust_env=False).status_code == 200
            wire = {"input": "hi", "max_output_tokens": 4}
            made = httpx.post(f"{url}/v1/responses", json=wire, verify=context, timeout=60).json()
            found = httpx.get(f"{url}/v1/responses/{made['id']}", verify=context, timeout=60)
            assert found.json()["output"] == made["output"]
