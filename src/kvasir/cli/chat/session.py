"""A chat with one model: sends questions, streams the answers, keeps the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvasir.cli.chat.conversation import ChatHistory
from kvasir.cli.chat.screen import Screen, ThinkingView, thinking_of
from kvasir.engine.answer import Answer
from kvasir.engine.front import Front
from kvasir.engine.pace import Pace
from kvasir.engine.thinking import may_think
from kvasir.errors import InvalidRequest, KvasirError
from kvasir.store.entry import ModelEntry
from kvasir.types import FinishReason, Request, SamplingParams

THINK_SWITCH = "enable_thinking"  # the name that templates use


@dataclass
class Settings:
    """The user's settings; None leaves a setting to the model, or the seed to chance. own: the store's settings for the
    model, as fields of SamplingParams. more: further settings of the user, as fields of SamplingParams."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    think: bool | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The settings applied over the model's own defaults. Raises InvalidRequest for a value out of range."""
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed}
        asked = {name: value for name, value in asked.items() if value is not None}
        return SamplingParams(**{"max_tokens": None, **defaults, **self.own, **self.more, **asked})


@dataclass(frozen=True)
class Figures:
    """Measurements of the last answer. Times in seconds; `context` counts the tokens of prompt and answer."""

    first_token: float
    tokens_per_second: float | None
    context: int
    seed: int

    def text(self, context_length: int) -> str:
        rate = f", {self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else ""
        return (
            f"[{self.first_token:.2f} s to the first token{rate}, "
            f"{self.context} of {context_length} tokens of context, seed {self.seed}]"
        )


@dataclass
class _Run:
    """An answer in progress."""

    thinking: ThinkingView
    answer: Answer = field(default_factory=Answer)
    pace: Pace = field(default_factory=Pace)
    stopped: bool = False


class Session:
    """Owns the conversation. One coroutine runs at a time; if it is cancelled during an answer, the text so far is
    kept."""

    def __init__(
        self,
        front: Front,
        screen: Screen,
        conversation: ChatHistory,
        settings: Settings,
        entry: ModelEntry | None = None,
        model: str = "",
    ):
        """entry: the store's of this model, if it has one. model: as the user named it."""
        self.front = front
        self.entry = entry
        self.model = model
        self.shows_figures = True
        self.screen = screen
        self.conversation = conversation
        self.settings = settings
        self.figures: Figures | None = None

    def decide(self, think: bool | None) -> None:
        """Turns thinking on or off; None leaves it to the template. Raises InvalidRequest if the template cannot."""
        if not self.can_think:
            raise InvalidRequest(
                "this model's chat template has no switch for thinking", "ask for it in the prompt instead"
            )
        self.settings.think = think

    @property
    def can_think(self) -> bool:
        return self.front.template_mentions(THINK_SWITCH)

    async def ask(self, question: str) -> None:
        """Shows the answer and keeps question and answer. Raises KvasirError, and keeps nothing, if there is no
        answer."""
        request, thinking = await self._request(question)
        run = await self._stream(request, thinking)
        if run.answer.finish_reason is FinishReason.ERROR:
            raise KvasirError(f"the engine failed on this request: {run.answer.error}", "/retry tries again")
        if run.pace.first is None:
            self.screen.note("[stopped before the first token; the question is not kept]")
            return
        self.conversation.turns.append((question, run.answer.text))
        self._report(request, run)

    async def retry(self) -> None:
        """Answers the last question again. Raises KvasirError; the old answer is kept then."""
        if not self.conversation.turns:
            raise InvalidRequest("there is no response yet", "ask something first")
        old = self.conversation.turns.pop()
        before = len(self.conversation.turns)
        try:
            await self.ask(old[0])
        finally:
            if len(self.conversation.turns) == before:
                self.conversation.turns.append(old)

    async def _request(self, question: str) -> tuple[Request, ThinkingView]:
        switches = {} if self.settings.think is None else {THINK_SWITCH: self.settings.think}
        messages = self.conversation.messages(question)
        ids = await self.front.encode_chat(messages, variables=switches)
        params = self.settings.params(self.front.info.default_sampling)
        context, answer = self.front.info.max_model_len, params.max_tokens or 1
        if len(ids) + answer > context:
            raise InvalidRequest(
                f"the context holds {context} tokens; the conversation has {len(ids)}, and the response "
                f"needs {answer}; no message is dropped",
                "/undo removes the last exchange, /clear starts over, /max limits the response",
            )
        await self.front.learn(params)
        thinks = params.structured_outputs is None or await may_think(self.front, messages, variables=switches)
        request = await self.front.resolve_chat(ids, params, thinks)
        return request, await thinking_of(self.front, ids)

    async def _stream(self, request: Request, thinking: ThinkingView) -> _Run:
        run = _Run(thinking)
        self.screen.begin_answer()
        try:
            async with aclosing(self.front.stream(request)) as deltas:
                async for delta in deltas:
                    run.answer.add(delta)
                    run.pace.saw(delta)
                    self.screen.pieces(thinking.push(delta.text))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            run.stopped = True
        self.screen.pieces(thinking.flush())
        self.screen.end_answer()
        return run

    def _report(self, request: Request, run: _Run) -> None:
        assert run.pace.first is not None
        self.figures = Figures(
            first_token=run.pace.first - run.pace.begun,
            tokens_per_second=run.pace.rate,
            context=len(request.prompt_ids) + run.pace.count,
            seed=request.params.seed or 0,
        )
        if run.stopped:
            self.screen.note("[stopped; the text so far is kept, /undo removes it]")
        elif run.answer.finish_reason is FinishReason.LENGTH:
            full = self.figures.context >= self.front.info.max_model_len
            cut = f"[cut at {request.params.max_tokens} tokens]"
            self.screen.note("[the context is full]" if full else cut)
        if self.shows_figures:
            self.screen.note(self.figures.text(self.front.info.max_model_len))
