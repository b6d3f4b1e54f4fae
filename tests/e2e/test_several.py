"""`kvasir serve` over a store: two names of the bundled model, loaded when they are asked for and unloaded again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from kvasir.store.modelfile import Modelfile
from kvasir.store.store import ModelStore
from tests.e2e.server import SRC, serving
from tests.later import openai


@pytest.fixture
def store(tmp_path, monkeypatch) -> ModelStore:
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    store = ModelStore(any_path=True)
    store.pull("kvasir-mini")
    store.create("greedy", Modelfile(("kvasir-mini",), {"temperature": 0, "num_ctx": 256, "num_predict": 20}))
    return store


def engines(process: subprocess.Popen) -> set[int]:
    found = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "kvasir.engine.worker" in child.cmdline():
                found.add(child.pid)
    return found


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def client(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120)


async def ask(base: str, model: str, **fields) -> str:
    async with client(base) as c:
        messages = [{"role": "user", "content": "What is 23 + 45?"}]
        answer = await c.chat.completions.create(model=model, messages=messages, **fields)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""


def kvasir(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvasir.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_models_come_and_go(store):
    async def together(base: str) -> list[str]:
        return await asyncio.gather(
            ask(base, "kvasir-mini", temperature=0, max_tokens=20), ask(base, "greedy"),
            ask(base, "kvasir-mini:latest", temperature=0, max_tokens=20), ask(base, "greedy:latest"),
        )  # fmt: skip

    async def unloaded_in_the_middle(base: str) -> str:
        """A stream during which the model is asked to unload."""
        async with client(base) as c:
            stream = await c.completions.create(
                model="kvasir-mini", prompt="Once", max_tokens=100, seed=1, stream=True, extra_body={"ignore_eos": True}
            )
            text = ""
            async for chunk in stream:
                if not text:
                    await asyncio.to_thread(kvasir, "stop", "kvasir-mini", "--url", base)
                text += chunk.choices[0].text if chunk.choices else ""
            return text

    with serving("--max-num-seqs=8", "--keep-alive=600") as (base, process):
        assert {card["id"] for card in httpx.get(f"{base}/v1/models").json()["data"]} == {
            "kvasir-mini:latest", "greedy:latest",
        }  # fmt: skip
        assert engines(process) == set()
        answers = asyncio.run(together(base))
        assert len(set(answers)) == 1 and answers[0], "the same model, loaded twice, once for each name"
        assert len(engines(process)) == 2
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        listed = kvasir("ps", "--url", base)
        assert "kvasir-mini:latest" in listed and "greedy:latest" in listed and " 256 " in listed
        text = asyncio.run(unloaded_in_the_middle(base))
        until(lambda: len(engines(process)) == 1)
        assert httpx.get(f"{base}/health").status_code == 200
        assert asyncio.run(unloaded_in_the_middle(base)) == text, "loaded again, it says the same"
        store.copy("greedy", "late")
        assert asyncio.run(ask(base, "late")) == answers[0]
        store.remove("greedy")
        gone = httpx.post(f"{base}/v1/completions", json={"model": "greedy", "prompt": "x"})
        assert gone.status_code == 404 and "kvasir pull" in gone.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError):
            asyncio.run(ask(base, "greedy"))


@pytest.mark.slow
def test_named_models_one_at_a_time_and_gone_after_a_while(store):
    async def both(base: str) -> list[str]:
        return await asyncio.gather(
            *(ask(base, name, temperature=0, max_tokens=20) for name in ("kvasir-mini", "greedy") for _ in range(2))
        )

    with serving("kvasir-mini", "greedy", "--max-loaded-models=1", "--keep-alive=1") as (base, process):
        answers = asyncio.run(both(base))
        assert len(set(answers)) == 1 and answers[0]
        assert len(engines(process)) <= 1
        until(lambda: not engines(process))
        assert asyncio.run(ask(base, "greedy")) == answers[0]
        refused = httpx.post(f"{base}/api/delete", json={"model": "greedy"}, timeout=10)
        assert refused.status_code in (400, 404, 405)
    assert store.find("greedy") is not None
