"""Kvasir through its LLM object. Times are taken where ids leave the engine, or around LLM.generate as a whole."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.protocol import Timeline, serve
from kvasir import LLM, SamplingParams
from kvasir.engine.front import Front
from kvasir.types import ServiceClass


class Kvasir:
    def load(self, model: str, **options: Any) -> dict[str, Any]:
        from kvasir.cli.machine import software_facts

        self._llm = LLM(model, progress=False, **{"speculate": "off", **options})
        flags = [line.replace(model, Path(model).name) for line in self._llm.summary]
        return {"version": software_facts(), "flags": flags}

    def answer(
        self, prompts: list[list[int]], new: int, generate: bool = False, sampling: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """generate: use LLM.generate, which gives the total time only. sampling: parameters instead of greedy ones."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": new, "ignore_eos": True, **(sampling or {})})
        before = asdict(self._llm.stats())
        figures = self._generate(prompts, params) if generate else self._stream(prompts, params)
        after = asdict(self._llm.stats())
        for name in ("step_seconds", "kernel_seconds"):
            if name in after:
                figures[name] = after[name] - before[name]
        return figures

    def embed(self, prompts: list[list[int]]) -> dict[str, float]:
        begun = time.perf_counter()
        found = self._llm.embed(prompts)
        seconds = time.perf_counter() - begun
        if len(found) != len(prompts):
            raise ValueError(f"{len(found)} embeddings of {len(prompts)} texts")
        return {"total_s": seconds}

    def best(self, prompt: list[int], count: int) -> dict[str, Any]:
        """The most likely next tokens with their log-probabilities, or the embedding if `count` is 0."""
        if not count:
            return {"embedding": self._llm.embed([prompt])[0].embedding}
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=count)
        entries = self._llm.generate([prompt], params)[0].outputs[0].logprobs
        assert entries is not None
        return {"logprobs": {str(token): entry.logprob for token, entry in entries[0].items()}}

    def _generate(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
        begun = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - begun
        if any(len(output.outputs[0].token_ids) != params.max_tokens for output in outputs):
            raise ValueError(f"a choice does not have {params.max_tokens} tokens")
        return {"total_s": seconds}

    def _stream(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
        # The loop and the front of an LLM are private, but a measurement may use them.
        return self._llm._wait(stream(self._llm._llm.front, prompts, params))


async def stream(front: Front, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """The figures of all prompts at once. Raises RuntimeError if the engine fails, ValueError if tokens are missing."""
    assert params.max_tokens is not None
    line = Timeline(len(prompts), params.max_tokens)
    requests = [front.resolve(tuple(ids), params, slo=ServiceClass.BATCH) for ids in prompts]
    begun = time.perf_counter()

    async def follow(user: int) -> None:
        async with aclosing(front.engine.submit(requests[user])) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                line.add(time.perf_counter() - begun, user, len(delta.token_ids))
                if delta.error:
                    raise RuntimeError(delta.error)

    await asyncio.gather(*(follow(user) for user in range(len(prompts))))
    return line.figures()


if __name__ == "__main__":
    serve(Kvasir())
