"""Encoder: texts and conversations to ids, in threads where that is slow and in turns where many wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from kvasir.engine.client import Engine
from kvasir.engine.lengths import Bound, Lengths
from kvasir.engine.reading import Reader
from kvasir.engine.turns import LONG_BYTES, Turns, batches, size_of, size_within
from kvasir.errors import InvalidRequest, TemplateTooLong
from kvasir.text.chat import ChatTemplate
from kvasir.text.encoder import Spans
from kvasir.text.fim import Infill
from kvasir.text.rendered import Rendered
from kvasir.text.sandbox import Hold
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import ModelInfo

RENDER_PLACES = 2  # conversations rendered at once

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PairJoin:
    """The ids before, between and after two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


class PromptEncoder:
    """Makes the prompts of a served model. Slow work runs in a thread, so that no request blocks the event loop.

    All methods are called from the event loop on which the engine was started.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        reader: Reader,
        trust_special_tokens: bool,
    ):
        """trust_special_tokens: the default for chats that do not set it, see `encode_chat`."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.reader = reader
        self.trust_special_tokens = trust_special_tokens
        self._turns = Turns()
        self._rendering = Turns(RENDER_PLACES, "render")

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self.engine.info

    def close_turns(self) -> None:
        """Ends the texts that wait, and closes the tokenizer."""
        self._turns.close()
        self._rendering.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

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

    def _lengths(self, param: str) -> Lengths:
        return Lengths(self.info.max_model_len, self._need_tokenizer(param).table)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer", "give token ids instead of text", param=param)
        return self.tokenizer
