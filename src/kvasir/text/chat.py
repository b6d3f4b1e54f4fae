"""From conversations to prompts: the chat templates of a model, and how a template is chosen and rendered."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from kvasir.errors import InvalidRequest, TemplateError, TemplateLimit
from kvasir.text.messages import (
    CallStyle,
    Message,
    call_style,
    check_messages,
    normalize_messages,
    takes_parts,
    takes_strings,
)
from kvasir.text.rendered import Rendered
from kvasir.text.samples import TOOLS, SampleCall, samples
from kvasir.text.sandbox import Hold
from kvasir.text.template_process import TemplateRenderer

# Names that a caller may not set: the template's own inputs and the functions that it can use.
RESERVED = frozenset(
    "messages tools documents add_generation_prompt raise_exception strftime_now namespace range dict lipsum "
    "cycler joiner self loop bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
)

T = TypeVar("T")

# Names of templates for comparing two texts.
_PAIR_NAMES = ("reranker", "rerank", "score")
_TAG = "CONTINUE_HERE "  # the trailing space shows whether the template trims messages
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "?", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """The chat templates of one model; thread-safe.

    `sources` is one Jinja template, several by name ("default", "tool_use", "rag"), or None for a model without one:
    such a model refuses chats instead of using the markers of some other model. `special_tokens` are the texts that a
    template may use by name: `bos_token`, `eos_token`, ...
    """

    def __init__(
        self,
        sources: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        renderer: TemplateRenderer | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ):
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources or {})
        self._special_tokens = dict(special_tokens or {})
        self._renderer = renderer or TemplateRenderer()
        self._clock = clock
        self._facts: dict[tuple[Callable, str], Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        hold: Hold | None = None,
    ) -> Rendered:
        """The prompt for a conversation. Encode it without adding special tokens, which it already has.

        `continue_final_message` leaves the last message open so that the model continues it; no generation prompt
        follows then. `chat_template` is the name of one of the model's templates, or the source of a template.
        `template_kwargs` are the template's own switches (`enable_thinking`, ...). `hold` can end the rendering early.
        Raises `TemplateError` if the template refuses, fails or exceeds a limit, and `InvalidRequest` for a request
        that the template cannot express.
        """
        source = self.select(tools, documents, chat_template)
        check_template_kwargs(template_kwargs or {})
        check_messages(messages)
        prepared = self._prepare(source, messages, hold)
        variables = {
            "tools": list(tools) if tools is not None else None,
            "documents": list(documents) if documents is not None else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **(template_kwargs or {}),
        }
        if continue_final_message:
            if messages and messages[-1].get("content") is None:
                raise _nothing_to_continue()
            return self._render_open(source, prepared, variables, hold)
        return self._render(source, prepared, variables, hold)

    def select(self, tools: object = None, documents: object = None, chat_template: str | None = None) -> str:
        """The source of the template for a conversation. Raises `InvalidRequest` if there is none."""
        if chat_template is not None:
            return self.sources.get(chat_template, chat_template)
        if not self.sources:
            raise InvalidRequest(
                "this model has no chat template",
                "give one with --chat-template, or use completions with a prompt of your own",
                param="messages",
            )
        wanted = ["tool_use"] * bool(tools) + ["rag"] * bool(documents) + ["default"]
        for name in wanted:
            if name in self.sources:
                return self.sources[name]
        raise InvalidRequest(
            f"this model has no default chat template, only {', '.join(sorted(self.sources))}",
            "choose one of them with chat_template",
            param="chat_template",
        )

    @property
    def pair_source(self) -> str | None:
        """The source of the template for the messages of a `query` and a `document`; None if there is none."""
        named = (self.sources[name] for name in _PAIR_NAMES if name in self.sources)
        default = self.sources.get("default", "")
        has_both = all(f'"{role}"' in default or f"'{role}'" in default for role in ("query", "document"))
        return next(named, default if has_both else None)

    def render_pair(
        self, source: str, query: str, document: str, instruction: str = "", hold: Hold | None = None
    ) -> Rendered:
        """The prompt in which a model compares two texts. source: `pair_source`. instruction: "" for the template's
        own. Raises TemplateError."""
        messages: list[Message] = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction:
            messages.insert(0, {"role": "system", "content": instruction})
        variables = {"tools": None, "documents": None, "add_generation_prompt": True}
        return self._render(source, messages, variables, hold)

    def close(self) -> None:
        """End the processes that render templates; a later rendering starts a new process."""
        self._renderer.close()

    def samples(self, source: str) -> Iterator[SampleCall]:
        """Assistant messages with tool calls, as the template `source` writes them; empty if it shows no calls. Raises
        TemplateLimit."""

        def render(messages: list[Message], begins: bool) -> str:
            variables = {"documents": None, "tools": TOOLS, "add_generation_prompt": begins}
            return self._render(source, messages, variables).text

        return samples(render, self._learned(call_style, source))

    def _prepare(self, source: str, messages: Sequence[Mapping[str, Any]], hold: Hold | None) -> list[Message]:
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        has_calls = any(message.get("tool_calls") for message in messages)
        strings = self._learned(takes_strings, source, hold)
        return normalize_messages(
            messages,
            strings=strings,
            parts=(has_parts or not strings) and self._learned(takes_parts, source, hold),
            calls=self._learned(call_style, source, hold) if has_calls else CallStyle(),
        )

    def _learned(self, fact: Callable[[Callable[[list[Message]], str]], T], source: str, hold: Hold | None = None) -> T:
        """A fact about what the template accepts, determined once per template; facts about templates that come with a
        request are not cached."""
        key = (fact, source)
        if key in self._facts:
            return self._facts[key]
        value = fact(lambda messages: self._render_probe(source, messages, hold))
        if source in self.sources.values():
            self._facts[key] = value
        return value

    def _render_probe(self, source: str, messages: list[Message], hold: Hold | None) -> str:
        variables = {"documents": None, "add_generation_prompt": False}
        try:
            return self._render(source, messages, {**variables, "tools": None}, hold).text
        except TemplateLimit:
            raise
        except TemplateError:  # some templates fail without tools
            return self._render(source, messages, {**variables, "tools": [_PROBE_TOOL]}, hold).text

    def _render(
        self, source: str, messages: list[Message], variables: Mapping[str, Any], hold: Hold | None = None
    ) -> Rendered:
        variables = {**variables, "messages": messages}
        return self._renderer.render(source, variables, self._clock(), self._special_tokens, hold)

    def _render_open(
        self, source: str, messages: list[Message], variables: Mapping[str, Any], hold: Hold | None
    ) -> Rendered:
        """Mark the end of the last message, render, and cut the prompt at the mark."""
        rendered = self._render(source, _tagged(messages), variables, hold)
        place = rendered.text.rfind(_TAG.strip())
        if place < 0:
            raise TemplateError(
                "the chat template drops the final message, so it cannot be continued", param="messages"
            )
        kept = rendered.text[place : place + len(_TAG)] == _TAG
        return rendered.cut(place if kept else len(rendered.text[:place].rstrip()))


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for names that belong to the template's inputs or functions."""
    taken = sorted(name for name in kwargs if name in RESERVED or not name.isidentifier() or name.startswith("_"))
    if taken:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(taken)}",
            "set only variables of the template itself",
            param="chat_template_kwargs",
        )


def _nothing_to_continue() -> InvalidRequest:
    return InvalidRequest("the final message has no text to continue", param="messages")


def _tagged(messages: list[Message]) -> list[Message]:
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _TAG
    elif isinstance(content, list):
        last["content"] = _tagged_parts(content)
    if content is None or last["content"] == content:
        raise _nothing_to_continue()
    return [*messages[:-1], last]


def _tagged_parts(parts: list[Any]) -> list[Any]:
    """The parts, with the mark appended to the last text part."""
    for i in range(len(parts) - 1, -1, -1):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            return [*parts[:i], {**parts[i], "text": parts[i]["text"] + _TAG}, *parts[i + 1 :]]
    return parts
