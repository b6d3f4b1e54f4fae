"""Front: the text half on top of an Engine. Text, ids and conversations go in, text comes out.

    encode / encode_chat -> ids -> resolve -> Request -> stream -> TextDelta ...

Slow work (a long text, a chat template) runs in a thread, so that no request blocks the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from kvasir.engine.answer import Answer, AnswerText, TextDelta
from kvasir.engine.checks import check_ids, check_input_fits, check_task, check_vocabulary, room_for_answer
from kvasir.engine.client import Engine
from kvasir.engine.grammars import Grammars
from kvasir.engine.lengths import Bound, Lengths
from kvasir.engine.meter import Meter
from kvasir.engine.reading import Reader, Reading
from kvasir.engine.turns import LONG_BYTES, Turns, batches, size_of, size_within
from kvasir.errors import DeadlineExceeded, EngineDead, InvalidRequest, KvasirError, TemplateTooLong
from kvasir.guided.vocabulary import Vocabulary
from kvasir.seeds import draw_seed
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.text.chat import ChatTemplate
from kvasir.text.encoder import Spans
from kvasir.text.fim import Infill
from kvasir.text.prompts import Prompts
from kvasir.text.rendered import Rendered
from kvasir.text.sandbox import Hold
from kvasir.text.sequences import Breakers, bad_words
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import FinishReason, ModelInfo, Request, SamplingParams, Task

LONG_TEXT = 4096  # ids; texts from this length on are decoded in a thread
SEQUENCES_KEPT = 16  # cached conversions of bad words and breakers
RENDER_PLACES = 2  # conversations rendered at once

T = TypeVar("T")


class Front:
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
    ):
        """default_seed: for requests without a seed; None draws a fresh seed for each.
        tool_format / reasoning_format: how the model writes tool calls and reasoning, if its template does not show it.
        trust_special_tokens: the default for chats that do not set it, see `encode_chat`.
        warm: prepare for grammars as soon as the engine is ready.
        prompts: of an embedding model, which callers put before its inputs.
        Raises ConfigError for an unknown format."""
        self.engine = engine
        self._default_seed = default_seed
        self.tokenizer = tokenizer
        self.template = template
        self.prompts = prompts
        self.reader = Reader(tokenizer, template, tool_format, reasoning_format)
        self.meter = Meter()
        self.on_tokens: Callable[[str, int], None] = lambda tenant, count: None  # called with all generated tokens
        self.grammars = Grammars(self._vocabulary)
        self.trust_special_tokens = trust_special_tokens
        self._warm = warm and tokenizer is not None
        self._turns = Turns()
        self._rendering = Turns(RENDER_PLACES, "render")
        self._end: asyncio.Future[None] | None = None
        self._breakers: Breakers | None = None
        self._found = lru_cache(SEQUENCES_KEPT)(self._find)

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self.engine.info

    async def start(self) -> None:
        """Raises what `Engine.start` raises, and then leaves nothing running."""
        learning = asyncio.ensure_future(asyncio.to_thread(self.reader.learn_all)) if self._warm else None
        try:
            await self.engine.start()
        finally:
            if learning is not None:
                await learning
        try:
            if self._warm and Task.GENERATE in self.info.tasks:
                self.grammars.warm()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, drain: float = 0.0) -> None:
        """Stops the engine; idempotent, and safe to call concurrently."""
        if self._end is None:
            self.grammars.close()
            self._turns.close()
            self._rendering.close()
            if self.tokenizer is not None:
                self.tokenizer.close()
            self._end = asyncio.ensure_future(self.engine.stop(drain))
        await asyncio.shield(self._end)

    async def alive(self, timeout: float = 1.0) -> bool:
        return await self.engine.alive(timeout)

    def summary(self) -> tuple[str, ...]:
        """The engine's decisions and, if tool calls cannot be recognized, the reason; for users, after `start`."""
        fault = self.reader.fault() if self._warm else ""
        more = (f"tools     calls come back as content: {fault} (see --tool-format)",) if fault else ()
        return (*self.engine.summary, *more)

    async def stats(self) -> EngineStats:
        return await self.engine.stats()

    async def look(self) -> Snapshot:
        return await self.engine.look()

    # -- text to ids ---------------------------------------------------------------------------------------

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        foreign: Spans = (),
        blocked: frozenset[int] = frozenset(),
        param: str = "prompt",
        bound: Bound = "context",
        first: int = 0,
    ) -> tuple[int, ...]:
        """The ids of a text; an empty text becomes the beginning-of-text id, if the model has it. `foreign` spans
        produce no `blocked` ids (`Tokenizer.encode`).

        bound: "context": a long text that does not fit is refused as soon as that is certain, if possible before it is
        tokenized; "count": only if it is also longer than `Lengths.counted`; None: nothing is refused.
        first: if above 0, this many ids are enough. A text longer than `Lengths.counted` may then yield up to one id
        more than that; if it cannot be tokenized in slices, it has to fit.
        Raises InvalidRequest (with `param`) for an empty text if the model has no such id, and for a model without a
        tokenizer; TextTooLong; QueueFull if too many texts wait.
        """
        options = {"add_special_tokens": add_special_tokens, "parse_special": parse_special, "blocked": blocked}
        return (await self._encode([text], param, bound, first, foreign=[foreign] if foreign else (), **options))[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "input",
        bound: Bound = "context",
        first: int = 0,
    ) -> list[tuple[int, ...]]:
        """`encode` of each text; short texts are batched. Raises what `encode` raises for any of them."""
        found: list[tuple[int, ...]] = []
        for texts_together in batches(texts):
            found += await self._encode(texts_together, param, bound, first, add_special_tokens=add_special_tokens)
        return found

    async def encode_parts(
        self, texts: Sequence[str], *, first: int = 0, param: str = "input"
    ) -> list[tuple[int, ...]]:
        """The ids of texts within a longer prompt: without special tokens around them, and without control tokens for
        texts that look like one. first: if above 0, at least this many ids are returned of a longer text; else a text
        beyond the context is refused. Raises what `encode` raises, except for empty texts, which have no ids."""
        found: list[tuple[int, ...]] = []
        bound: Bound = None if first else "context"
        blocked = self._need_tokenizer(param).special_ids
        for together in batches(texts):
            foreign = [((0, len(text)),) for text in together]
            options = {"add_special_tokens": False, "foreign": foreign, "blocked": blocked, "empty": True}
            found += await self._encode(together, param, bound, first, **options)
        return found

    async def encode_pair(
        self, template: str, query: str, document: str, instruction: str = "", bound: Bound = "context"
    ) -> tuple[int, ...]:
        """The ids of the prompt in which the model compares two texts. template: `pair_template`. Control tokens are
        those that the template writes. Raises TemplateError, TextTooLong, QueueFull."""
        templates = self.template
        assert templates is not None

        def render(hold: Hold) -> Rendered:
            return templates.render_pair(template, query, document, instruction, hold)

        rendered = await self._rendering.run(len(query) + len(document), render)
        return await self.encode(
            rendered.text,
            add_special_tokens=False,
            foreign=rendered.foreign(()),
            blocked=self._control_ids(rendered.source),
            param="documents",
            bound=bound,
        )

    @cached_property
    def pair_template(self) -> str | None:
        """The template in which the model compares two texts; None if its tokenizer joins them."""
        return self.template.pair_source if self.template is not None else None

    @cached_property
    def pair_join(self) -> PairJoin:
        """How the tokenizer joins two texts."""
        return PairJoin(*map(tuple, self._need_tokenizer("documents").pair))

    async def _encode(
        self, texts: Sequence[str], param: str, bound: Bound, first: int, **options: Any
    ) -> list[tuple[int, ...]]:
        """texts: one text, or texts shorter than LONG_BYTES together. options: arguments of `Tokenizer.encode_many`,
        and empty: whether a text may have no ids."""
        may_be_empty = options.pop("empty", False)
        tokenizer, lengths = self._need_tokenizer(param), self._lengths(param)
        size = sum(map(size_of, texts))
        fits = lengths.must_fit(size, bound, first)
        most = first if size > lengths.counted else 0
        if fits:
            for text in texts:
                lengths.check_size(size_of(text), param)
            most = lengths.context if size >= LONG_BYTES else 0

        def encode(hold: Hold) -> list[list[int]]:
            if fits and most:
                lengths.check_characters(texts[0], size, param)
            return tokenizer.encode_many(texts, most=most, hold=hold, **options)

        many = await self._turns.run(sum(map(len, texts)), encode)
        if fits and most and len(many[0]) > most:
            raise lengths.too_long(size, len(many[0]), f"{most} tokens", param)
        return [tuple(ids) if may_be_empty else self._some(ids, param) for ids in many]

    def _some(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """The ids of a prompt, at least one. Raises InvalidRequest if there is none."""
        bos = self._need_tokenizer(param).bos_id
        ids = ids if ids or bos is None else [bos]
        if not ids:
            raise InvalidRequest("the prompt is empty", "give at least one token", param=param)
        return tuple(ids)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Renders a conversation with the model's chat template, or with `chat_template`. Raises TemplateError,
        InvalidRequest, TextTooLong, QueueFull."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template", "use the completions endpoint", param="messages")
        template = self.template

        def render(hold: Hold) -> Rendered:
            self.reader.learn(tools)
            return template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=variables,
                hold=hold,
            )

        size = size_within([*messages, *(tools or ())])
        try:  # a template from the request may take as long as a long text
            return await self._rendering.run(size if chat_template is None else max(size, LONG_BYTES), render)
        except TemplateTooLong as error:
            self._lengths("messages").check_size(error.size, "messages", "more than ")
            raise

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        bound: Bound = "context",
        trust_special_tokens: bool | None = None,
        **template: Any,
    ) -> tuple[int, ...]:
        """The ids of `render_chat`, whose arguments it takes.

        The template may write control tokens; a text in the conversation that looks like one is spelled out as plain
        text, unless `trust_special_tokens` (None: the front's setting).
        """
        rendered = await self.render_chat(messages, **template)
        trusted = self.trust_special_tokens if trust_special_tokens is None else trust_special_tokens
        foreign = () if trusted else self.foreign(rendered, template.get("tools"))
        return await self.encode(
            rendered.text,
            add_special_tokens=add_special_tokens,
            foreign=foreign,
            blocked=self._control_ids(rendered.source) if foreign else frozenset(),
            param="messages",
            bound=bound,
        )

    async def in_turn(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work`, which tokenizes texts of `size` characters in total, in a thread when its key's turn comes.
        Raises QueueFull, and what `work` raises."""
        return await self._turns.run(size, lambda _: work())

    def foreign(self, rendered: Rendered, tools: object = None) -> Spans:
        """The spans of a prompt that must not produce control tokens. Tokens that the model itself writes within its
        turns are allowed in the conversation."""
        return rendered.foreign(self.reader.turn_tokens(tools))

    def _control_ids(self, source: str) -> frozenset[int]:
        infill = self.infill.stops() if self.infill else ()
        return self._need_tokenizer("messages").control_ids(source).union(infill)

    async def encode_infill(
        self,
        before: str | Sequence[int],
        after: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        add_special_tokens: bool = True,
        param: str = "suffix",
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of a fill-in-the-middle prompt for the text between `before` and `after` (`text.fim.Infill.prompt`),
        and the ids that end the completion. Raises InvalidRequest (with `param`) if the model has no such tokens."""
        tokenizer = self._need_tokenizer(param)
        infill = self.infill
        if infill is None:
            message = "this model has no tokens for filling in the middle"
            raise InvalidRequest(
                message, "leave the suffix out, or serve a code model with fill-in-the-middle tokens", param=param
            )
        size = len(before) + len(after) + sum(len(name) + len(text) for name, text in files)

        self._lengths(param).check_size(size, param)

        def encode(_: Hold) -> list[int]:
            return infill.prompt(tokenizer, before, after, files=files, add_bos=add_special_tokens)

        return tuple(await self._turns.run(size, encode)), infill.stops()

    @cached_property
    def infill(self) -> Infill | None:
        """The model's tokens for filling in the middle; None if it has none."""
        return Infill.of(self.tokenizer) if self.tokenizer is not None else None

    def template_mentions(self, word: str, tools: object = None) -> bool:
        """Whether the source of the chat template contains this word: a role or a switch that it knows."""
        return self.template is not None and word in self.template.select(tools)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises InvalidRequest for ids outside the vocabulary."""
        tokenizer = self._need_tokenizer("tokens")
        check_ids(self.info, ids, "tokens")
        if len(ids) < LONG_TEXT:
            return tokenizer.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens)

    def _lengths(self, param: str) -> Lengths:
        return Lengths(self.info.max_model_len, self._need_tokenizer(param).table)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer", "give token ids instead of text", param=param)
        return self.tokenizer

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

    # -- ids to a request ----------------------------------------------------------------------------------

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
        unchanged. Raises InvalidRequest; nothing is ever truncated.
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
        return Request(id or _new_id(), tuple(ids), params, task, **fields)

    def _eos_ids(self) -> tuple[int, ...] | None:
        """The ids that end a choice: from the model's configuration and from its tokenizer."""
        own = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return tuple(dict.fromkeys((*self.info.eos_ids, *own))) or None

    # -- a request to text ---------------------------------------------------------------------------------

    async def stream(self, request: Request, reading: Reading | None = None) -> AsyncGenerator[TextDelta]:
        """Streams the deltas of all choices of a resolved request, parsed according to `reading`; ends after the last
        choice has ended.

        Close it (aclosing) to leave early: that frees everything the request holds. Raises what `Engine.submit` raises.
        A choice that fails alone ends with FinishReason.ERROR and `error`.
        """
        params = request.params
        answers = [AnswerText(self.tokenizer, request.prompt_ids, params, reading) for _ in range(params.n)]
        open_answers = params.n
        with self.meter.watch(request, self.info.targets.get(request.slo)) as watch:
            async with aclosing(self.engine.submit(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self.on_tokens(request.tenant, len(delta.token_ids))
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
                            await self.engine.abort(request.id, delta.index)
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
        KvasirError if the engine fails on the input, DeadlineExceeded, EngineDead."""
        with self.meter.watch(request, self.info.targets.get(request.slo)) as watch:
            async with aclosing(self.engine.submit(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    watch.saw(AnswerText(None, request.prompt_ids, request.params).push(delta))
                    if delta.finish_reason is FinishReason.ERROR:
                        raise KvasirError(f"the engine failed on this input: {delta.error}")
                    if delta.finish_reason is FinishReason.TIMEOUT:
                        raise DeadlineExceeded("the request's deadline has passed")
                    if delta.embedding is not None:
                        return delta.embedding
        raise EngineDead("the engine ended the request without an embedding")


@dataclass(frozen=True, slots=True)
class PairJoin:
    """The ids before, between and after two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


def _new_id() -> str:
    return secrets.token_hex(12)
