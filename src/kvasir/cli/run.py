"""`kvasir run`: an answer to a message, or the continuation of a text, streamed to the terminal."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvasir.adapters import for_all_requests
from kvasir.cli.chat.screen import Screen, ThinkingView, thinking_of
from kvasir.cli.check import check_asked, check_length, has_template
from kvasir.cli.resolve import resolve
from kvasir.cli.sampler import SamplerOptions
from kvasir.cli.show import fitted
from kvasir.cli.waiting import loaded, print_decided
from kvasir.config import EngineOptions
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.pace import Pace
from kvasir.engine.predicting import draft_fields
from kvasir.engine.thinking import may_think
from kvasir.errors import ConfigError, InvalidRequest, KvasirError
from kvasir.store.entry import ModelEntry
from kvasir.store.parameters import sampling_of
from kvasir.types import SamplingParams, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from kvasir.engine.front import Front
    from kvasir.types import Request


def run(
    engine: EngineOptions,
    prompt: str,
    given: Mapping[str, Any],
    chat: bool | None,
    quiet: bool,
    verbose: bool,
    sampler: SamplerOptions,
    prediction: Path | None = None,
) -> None:
    """Generates one answer or continuation. given: temperature, max_tokens and seed, None for the default. chat:
    whether the prompt is a message; None: if the model has a chat template. Raises KvasirError."""
    predicted = _text_of(prediction) if prediction else None
    text = _standard_input() if prompt == "-" else prompt
    engine, entry = resolve(replace(engine, lora=for_all_requests(engine.lora)))
    asked = sampler.params() | {name: value for name, value in given.items() if value is not None}
    own = sampling_of(entry.parameters) if entry else {}
    wanted = {**own, **asked}
    params = SamplingParams(**{"max_tokens": None, **wanted})
    llm = AsyncLLM(**asdict(engine), launch=True)
    try:
        chat = has_template(llm.front) if chat is None else chat
        check_asked(llm.front, params, chat)
        check_length(engine, params.max_tokens)
        tokenizer = llm.front.tokenizer
        if not text and (chat or (tokenizer is not None and tokenizer.bos_id is None)):
            raise InvalidRequest("the prompt is empty", "give a message to answer or a text to continue")
        asyncio.run(_run(llm, entry, text, wanted, chat, quiet, verbose, predicted))
    finally:
        llm.abandon()


def _text_of(path: Path) -> str:
    """The text of a file with an expected answer. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"prediction {path}: {reason}", "name a text file") from None


def _standard_input() -> str:
    """The whole standard input, without a newline at its end. Raises ConfigError if it is empty or not UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error.reason}", "give a text") from None
    if not text:
        raise ConfigError("standard input is empty", "pipe the prompt into it, or give it as an argument")
    return text


async def _run(
    llm: AsyncLLM,
    entry: ModelEntry | None,
    prompt: str,
    wanted: Mapping[str, Any],
    chat: bool,
    quiet: bool,
    verbose: bool,
    prediction: str | None,
) -> None:
    async with loaded(llm):
        if not quiet:
            print_decided(llm.summary, verbose)
        front = llm.front
        messages = [{"role": "user", "content": prompt}]
        messages = entry.conversation(messages) if entry else messages
        ids: Sequence[int] = await (front.encode_chat(messages) if chat else front.encode(prompt))
        # The model's recommendations, overridden by the store's parameters, overridden by the user's options.
        params = SamplingParams(**{"max_tokens": None, **llm.info.default_sampling, **wanted})
        await front.learn(params)
        thinks = params.structured_outputs is None or await may_think(front, messages)
        drafts = await draft_fields(front, prediction, None)
        if chat:
            request = await front.resolve_chat(ids, params, thinks, **drafts)
            await print_answer(front, request, quiet, await thinking_of(front, ids))
        else:
            await print_answer(front, front.resolve(ids, params, **drafts), quiet)


async def print_answer(front: Front, request: Request, quiet: bool, thinking: ThinkingView | None = None) -> None:
    """Prints the text as it arrives and, unless `quiet`, its figures to standard error. thinking: of an answer; None
    for the continuation of a text. Raises KvasirError if the engine fails; the text before that is printed."""
    pace, reason, error, usage = Pace(), None, "", Usage()
    screen = Screen(renders=thinking is not None)
    if not quiet:
        screen.begin_answer()
    try:
        async for delta in front.stream(request):
            pace.saw(delta)
            reason = delta.finish_reason or reason
            error = delta.error or error
            usage = delta.usage
            screen.pieces(thinking.push(delta.text) if thinking else [(delta.text, False)])
        screen.pieces(thinking.flush() if thinking else [])
    finally:
        screen.end_answer()  # before the figures, where both go to one file
    if error:
        raise KvasirError(f"the engine failed: {error}", "run `kvasir doctor` to check this machine")
    if not quiet and pace.first is not None:
        rate = f" at {pace.rate:.1f}/s" if pace.rate else ""
        if drafted := usage.accepted_tokens + usage.rejected_tokens:
            rate += f", {usage.accepted_tokens} of {drafted} drafts right"
        line = (
            f"{len(request.prompt_ids)} prompt tokens, first token after {pace.first - pace.begun:.3f} s, "
            f"{pace.count} token{'s' * (pace.count != 1)}{rate}, ended by {reason.value if reason else '?'}, "
            f"seed {request.params.seed}"
        )
        print(fitted(line, sys.stderr), file=sys.stderr)
