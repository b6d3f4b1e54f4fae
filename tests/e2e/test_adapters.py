"""A real server with adapters: requests of all kinds at once, a crash of the engine, adapters that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvasir.weights.find import ASSETS
from tests.e2e.server import engine_pid, serving
from tests.later import openai

pytestmark = pytest.mark.slow

ASK = [{"role": "user", "content": "What is 23 + 45?"}]
NAMES = ("red", "green", "blue")


def write(folder: Path, seed: int) -> Path:
    """An adapter of the bundled model that changes its answers."""
    config = json.loads((ASSETS / "kvasir-mini" / "config.json").read_text())
    width, draw = config["hidden_size"], np.random.default_rng(seed)
    rows = config["num_attention_heads"] * config.get("head_dim", width // config["num_attention_heads"])
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.1, (4, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draw.normal(0, 1.0, (rows, 4)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    red, green, _ = (write(folder / name, seed) for seed, name in enumerate(NAMES))
    flags = ["--lora-modules", f"red={red}", f"green={green}", "--lora-dir", str(folder), "--lora-resolve"]
    with serving("kvasir-mini", *flags, "--max-loras", "2") as (base, process):
        yield base, process


def answers(base: str, models: list[str], tokens: int = 40) -> list[str]:
    """The answers of all models, asked at once."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as api:
            ask = api.chat.completions.create
            work = [ask(model=model, messages=ASK, temperature=0, max_tokens=tokens) for model in models]
            found = await asyncio.gather(*work)
            assert [answer.model for answer in found] == models
            return [answer.choices[0].message.content for answer in found]

    return asyncio.run(run())


def test_each_answer_is_that_of_its_adapter_in_any_company(served):
    base, _ = served
    models = ["kvasir-mini", "red", "kvasir-mini:green", "blue"]
    alone = [answers(base, [model])[0] for model in models]
    assert len({*alone}) == 4
    assert answers(base, models * 4) == alone * 4, "more adapters than fit into memory at once"


def test_a_crash_changes_nothing(served):
    base, process = served
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as api:
        given = {"model": "red", "prompt": "There once was", "temperature": 0, "max_tokens": 800}
        more = {"extra_body": {"ignore_eos": True, "speculation": {"method": "off"}}}
        whole = api.completions.create(**given, **more).choices[0].text
        stream = api.completions.create(**given, **more, stream=True)
        pieces = [next(stream)]
        before = engine_pid(process)
        os.kill(before, signal.SIGKILL)
        pieces += list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == whole
    assert engine_pid(process) not in (None, before), "the engine was another one by then"


def test_a_name_with_another_file_is_another_adapter(served):
    base, _ = served
    red, green = answers(base, ["red", "green"])
    load = {"lora_name": "mine", "lora_path": "red"}
    assert httpx.post(f"{base}/v1/load_lora_adapter", json=load).status_code == 200
    assert answers(base, ["mine"]) == [red]
    load |= {"lora_path": "green", "load_inplace": True}
    assert httpx.post(f"{base}/v1/load_lora_adapter", json=load).status_code == 200
    assert answers(base, ["mine"]) == [green]
    assert httpx.post(f"{base}/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        answers(base, ["mine"])
