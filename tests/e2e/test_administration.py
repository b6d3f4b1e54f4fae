"""`kvasir serve` with the bundled model: its engines are reset and put to sleep over HTTP, through API workers and in
all replicas."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.e2e.server import serving
from tests.fleet.test_serve import SMALL
from tests.serve.workers.running import until

BODY = {"prompt": "Once upon a time there was a little girl", "max_tokens": 12, "temperature": 0}
LAYOUTS = {
    "one engine": (),
    "API workers": ("--api-workers", "2"),
    "replicas": ("--replicas", "2"),
    "both": ("--replicas", "2", "--api-workers", "2"),
}


def engines(process) -> int:
    family = psutil.Process(process.pid).children(recursive=True)
    return sum("kvasir.engine.worker" in " ".join(p.cmdline()) for p in family)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_operator_resets_the_cache_and_lets_the_model_sleep(layout):
    with serving("kvasir-mini", *SMALL, *LAYOUTS[layout]) as (base, process):

        def post(path: str, body=None) -> httpx.Response:
            return httpx.post(base + path, json=body, timeout=120)

        expected = post("/v1/completions", BODY).json()["choices"]
        count = engines(process)
        for _ in range(2):
            assert post("/v1/completions", BODY).json()["choices"] == expected
        assert post("/reset_prefix_cache").json()["freed_blocks"] > 0
        assert post("/v1/completions", BODY).json()["choices"] == expected
        for _ in range(2):
            assert post("/sleep").status_code == 200
            assert engines(process) == 0 < count
            assert httpx.get(f"{base}/is_sleeping").json() == {"is_sleeping": True}
            for _ in range(4):  # any worker may get it
                assert post("/v1/completions", BODY).json()["error"]["code"] == "asleep"
            until(lambda: httpx.get(f"{base}/health").status_code == 200)  # workers learn of it within 0.2 s
            assert post("/wake_up").status_code == 200
            assert engines(process) == count
            for _ in range(4):
                assert post("/v1/completions", BODY).json()["choices"] == expected
