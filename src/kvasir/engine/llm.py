"""LLM: the engine as a Python object, with the names that users know from vLLM.

llm = LLM("kvasir-mini")
for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, Unpack

from kvasir.adapters import Lora
from kvasir.engine.async_llm import AsyncLLM, Prompt, within
from kvasir.engine.extras import ExtrasOfMany, LoraOfMany, one_of
from kvasir.engine.loop_thread import LoopThread
from kvasir.engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    LexicalOutput,
    RequestOutput,
    ScoreOutput,
    TokenEmbeddingOutput,
)
from kvasir.engine.predicting import predictions_of
from kvasir.engine.progress import described
from kvasir.engine.scoring import (
    pairs_of,
    ranked,
)
from kvasir.engine.turns import MAX_WAITING_PER_KEY
from kvasir.errors import InvalidRequest
from kvasir.types import AdapterInfo, ModelInfo, SamplingParams

__all__ = ["LLM", "AsyncLLM"]

T = TypeVar("T")


class LLM:
    """An engine in this process for plain programs: pass all prompts at once, it batches them itself.

    `LLM(model, dtype=..., max_model_len=..., ...)` takes the options of AsyncLLM. `progress` shows bars while
    loading and for long batches. Close it, or use it in a `with`, to free the memory.
    """

    def __init__(self, model: str, *, progress: bool = True, **options: Any):
        self._show = progress
        self._closing = threading.Lock()
        self._loop = LoopThread("kvasir-llm")
        try:
            self._llm = AsyncLLM(model, launch=True, **options)
            try:
                self._load()
            except BaseException:
                self._llm.abandon()
                raise
        except BaseException:
            self._loop.end()
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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **extras: Unpack[ExtrasOfMany],
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in order. One SamplingParams for all, or one for each; `sampling_params` is
        another name of `params`. Raises KvasirError."""
        params = one_of(params, sampling_params)
        many = _prompt_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidRequest(
                f"{len(many)} prompts and {len(each)} sampling parameters",
                "give one for all prompts, or one per prompt",
            )
        answers = max((s.n for s in each if s is not None), default=1)
        parts = zip(many, each, self._extras(len(many), **extras), strict=True)
        return self._all([partial(self._llm.complete, p, s, **more) for p, s, more in parts], answers)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **given: Any,
    ) -> list[RequestOutput]:
        """The outputs for one conversation or several. sampling_params: as for `generate`. given: `ExtrasOfMany`, and
        the template's variables, as for `AsyncLLM.chat`."""
        params = one_of(params, sampling_params)
        several: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        parts = zip(several, self._extras(len(several), **given), strict=True)
        return self._all([partial(self._llm.chat, m, params, **more) for m, more in parts], params.n if params else 1)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        **lora: Unpack[LoraOfMany],
    ) -> list[EmbeddingOutput]:
        """The embeddings of all prompts, in order. dimensions: as many of the first dimensions, normalised.
        prompt_name: of the model's own prompts. Raises KvasirError."""
        one, many = partial(self._llm.embed, dimensions=dimensions, prompt_name=prompt_name), _prompt_list(prompts)
        parts = zip(many, self._loras(len(many), **lora), strict=True)
        return self._all([partial(one, p, lora=own) for p, own in parts])

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

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that `lora` may name."""
        return self._llm.adapters

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """As `AsyncLLM.load_adapter`."""
        return self._wait(self._llm.load_adapter(name, path, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """As `AsyncLLM.unload_adapter`."""
        self._wait(self._llm.unload_adapter(name))

    def reset_prefix_cache(self) -> bool:
        """As `AsyncLLM.reset_prefix_cache`."""
        return self._wait(self._llm.reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """As `AsyncLLM.sleep`."""
        self._wait(self._llm.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `AsyncLLM.wake_up`."""
        self._wait(self._llm.wake_up(tags))

    def stats(self):
        """The engine's current statistics."""
        return self._wait(self._llm.front.stats())

    def close(self) -> None:
        """Ends the engine and frees its memory; idempotent."""
        with self._closing:
            if not self._loop.is_alive:
                return
            try:
                self._wait(self._llm.stop())
            finally:
                self._loop.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- extras of each prompt ---------------------------------------------------------------------------------

    def _extras(self, count: int, *, prediction: Any = None, lora: Any = None, lora_request: Any = None, **same: Any):
        """The `Extras` of each of `count` prompts. same: for all of them."""
        loras = self._loras(count, lora, lora_request)
        parts = zip(predictions_of(prediction, count), loras, strict=True)
        return [{**same, "prediction": prediction, "lora": lora} for prediction, lora in parts]

    def _loras(self, count: int, lora: Lora | None = None, lora_request: Any = None) -> list[Lora | None]:
        return self._wait(self._llm.lora_requests.chosen_of_each(lora, lora_request, count))

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

            self._llm.on_progress(show)
            self._wait(self._llm.start())

    def _all(self, work: Sequence[Callable[[], Awaitable[T]]], answers: int = 1) -> list[T]:
        """Runs all work, as much of it concurrently as may wait in the engine; if one item fails, the others are
        cancelled and its error is raised. answers: the highest number of choices of a request."""
        window = asyncio.Semaphore(max(1, min(self._llm.options.max_waiting, MAX_WAITING_PER_KEY) // answers))
        futures = [self._loop.run(within(window, w)) for w in work]
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
        return self._loop.wait(work)  # an interrupted start is cancelled and leaves no engine running


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several
