"""The whole path on the bundled model: `kvasir serve`, the official client, crashes, cancels, and leaks."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import engine_pid, serving
from tests.later import openai

MODEL = "kvasir-mini"


def client(base: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, **options)


def metric(base: str, name: str) -> float:
    text = httpx.get(f"{base}/metrics").text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M)
    assert found, f"{name} is not in /metrics:\n{text}"
    return float(found[1])


async def settled(base: str) -> None:
    """Returns when the engine is idle and its memory is back at the base line."""
    for _ in range(1000):
        if metric(base, "kvasir_answers_running") == metric(base, "kvasir_answers_waiting") == 0:
            break
        await asyncio.sleep(0.05)
    assert metric(base, "kvasir_kv_usage_ratio") == 0


def test_a_chat_is_answered_and_streamed_alike(served):
    base, _ = served
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is 23 + 45?"}],
        "temperature": 0,
    }
    whole = client(base).chat.completions.create(**question)
    pieces = list(client(base).chat.completions.create(**question, stream=True, stream_options={"include_usage": True}))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content and text
    usage = pieces[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens > 1
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the same prompt again"
    assert whole.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_answer_among_neighbours(served):
    base, _ = served

    async def ask(seed: int):
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as c:
            return await c.completions.create(
                model=MODEL,
                prompt="There once was",
                seed=seed,
                temperature=1.0,
                max_tokens=40,
                n=2,
                logprobs=2,
            )

    async def both():
        alone = await ask(7)
        crowd = await asyncio.gather(*(ask(s) for s in range(12)))
        return alone, crowd[7]

    alone, among = asyncio.run(both())
    assert [c.text for c in alone.choices] == [c.text for c in among.choices]
    assert [c.logprobs.token_logprobs for c in alone.choices] == [c.logprobs.token_logprobs for c in among.choices]
    assert alone.choices[0].text != alone.choices[1].text


def test_64_streams_with_random_cancels_leak_nothing(served):
    base, process = served
    before = engine_pid(process)

    async def one(c: openai.AsyncOpenAI, i: int) -> int:
        rng = random.Random(i)
        leave = rng.randint(1, 15) if i % 2 else 10**9
        stream = await c.completions.create(
            model=MODEL, prompt="Once " * rng.randint(1, 40), max_tokens=30, seed=i, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        count = 0
        async with stream:
            async for _ in stream:
                count += 1
                if count >= leave:
                    break
        return count

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0, timeout=120) as c:
            counts = await asyncio.gather(*(one(c, i) for i in range(64)))
        await settled(base)
        return counts

    counts = asyncio.run(all_of_them())
    assert all(n >= 2 for i, n in enumerate(counts) if i % 2 == 0)
    # At rest the engine checks rows and blocks; had they not added up, it would have ended and been started anew.
    assert engine_pid(process) == before


def test_embeddings_need_no_second_model(served):
    base, _ = served
    got = client(base).embeddings.create(model=MODEL, input=["a fox", "a wolf"])
    assert len(got.data) == 2 and len(got.data[0].embedding) == 256


def test_no_process_loads_torch(served):
    _, process = served
    for pid in (process.pid, engine_pid(process)):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps


@pytest.mark.slow
def test_a_killed_engine_causes_only_a_pause_and_a_graceful_stop_loses_nothing():
    begun = asyncio.Event()

    async def ask(base: str, i: int):
        text = ""
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0, timeout=120) as c:
            stream = await c.completions.create(
                model=MODEL, prompt="There once was a", seed=i, temperature=1.0, max_tokens=80, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for event in stream:
                begun.set()
                text += event.choices[0].text if event.choices else ""
        return text

    async def run(base: str, process) -> None:
        expected = [await ask(base, i) for i in range(4)]
        begun.clear()
        tasks = [asyncio.create_task(ask(base, i)) for i in range(4)]
        await begun.wait()
        os.kill(engine_pid(process), signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        await settled(base)
        begun.clear()
        task = asyncio.create_task(ask(base, 0))
        await begun.wait()
        process.send_signal(signal.SIGTERM)
        assert await task == expected[0]

    with serving(MODEL) as (base, process):
        asyncio.run(run(base, process))
    assert process.returncode == 0
