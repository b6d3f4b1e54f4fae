"""AsyncLLM: the engine as a Python object for asyncio programs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, Unpack

from kvasir.adapters import AdapterOption, Lora, chosen_adapters, given_adapters, of_model, parse_adapters
from kvasir.config import EngineOptions
from kvasir.engine.answer import Answer
from kvasir.engine.client import ASLEEP, Engine, Sleeps
from kvasir.engine.extras import Extras, extra_fields, one_of
from kvasir.engine.front import Front
from kvasir.engine.inproc import InProcessEngine
from kvasir.engine.load_text import load_prompts, load_tasks, load_text
from kvasir.engine.lora_requests import LoraRequests, NamesAdapter
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
from kvasir.engine.progress import Progress
from kvasir.engine.scoring import (
    Reading,
    compare,
    first_dimensions,
    lexical_weights,
    scores_of,
    token_embeddings,
)
from kvasir.engine.thinking import may_think
from kvasir.engine.vllm_drafters import from_vllm
from kvasir.errors import ConfigError, EngineDead, InvalidRequest
from kvasir.types import AdapterInfo, ModelInfo, Request, SamplingParams, ServiceClass, Task

log = logging.getLogger("kvasir.engine")

_COMPARED_AT_ONCE = 64  # requests of one comparison
Prompt = str | Sequence[int] | Mapping[str, Any]
T = TypeVar("T")


class AsyncLLM:
    """An engine in this process for asyncio programs. `options` are those of EngineOptions, and vLLM's
    `speculative_config` and `enable_lora`, which has no effect. lora: adapters by name, {"name": path}, or as --lora
    takes them."""

    def __init__(self, model: str, *, engine: Engine | None = None, launch: bool = False, **options: Any):
        """engine: another implementation of the protocol (a ProcessEngine), created with the same options. launch: the
        weights begin to load at once, while the text half does; call `abandon` if `start` is not reached."""
        drafters = options.pop("speculative_config", None)
        options.pop("enable_lora", None)  # requests may always name adapters
        options["lora"] = list(given_adapters(options.get("lora"))) or None
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
            prompts, tasks = load_prompts(self.options), load_tasks(self.options)
        except BaseException:
            self.abandon()
            raise
        trust, given = self.options.trust_special_tokens, of_model(parse_adapters(self.options.lora or ()), model)
        more: dict[str, Any] = {"prompts": prompts, "adapters": (*tasks, *given)}
        self.front = Front(engine or self._own, tokenizer, template, trust_special_tokens=trust, **more)
        self.lora_requests = LoraRequests(self.front.adapters)

    def _build(self):
        from kvasir.engine.build import build_core

        return build_core(self.options, self._report)

    def _report(self, done: int, total: int, kernels: bool = False) -> None:
        if self._is_abandoned:
            raise EngineDead("the load was abandoned")
        if self._progress:
            self._progress(done, total, kernels)

    def on_progress(self, progress: Progress) -> None:
        """`progress` is called, on the engine's thread, as the load advances."""
        self._progress = progress

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
        return self.front.summary()

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that `lora` may name."""
        return self.front.adapters.known

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Loads an adapter from a folder or a GGUF file. replace: one that has this name; requests under way keep it.
        Raises KvasirError."""
        return await self.front.adapters.load(AdapterOption(name, path), replacing=replace)

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests under way keep it. Raises ModelNotFound."""
        await self.front.adapters.unload(name)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Changes no result; the next requests compute their whole prompts."""
        await self.front.engine.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1) -> None:
        """Frees the memory of the model; requests raise EngineAsleep until `wake_up`. level: as in vLLM; all are the
        same. Raises EngineDead."""
        if not isinstance(engine := self.front.engine, Sleeps):
            raise InvalidRequest("this engine cannot sleep", "stop it instead")
        await engine.sleep()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the model again. tags: as in vLLM; everything comes back, whatever they name. Raises KvasirError."""
        if isinstance(engine := self.front.engine, Sleeps):
            await engine.wake_up()

    @property
    def is_sleeping(self) -> bool:
        return self.front.engine.state.status == ASLEEP

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
        sampling_params: SamplingParams | None = None,
        **extras: Unpack[Extras],
    ) -> AsyncIterator[RequestOutput]:
        """Streams the output of the request as it grows; the last one is `finished`. `sampling_params` is another name
        of `params`. Raises KvasirError."""
        params = one_of(params, sampling_params) or SamplingParams()
        text, ids = await self._ids(prompt)
        await self.front.learn(params)
        request = self.front.resolve(ids, params, **await extra_fields(self.front, self.lora_requests, **extras))
        answers = [Answer(i) for i in range(request.params.n)]
        async with aclosing(self.front.stream(request)) as deltas:
            async for delta in deltas:
                answers[delta.index].add(delta)
                raise_fault(answers[delta.index])
                yield output_of(request, text, answers)

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **extras: Unpack[Extras]
    ) -> RequestOutput:
        """The complete output. Raises KvasirError."""
        text, ids = await self._ids(prompt)
        return await self._complete(text, ids, params, **await extra_fields(self.front, self.lora_requests, **extras))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **given: Any,
    ) -> RequestOutput:
        """The output for a conversation. sampling_params: as for `generate`. given: `Extras`, and for the template
        tools, add_generation_prompt, variables ... of `encode_chat`. Raises KvasirError."""
        params = one_of(params, sampling_params) or SamplingParams()
        extras = {name: given.pop(name) for name in Extras.__annotations__ if name in given}
        template = given
        ids = await self.front.encode_chat(messages, **template)
        await self.front.learn(params)
        thinks = params.structured_outputs is None or await may_think(self.front, messages, **template)
        fields = await extra_fields(self.front, self.lora_requests, **extras)
        request = await self.front.resolve_chat(ids, params, thinks, slo=ServiceClass.BATCH, **fields)
        return await self._finish(None, request)

    async def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        lora: Lora | None = None,
        lora_request: NamesAdapter | None = None,
    ) -> EmbeddingOutput:
        """The embedding of a prompt. dimensions: as many of its first dimensions, normalised. prompt_name: of the
        model's own prompts, put before a text. lora, lora_request: see `Extras`. Raises KvasirError."""
        if dimensions is not None and not 1 <= dimensions <= self.info.embedding_size:
            expected = f"expected at least 1 and at most {self.info.embedding_size}"
            raise InvalidRequest(f"dimensions is {dimensions}", expected, param="dimensions")
        before = self.front.prompts.of(prompt_name)
        text, ids = await self._ids(before + prompt if isinstance(prompt, str) else prompt)
        chosen = chosen_adapters(await self.lora_requests.chosen(lora, lora_request))
        request = self.front.resolve_embedding(ids, adapters=chosen)
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
        work = [within(window, partial(self.front.embed, request)) for request in comparison.requests]
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


async def within(window: asyncio.Semaphore, work: Callable[[], Awaitable[T]]) -> T:
    """Runs the work when the window has room."""
    async with window:
        return await work()
