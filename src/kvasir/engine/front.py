"""Front: the text half on top of an Engine. Text, ids and conversations go in, text comes out.

encode / encode_chat (encoding.py) -> ids -> resolve -> Request -> stream -> TextDelta ...
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvasir.adapters import AdapterOption
from kvasir.engine.adapter_shelf import AdapterShelf
from kvasir.engine.answer import Answer, AnswerText, TextDelta
from kvasir.engine.checks import (
    check_drafts,
    check_ids,
    check_input_fits,
    check_task,
    check_vocabulary,
    room_for_answer,
)
from kvasir.engine.client import Engine
from kvasir.engine.encoding import PromptEncoder
from kvasir.engine.grammars import Grammars
from kvasir.engine.lengths import Bound as Bound
from kvasir.engine.meter import Meter
from kvasir.engine.reading import Reader, Reading
from kvasir.errors import DeadlineExceeded, EngineDead, InvalidRequest, KvasirError, RequestAborted
from kvasir.guided.vocabulary import Vocabulary
from kvasir.seeds import draw_seed
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.text.chat import ChatTemplate
from kvasir.text.prompts import Prompts
from kvasir.text.sequences import Breakers, bad_words
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Delta, FinishReason, Request, SamplingParams, Task

LONG_TEXT = 4096  # ids; texts from this length on are decoded in a thread
SEQUENCES_KEPT = 16  # cached conversions of bad words and breakers
Submit = Callable[[Request], AsyncIterator[Delta]]
Through = Callable[[Request, Submit], AsyncIterator[Delta]]


class Front(PromptEncoder):
    """Keeps no state of requests except counters: the text state of a request lives in its stream and ends with it.

    All methods are called from the event loop on which the engine was started.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        default_seed: int | None = None,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        warm: bool = False,
        trust_special_tokens: bool = False,
        prompts: Prompts = Prompts(),
        adapters: Sequence[AdapterOption] = (),
    ):
        """default_seed: for requests without a seed; None draws a fresh seed for each.
        tool_format / reasoning_format: how the model writes tool calls and reasoning, if its template does not show it.
        trust_special_tokens: the default for chats that do not set it, see `encode_chat`.
        warm: prepare for grammars as soon as the engine is ready.
        prompts: of an embedding model, which callers put before its inputs.
        adapters: loaded into the engine when it has started.
        Raises ConfigError for an unknown format."""
        reader = Reader(tokenizer, template, tool_format, reasoning_format)
        super().__init__(engine, tokenizer, template, reader, trust_special_tokens)
        self._default_seed = default_seed
        self.prompts = prompts
        self.meter = Meter()
        self.adapters = AdapterShelf(engine, adapters, self.meter.forget)
        self.on_tokens: Callable[[str, int], None] = lambda tenant, count: None  # called with all generated tokens
        self.grammars = Grammars(self._vocabulary)
        self._warm = warm and tokenizer is not None
        self._end: asyncio.Future[None] | None = None
        self._breakers: Breakers | None = None
        self._found = lru_cache(SEQUENCES_KEPT)(self._find)

    async def start(self) -> None:
        """Raises what `Engine.start` raises, and then leaves nothing running."""
        learning = asyncio.ensure_future(asyncio.to_thread(self.reader.learn_all)) if self._warm else None
        try:
            await self.engine.start()
        finally:
            if learning is not None:
                await learning
        try:
            await self.adapters.start()
            if self._warm and Task.GENERATE in self.info.tasks:
                self.grammars.warm()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, drain: float = 0.0) -> None:
        """Stops the engine; idempotent, and safe to call concurrently."""
        if self._end is None:
            self.grammars.close()
            self.close_turns()
            self._end = asyncio.ensure_future(self.engine.stop(drain))
        await asyncio.shield(self._end)

    async def alive(self, timeout: float = 1.0) -> bool:
        return await self.engine.alive(timeout)

    def summary(self) -> tuple[str, ...]:
        """The engine's decisions, its adapters and, if tool calls cannot be recognized, the reason; for users, after
        `start`."""
        fault = self.reader.fault() if self._warm else ""
        more = self.adapters.summary()
        more += (f"tools     calls come back as content: {fault} (see --tool-format)",) if fault else ()
        return (*self.engine.summary, *more)

    async def stats(self) -> EngineStats:
        return await self.engine.stats()

    async def look(self) -> Snapshot:
        return await self.engine.look()

    # -- ids to a request ----------------------------------------------------------------------------------

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._need_tokenizer("grammar"), self.info.vocab_size, self._eos_ids() or ())

    async def learn(self, params: SamplingParams) -> None:
        """Prepares in a thread what `resolve` needs of the tokenizer for these parameters. Raises InvalidRequest."""
        if params.bad_words or params.dry:
            size = sum(map(len, (*params.bad_words, *params.dry_sequence_breakers)))
            await self.in_turn(size, lambda: self._sequences(params))
        if params.structured_outputs:
            await self.grammars.later(self.grammars.of, params.structured_outputs)

    def _sequences(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of Request that hold bad words and DRY breakers as ids."""
        return self._found(params.bad_words, params.dry_sequence_breakers if params.dry else ())

    def _find(self, words: tuple[str, ...], breakers: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if words:
            found["bad_word_ids"] = bad_words(self._need_tokenizer("bad_words"), words)
        if breakers:
            self._breakers = self._breakers or Breakers(self._need_tokenizer("dry_sequence_breakers"))
            found["dry_breakers"], found["dry_breaker_sequences"] = self._breakers.of(breakers)
        return found

    def resolve(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        param: str = "prompt",
        **fields: Any,
    ) -> Request:
        """Makes a complete Request: seed drawn, max_tokens set (None: what the context leaves), all values in range.

        `param` names the prompt's field in errors; `fields` (slo, tenant, cache_salt, ...) are passed to the Request
        unchanged, except `adapters`: see `AdapterShelf.applied`. Raises InvalidRequest; nothing is ever truncated.
        """
        check_task(self.info, Task.GENERATE)
        check_ids(self.info, prompt_ids, param)
        room = room_for_answer(self.info, len(prompt_ids), params.max_tokens, param)
        if params.stop:
            self._need_tokenizer("stop")
        fields |= self._sequences(params)
        if params.thinking_token_budget is not None and "grammar" not in fields:
            name = "thinking_token_budget"
            raise InvalidRequest(f"{name} applies to chats only", "use a chat endpoint", param=name)
        if params.structured_outputs:
            fields["grammar"] = self.grammars.of(params.structured_outputs)
        check_vocabulary(self.info, params)
        check_drafts(self.info, fields.get("speculation"), fields.get("prediction", ()))
        fields["adapters"] = self.adapters.applied(fields.get("adapters"), prompt_ids)
        # A drawn seed is returned to the client; JSON numbers reliably carry only 53 bits.
        seed = self._default_seed if params.seed is None else params.seed
        seed = draw_seed() if seed is None else seed
        params = replace(params, seed=seed, max_tokens=room if params.max_tokens is None else params.max_tokens)
        return Request(id or _new_id(), tuple(prompt_ids), params, eos_ids=self._eos_ids(), **fields)

    async def resolve_chat(
        self, prompt_ids: Sequence[int], params: SamplingParams, thinks: bool = True, **fields: Any
    ) -> Request:
        """`resolve` for a conversation without tools. If it `thinks`, reasoning may precede the requested structure."""
        reading = self.reader.reading(prompt_ids, None, thinks)
        grammar = await self.grammars.later(self.grammars.answer, reading, params)
        params = replace(params, structured_outputs=None)
        return self.resolve(prompt_ids, params, grammar=grammar, param="messages", **fields)

    def resolve_embedding(self, ids: Sequence[int], *, id: str | None = None, **fields: Any) -> Request:
        """Makes a complete Request for the embedding of a text. Raises InvalidRequest."""
        return self.resolve_pooled(ids, Task.EMBED, id=id, **fields)

    def resolve_pooled(
        self, ids: Sequence[int], task: Task, *, id: str | None = None, param: str = "input", **fields: Any
    ) -> Request:
        """Makes a complete Request for a task other than generating. Raises InvalidRequest."""
        check_task(self.info, task)
        check_ids(self.info, ids, param)
        check_input_fits(self.info, len(ids), param)
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
        fields["adapters"] = self.adapters.applied(fields.get("adapters"), ids)
        return Request(id or _new_id(), tuple(ids), params, task, **fields)

    def _eos_ids(self) -> tuple[int, ...] | None:
        """The ids that end a choice: from the model's configuration and from its tokenizer."""
        own = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return tuple(dict.fromkeys((*self.info.eos_ids, *own))) or None

    # -- a request to text ---------------------------------------------------------------------------------

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises InvalidRequest for ids outside the vocabulary."""
        tokenizer = self._need_tokenizer("tokens")
        check_ids(self.info, ids, "tokens")
        if len(ids) < LONG_TEXT:
            return tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens)

    async def stream(
        self, request: Request, reading: Reading | None = None, through: Through | None = None
    ) -> AsyncGenerator[TextDelta]:
        """Streams the deltas of all choices of a resolved request, parsed according to `reading`; ends after the last
        choice has ended. through: what submits the request to the engine instead.

        Close it (aclosing) to leave early: that frees everything the request holds. Raises what `Engine.submit` raises.
        A choice that fails alone ends with FinishReason.ERROR and `error`.
        """
        params = request.params
        answers = [AnswerText(self.tokenizer, request.prompt_ids, params, reading) for _ in range(params.n)]
        open_answers = params.n
        with self.meter.watch(request, self.info.targets.get(request.slo)) as watch:
            submit = self.engine.submit
            submitted = through(request, submit) if through else submit(request)
            async with aclosing(submitted) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self.on_tokens(request.tenant, len(delta.token_ids))
                    watch.notes += delta.notes
                    answer = answers[delta.index]
                    if answer.done:
                        continue
                    if delta.prompt_logprobs is None:
                        text = answer.push(delta)
                    else:  # spells every prompt token and its candidates: too slow for the event loop
                        text = await asyncio.to_thread(answer.push, delta)
                    watch.saw(text)
                    if answer.done:
                        open_answers -= 1
                        if delta.finish_reason is None:
                            await self.engine.abort(delta.id, delta.index)
                    yield text
                    if not open_answers:
                        return

    async def complete(self, request: Request, reading: Reading | None = None) -> list[Answer]:
        """All choices of a resolved request, complete. Raises as `stream` does."""
        answers = [Answer(i) for i in range(request.params.n)]
        async with aclosing(self.stream(request, reading)) as deltas:
            async for delta in deltas:
                answers[delta.index].add(delta)
        return answers

    async def embed(self, request: Request) -> tuple[float, ...]:
        """The result of a request from `resolve_pooled`: float32 values. Raises what `Engine.submit` raises,
        KvasirError if the engine fails on the input, DeadlineExceeded, RequestAborted, EngineDead."""
        with self.meter.watch(request, self.info.targets.get(request.slo)) as watch:
            async with aclosing(self.engine.submit(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    watch.saw(AnswerText(None, request.prompt_ids, request.params).push(delta))
                    if delta.finish_reason is FinishReason.ERROR:
                        raise KvasirError(f"the engine failed on this input: {delta.error}")
                    if delta.finish_reason is FinishReason.TIMEOUT:
                        raise DeadlineExceeded("the request's deadline has passed")
                    if delta.finish_reason is FinishReason.ABORT:
                        raise RequestAborted("the request was aborted")
                    if delta.embedding is not None:
                        return delta.embedding
        raise EngineDead("the engine ended the request without an embedding")


def _new_id() -> str:
    return secrets.token_hex(12)
