"""`kvasir run`: one prompt, one answer, streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvasir.cli.resolve import resolve
from kvasir.cli.sampler import SamplerOptions
from kvasir.config import EngineOptions
from kvasir.engine.llm import AsyncLLM
from kvasir.engine.reading import may_think
from kvasir.errors import KvasirError
from kvasir.store.entry import Entry
from kvasir.store.parameters import sampling_of
from kvasir.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def run(
    engine: EngineOptions,
    prompt: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    chat: bool,
    quiet: bool,
    sampler: SamplerOptions,
) -> None:
    engine, entry = resolve(engine)
    asked: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    asked = sampler.params() | {name: value for name, value in asked.items() if value is not None}
    asyncio.run(_run(engine, entry, prompt, asked, chat, quiet))


async def _run(
    engine: EngineOptions, entry: Entry | None, prompt: str, asked: Mapping[str, Any], chat: bool, quiet: bool
) -> None:
    llm = AsyncLLM(**asdict(engine))
    async with llm:
        if not quiet:
            print("\n".join(llm.summary), file=sys.stderr)
        front = llm.front
        messages = [{"role": "user", "content": prompt}]
        messages = entry.conversation(messages) if entry else messages
        ids: Sequence[int] = await (front.encode_chat(messages) if chat else front.encode(prompt))
        own = sampling_of(entry.parameters) if entry else {}
        # What the model recommends, over it what the store has for it, over that what the user asks for.
        params = SamplingParams(**{"max_tokens": None, **llm.info.default_sampling, **own, **asked})
        await front.learn(params)
        thinks = params.structured_outputs is None or await may_think(front, messages)
        request = await front.resolve_chat(ids, params, thinks) if chat else front.resolve(ids, params)
        await _stream(front, request, quiet)


async def _stream(front, request, quiet: bool) -> None:
    """Raises KvasirError where the engine fails; what came before is printed."""
    begun = time.perf_counter()
    first, count, reason, error = None, 0, None, ""
    async for delta in front.stream(request):
        first = first or time.perf_counter()
        count += len(delta.token_ids)
        reason = delta.finish_reason or reason
        error = delta.error or error
        print(delta.text, end="", flush=True)
    print()
    if error:
        raise KvasirError(f"the engine failed: {error}", "`kvasir doctor` says whether this machine runs it")
    if not quiet and first is not None:
        rate = (count - 1) / max(time.perf_counter() - first, 1e-9)
        print(
            f"{len(request.prompt_ids)} prompt tokens, first token after {first - begun:.3f} s, "
            f"{count} tokens at {rate:.1f}/s, ended by {reason.value if reason else '?'}, seed {request.params.seed}",
            file=sys.stderr,
        )
