"""`kvasir run`: one prompt, one answer, streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from kvasir.config import EngineOptions
from kvasir.engine.llm import AsyncLLM
from kvasir.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(
    engine: EngineOptions,
    prompt: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    chat: bool,
    quiet: bool,
) -> None:
    asyncio.run(_run(engine, prompt, temperature, max_tokens, seed, chat, quiet))


async def _run(engine: EngineOptions, prompt: str, temperature, max_tokens, seed, chat: bool, quiet: bool) -> None:
    from dataclasses import asdict

    llm = AsyncLLM(**asdict(engine))
    async with llm:
        if not quiet:
            print("\n".join(llm.summary), file=sys.stderr)
        front = llm.front
        messages = [{"role": "user", "content": prompt}]
        ids: Sequence[int] = await (front.encode_chat(messages) if chat else front.encode(prompt))
        request = front.resolve(ids, sampling(llm, temperature, max_tokens, seed))
        await _stream(front, request, quiet)


def sampling(llm: AsyncLLM, temperature: float | None, max_tokens: int | None, seed: int | None) -> SamplingParams:
    """The model's own defaults under what the user asks for."""
    chosen: dict = dict(llm.info.default_sampling)
    if temperature is not None:
        chosen["temperature"] = temperature
    return SamplingParams(**chosen, max_tokens=max_tokens, seed=seed)


async def _stream(front, request, quiet: bool) -> None:
    begun = time.perf_counter()
    first, count, reason = None, 0, None
    async for delta in front.stream(request):
        first = first or time.perf_counter()
        count += len(delta.token_ids)
        reason = delta.finish_reason or reason
        print(delta.text, end="", flush=True)
        if delta.error:
            print(f"\nerror: {delta.error}", file=sys.stderr)
    print()
    if not quiet and first is not None:
        rate = (count - 1) / max(time.perf_counter() - first, 1e-9)
        print(
            f"{len(request.prompt_ids)} prompt tokens, first token after {first - begun:.3f} s, "
            f"{count} tokens at {rate:.1f}/s, ended by {reason.value if reason else '?'}, seed {request.params.seed}",
            file=sys.stderr,
        )
