"""Target: adapters as the native program takes them. Whatever is accepted is packed, and computed in a step; the base
model's answer stays what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import KvasirError
from kvasir.inputs import Adapter
from kvasir.lora import is_adapter
from kvasir.ops import native
from kvasir.types import Request, SamplingParams, each_delta
from tests.fuzz.adapters import CONFIGS, WORDS, written
from tests.fuzz.mutate import mutate_json
from tests.fuzz.target import Target, scratch
from tests.weights import _files as write

PROMPT, TOKENS = tuple(range(1, 13)), 3
LARGE = (
    "logits hold",
    "norms of a matrix with DoRA are not finite",
)  # errors of requests, for values that are too large


@dataclass
class Base:
    """A small model with random weights, in an engine. answer: of the model alone."""

    core: EngineCore
    answer: list[tuple[int, float]]


@cache
def bases() -> tuple[Base, ...]:
    if not native.available():
        return ()
    found = []
    for config in CONFIGS[:2]:
        folder = scratch() / config["model_type"]
        write_model(folder, config)
        options: dict[str, Any] = {"executor": "program", "threads": 1, "block_size": 16, "num_blocks": 8}
        core = build_core(EngineOptions(str(folder), dtype="float32", max_model_len=32, max_num_seqs=2, **options))
        found.append(Base(core, answer_of(core)))
    return tuple(found)


def answer_of(core: EngineCore, *adapters: Adapter) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities, up to an error for values that are too large."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    core.add(Request("r", PROMPT, params, adapters=adapters, no_cache=True))
    found = []
    while core.has_work():
        for delta in each_delta(core.step()):
            assert delta.error is None or any(text in delta.error for text in LARGE), delta.error
            found += [(token, one.logprob) for token, one in zip(delta.token_ids, delta.logprobs, strict=True)]
    core.check()
    return found


def read(data: bytes) -> None:
    """As of the target `adapter`; the adapter applies to the whole prompt."""
    path = written(data)
    if path is None:
        return
    is_adapter(path)
    refused: list[KvasirError] = []
    for base in bases():
        core = base.core
        try:
            info = core.runner.read_adapter(str(path))
        except KvasirError as error:
            refused.append(error)
            continue
        answer_of(core, Adapter("x", content=info.content, path=info.path, nbytes=info.nbytes))
        core.scheduler.adapters.drop(info.content)
        assert answer_of(core) == base.answer, "the base model's answer has changed"
    if refused:
        raise refused[0]


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """As Hugging Face has it, with the same random weights every time."""
    draw, header, parts = np.random.default_rng(0), {}, []
    for name, shape in _tensors(config):
        array = np.ones(shape, np.float32) if "norm" in name else draw.normal(0, 0.3, shape).astype(np.float32)
        at = sum(map(len, parts))
        parts.append(array.tobytes())
        header[name] = write.tensor_entry("F32", list(shape), at, at + len(parts[-1]))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(write.safetensors_bytes(header, b"".join(parts)))


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's, or of a Qwen3 mixture's."""
    wide, head = config["hidden_size"], config["head_dim"]
    queries, keys = (head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], wide)
    yield "model.norm.weight", (wide,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], wide)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (wide,)
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", (size, wide)
        yield f"{name}.self_attn.o_proj.weight", (wide, queries)
        experts = config.get("num_experts", 0)
        if experts:
            yield f"{name}.mlp.gate.weight", (experts, wide)
            yield from ((f"{name}.self_attn.{part}_norm.weight", (head,)) for part in "qk")
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        for mlp in [f"{name}.mlp.experts.{i}" for i in range(experts)] or [f"{name}.mlp"]:
            yield from ((f"{mlp}.{part}_proj.weight", (inner, wide)) for part in ("gate", "up"))
            yield f"{mlp}.down_proj.weight", (wide, inner)


TARGETS = {"adapter_step": Target(read, mutate=partial(mutate_json, words=WORDS))}
