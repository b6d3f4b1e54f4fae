"""LLM and AsyncLLM: the engine as a Python object, with the names that users know from vLLM.

llm = LLM("kvasir-mini")
for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from kvasir.config import EngineOptions
from kvasir.engine.answer import Answer
from kvasir.engine.client import Engine
from kvasir.engine.front import Front
from kvasir.engine.inproc import InProcessEngine
from kvasir.engine.load_text import load_prompts, load_text
from kvasir.engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    LexicalOutput,
    RequestOutput,
    ScoreOutput,
    TokenEmbeddingOutput,
    output_of,
    raise_fault,
)
from kvasir.engine.predicting import Choice, Prediction, draft_fields, predictions_of
from kvasir.engine.progress import Progress, described
from kvasir.engine.scoring import (
    Reading,
    compare,
    first_dimensions,
    lexical_weights,
    pairs_of,
    ranked,
    scores_of,
    token_embeddings,
)
from kvasir.engine.thinking import may_think
from kvasir.engine.turns import MAX_WAITING_PER_KEY
from kvasir.engine.vllm_drafters import from_vllm
from kvasir.errors import ConfigError, EngineDead, InvalidRequest
from kvasir.types import ModelInfo, Request, SamplingParams, ServiceClass, Task

log = logging.getLogger("kvasir.engine")

_COMPARED_AT_ONCE = 64  # requests of one comparison
Prompt = str | Sequence[int] | Mapping[str, Any]
T = TypeVar("T")


class AsyncLLM:
    """An engine in this process for asyncio programs. `options` are those of EngineOptions, and vLLM's
    `speculative_config`."""

    def __init__(self, model: str, *, engine: Engine | None = None, launch: bool = False, **options: Any):
        """engine: another implementation of the protocol (a ProcessEngine), created with the same options. launch: the
        weights begin to load at once, while the text half does; call `abandon` if `start` is not reached."""
        drafters = options.pop("speculative_config", None)
        for name, value in options.items():
            options[name] = json.dumps(value) if isinstance(value, Mapping) else value
        self.options = _with_drafters(EngineOptions(model=model, **options), drafters)
        self._progress: Progress | None = None
        self._is_abandoned = False
        self._own = InProcessEngine(self._build)
        if launch:
            self._own.launch()
        try:
            tokenizer, template = load_text(self.options)
            prompts = load_prompts(self.options)
        except BaseException:
            self.abandon()
            raise
        trust = self.options.trust_special_tokens
        self.front = Front(engine or self._own, tokenizer, template, trust_special_tokens=trust, prompts=prompts)

    def _build(self):
        from kvasir.engine.build import build_core

        return build_core(self.options, self._report)

    def _report(self, done: int, total: int, kernels: bool = False) -> None:
        if self._is_abandoned:
            raise EngineDead("the load was abandoned")
        if self._progress:
            self._progress(done, total, kernels)

    def abandon(self) -> None:
        """Ends an engine that was launched and not started."""
        self._is_abandoned = True
        self._own.abandon()

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self.front.info

    @property
    def summary(self) -> tuple[str, ...]:
        """The engine's decisions, for users."""
        return self.front.engine.summary

    async def start(self) -> AsyncLLM:
        """Loads the model; returns this object. Raises KvasirError."""
        await self.front.start()
        return self

    async def stop(self) -> None:
        """Ends running requests and frees the model; idempotent."""
        await self.front.stop()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Choice | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Streams the output of the request as it grows; the last one is `finished`. prediction, speculation: see
        `predicting.draft_fields`; they change no output. Raises KvasirError."""
        text, ids = await self._ids(prompt)
        params = params or SamplingParams()
        await self.front.learn(params)
        request = self.front.resolve(ids, params, **await draft_fields(self.front, prediction, speculation))
        answers = [Answer(i) for i in range(request.params.n)]
        async with aclosing(self.front.stream(request)) as deltas:
            async for delta in deltas:
                answers[delta.index].add(delta)
                raise_fault(answers[delta.index])
                yield output_of(request, text, answers)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Choice | None = None,
    ) -> RequestOutput:
        """The complete output. prediction, speculation: as for `generate`. Raises KvasirError."""
        text, ids = await self._ids(prompt)
        return await self._complete(text, ids, params, **await draft_fields(self.front, prediction, speculation))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Choice | None = None,
        **template: Any,
    ) -> RequestOutput:
        """The output for a conversation; `template`: tools, add_generation_prompt, variables ... of `encode_chat`.
        prediction, speculation: as for `generate`."""
        ids = await self.front.encode_chat(messages, **template)
        params = params or SamplingParams()
        await self.front.learn(params)
        thinks = params.structured_outputs is None or await may_think(self.front, messages, **template)
        fields = await draft_fields(self.front, prediction, speculation)
        request = await self.front.resolve_chat(ids, params, thinks, slo=ServiceClass.BATCH, **fields)
        return await self._finish(None, request)

    async def embed(
        self, prompt: Prompt, *, dimensions: int | None = None, prompt_name: str | None = None
    ) -> EmbeddingOutput:
        """The embedding of a prompt. dimensions: as many of its first dimensions, normalised. prompt_name: of the
        model's own prompts, put before a text. Raises KvasirError."""
        if dimensions is not None and not 1 <= dimensions <= self.info.embedding_size:
            expected = f"expected at least 1 and at most {self.info.embedding_size}"
            raise InvalidRequest(f"dimensions is {dimensions}", expected, param="dimensions")
        before = self.front.prompts.of(prompt_name)
        text, ids = await self._ids(before + prompt if isinstance(prompt, str) else prompt)
        request = self.front.resolve_embedding(ids)
        vector = await self.front.embed(request)
        found = vector if dimensions is None else first_dimensions(vector, dimensions)
        return EmbeddingOutput(request.id, text, list(ids), list(found))

    async def token_embed(self, prompt: Prompt) -> TokenEmbeddingOutput:
        """An embedding of each token of a prompt, for late interaction. Raises KvasirError."""
        text, ids = await self._ids(prompt)
        request = self.front.resolve_pooled(ids, Task.TOKEN_EMBED)
        rows = token_embeddings(self.front, ids, await self.front.embed(request))
        return TokenEmbeddingOutput(request.id, text, list(ids), [list(row) for row in rows])

    async def lexical(self, prompt: Prompt) -> LexicalOutput:
        """The weights of a prompt's tokens, of a model that has them. Raises KvasirError."""
        if not self.info.token_weights:
            raise InvalidRequest("this model has no weights of tokens", "use BGE-M3 with its sparse_linear layer")
        text, ids = await self._ids(prompt)
        request = self.front.resolve_pooled(ids, Task.TOKEN_CLASSIFY)
        weights = lexical_weights(self.front, ids, await self.front.embed(request))
        return LexicalOutput(request.id, text, list(ids), weights)

    async def classify(self, prompt: Prompt, *, use_activation: bool = True) -> ClassificationOutput:
        """The scores of a classifier's labels for a prompt; its logits without `use_activation`. Raises KvasirError."""
        text, ids = await self._ids(prompt)
        request = self.front.resolve_pooled(ids, Task.CLASSIFY)
        scores = scores_of(self.info, await self.front.embed(request), raw=not use_activation)
        return ClassificationOutput(request.id, text, list(ids), self.info.labels, scores)

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str = "", use_activation: bool = True
    ) -> list[ScoreOutput]:
        """The scores of pairs of texts, in order: of a cross-encoder, or the cosines of an embedding model. Raises
        KvasirError."""
        comparison = await compare(self.front, pairs, Reading(instruction, raw=not use_activation))
        window = asyncio.Semaphore(_COMPARED_AT_ONCE)
        work = [_within(window, partial(self.front.embed, request)) for request in comparison.requests]
        scores = comparison.scores(await asyncio.gather(*work))
        return [ScoreOutput((one, other), score) for (one, other), score in zip(pairs, scores, strict=True)]

    async def _complete(
        self, text: str | None, ids: Sequence[int], params: SamplingParams | None, **fields: Any
    ) -> RequestOutput:
        """Serves the request in the batch class, since no client watches the output grow."""
        params = params or SamplingParams()
        await self.front.learn(params)
        return await self._finish(text, self.front.resolve(ids, params, slo=ServiceClass.BATCH, **fields))

    async def _finish(self, text: str | None, request: Request) -> RequestOutput:
        answers = await self.front.complete(request)
        for answer in answers:
            raise_fault(answer)
        return output_of(request, text, answers)

    async def _ids(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        match prompt:
            case str():
                return prompt, await self.front.encode(prompt)
            case {"prompt_token_ids": ids}:
                return None, tuple(ids)
            case {"prompt": str(text)}:
                return text, await self.front.encode(text)
            case [*ids] if all(isinstance(i, int) for i in ids):
                return None, tuple(ids)
        raise InvalidRequest(
            f"a prompt of type {type(prompt).__name__}",
            'give text, token ids, {"prompt": text} or {"prompt_token_ids": ids}', param="prompt",
        )  # fmt: skip


def _with_drafters(options: EngineOptions, config: Mapping[str, Any] | None) -> EngineOptions:
    """The options with the drafters of vLLM's `speculative_config`. Raises ConfigError."""
    if config is None:
        return options
    if not isinstance(config, Mapping) or options.speculate != "auto":
        raise ConfigError("speculative_config is not an object, or speculate is given, too", "give one of them")
    notes: list[str] = []
    found = from_vllm(options, config, notes)
    for note in notes:
        log.warning("%s", note)
    return found


class LLM:
    """An engine in this process for plain programs: pass all prompts at once, it batches them itself.

    `LLM(model, dtype=..., max_model_len=..., ...)` takes the options of AsyncLLM. `progress` shows bars while
    loading and for long batches. Close it, or use it in a `with`, to free the memory.
    """

    def __init__(self, model: str, *, progress: bool = True, **options: Any):
        self._show = progress
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvasir-llm", daemon=True)
        self._thread.start()
        try:
            self._llm = AsyncLLM(model, launch=True, **options)
            try:
                self._load()
            except BaseException:
                self._llm.abandon()
                raise
        except BaseException:
            self._end_loop()
            raise

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._llm.info

    @property
    def summary(self) -> tuple[str, ...]:
        """The engine's decisions, for users."""
        return self._llm.summary

    def get_tokenizer(self):
        """The model's tokenizer; None if it has none."""
        return self._llm.front.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculation: Choice | None = None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in order. One SamplingParams for all, or one for each. prediction: the expected
        answer of one prompt, or a list of one or None for each. speculation: of all; see `predicting.draft_fields`.
        Raises KvasirError."""
        many = _prompt_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidRequest(
                f"{len(many)} prompts and {len(each)} sampling parameters",
                "give one for all prompts, or one per prompt",
            )
        answers = max((s.n for s in each if s is not None), default=1)
        one = partial(self._llm.complete, speculation=speculation)
        parts = zip(many, each, predictions_of(prediction, len(many)), strict=True)
        return self._all([partial(one, p, s, prediction=text) for p, s, text in parts], answers)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | Sequence[Prediction | None] | None = None,
        speculation: Choice | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The outputs for one conversation or several. prediction, speculation: as for `generate`."""
        several: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        ask = partial(self._llm.chat, params=params, speculation=speculation, **template)
        parts = zip(several, predictions_of(prediction, len(several)), strict=True)
        return self._all([partial(ask, m, prediction=text) for m, text in parts], params.n if params else 1)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingOutput]:
        """The embeddings of all prompts, in order. dimensions: as many of the first dimensions, normalised.
        prompt_name: of the model's own prompts. Raises KvasirError."""
        one = partial(self._llm.embed, dimensions=dimensions, prompt_name=prompt_name)
        return self._all([partial(one, p) for p in _prompt_list(prompts)])

    def token_embed(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenEmbeddingOutput]:
        """An embedding of each token of all prompts, in order, for late interaction. Raises KvasirError."""
        return self._all([partial(self._llm.token_embed, p) for p in _prompt_list(prompts)])

    def lexical(self, prompts: Prompt | Sequence[Prompt]) -> list[LexicalOutput]:
        """The weights of the tokens of all prompts, in order, of a model that has them. Raises KvasirError."""
        return self._all([partial(self._llm.lexical, p) for p in _prompt_list(prompts)])

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True
    ) -> list[ClassificationOutput]:
        """The scores of a classifier's labels for all prompts, in order; its logits without `use_activation`. Raises
        KvasirError."""
        one = partial(self._llm.classify, use_activation=use_activation)
        return self._all([partial(one, p) for p in _prompt_list(prompts)])

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str = "",
        use_activation: bool = True,
    ) -> list[ScoreOutput]:
        """The scores of pairs of texts: of one text with each of several, or of texts in pairs. instruction: for a
        reranker whose template has a place for one. Raises KvasirError."""
        pairs = pairs_of(text_1, text_2)
        return self._wait(self._llm.score(pairs, instruction=instruction, use_activation=use_activation))

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, instruction: str = ""
    ) -> list[tuple[int, float]]:
        """(index, score) of the documents that fit the query best, best first. Raises KvasirError."""
        scores = [output.score for output in self.score(query, list(documents), instruction=instruction)]
        return ranked(scores)[:top_n]

    def stats(self):
        """The engine's current statistics."""
        return self._wait(self._llm.front.stats())

    def close(self) -> None:
        """Ends the engine and frees its memory; idempotent."""
        with self._closing:
            if not self._thread.is_alive():
                return
            try:
                self._wait(self._llm.stop())
            finally:
                self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- between this thread and the loop ----------------------------------------------------------------------

    def _load(self) -> None:
        if not self._show:
            self._wait(self._llm.start())
            return
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        with Bars(BarColumn(), TextColumn("{task.description}"), transient=True) as bars:
            task = bars.add_task("loading", total=None)

            def show(done: int, total: int, kernels: bool = False) -> None:
                bars.update(task, completed=done, total=total, description=described(done, total, kernels))

            self._llm._progress = show
            self._wait(self._llm.start())

    def _all(self, work: Sequence[Callable[[], Awaitable[T]]], answers: int = 1) -> list[T]:
        """Runs all work, as much of it concurrently as may wait in the engine; if one item fails, the others are
        cancelled and its error is raised. answers: the highest number of choices of a request."""
        window = asyncio.Semaphore(max(1, min(self._llm.options.max_waiting, MAX_WAITING_PER_KEY) // answers))
        futures = [asyncio.run_coroutine_threadsafe(_within(window, w), self._loop) for w in work]
        try:
            return self._collect(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _collect(self, futures: list[Future]) -> list:
        if not self._show or len(futures) < 8:
            return [f.result() for f in futures]
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("answering", total=len(futures))
            for future in futures:
                future.add_done_callback(lambda _: bar.advance(task))
            return [f.result() for f in futures]

    def _wait(self, work):
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted; a cancelled start leaves no engine running
            raise

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _within(window: asyncio.Semaphore, work: Callable[[], Awaitable[T]]) -> T:
    async with window:
        return await work()


async def _cancel_others() -> None:
    """Cancels all other tasks of the loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several
