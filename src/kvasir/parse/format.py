"""The description of a format: how a model marks its reasoning, and how it writes tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """The notation between a call's marks."""

    NONE = "none"
    OBJECTS = "objects"  # {"name": ..., "arguments": {...}}, one or a list of them
    KEYED = "keyed"  # {NAME: {...}}, one or a list of them
    NAMED = "named"  # the name, then the arguments as a JSON object
    MARKED = "marked"  # the name, then an object with bare keys and strings between marks
    PARAMETERS = "parameters"  # the name, then each parameter between marks, its value as plain text
    PYTHON = "python"  # [name(key=value, ...), ...]
    ADDRESSED = "addressed"  # each message begins with its recipient: a function, or everyone
    CHANNELS = "channels"  # messages with headers, where a call is a message to a function


JSON_STYLES = (Style.OBJECTS, Style.KEYED)  # here the name is a JSON string too


@dataclass(frozen=True)
class FormatTexts:
    """Calls as the model's template writes them:

        open  begin ARGUMENTS end  separator  begin ARGUMENTS end  close

    `{name}` and `{index}` stand for the name and the index of a call.
    """

    begin: str = ""
    end: str = ""
    open: str = ""
    separator: str = ""
    close: str = ""


@dataclass(frozen=True)
class ParameterFormat:
    """A parameter: key_begin KEY key_end KIND value_begin VALUE value_end, where "{key}" in value_end is the key.
    lines: one line break at either end of the value belongs to the marks. kinds: the mark of string values, then the
    mark of other values, which are JSON; empty: the tool's schema decides. wrap: optional marks around a value. tags:
    the text before a tag if lists and objects are nested tags instead of JSON."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    lines: bool = False
    kinds: tuple[str, ...] = ()
    wrap: tuple[str, str] = ("", "")
    tags: str = ""


@dataclass(frozen=True)
class CallFormat:
    """How tool calls are written.

    begins: marks, any of which may begin a call; with `bare`, calls may also begin without a mark, at the start of the
    output.
    head: for NAMED, MARKED and PARAMETERS, a regular expression for everything from the mark to the arguments, with the
    group `name` and optionally `id`.
    ends: the mark that closes a call, then the mark that closes all calls; each is optional, except the first for
    PARAMETERS.
    fence: optional marks around the JSON.
    id_size: the number of letters and digits that the template requires in a call's id; 0: any id is valid.
    quote: for MARKED, the mark around strings.
    everyone: for ADDRESSED, the recipient of text; "": text has none.
    asides: marks of the recipient that are not content; "{name}" stands for any function.
    enforced: whether a grammar can enforce these calls.
    signs: a template that shows no calls and contains all strings of one of these groups is assumed to have this
    format.
    """

    name: str
    style: Style
    texts: FormatTexts = FormatTexts()
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    head: str = ""
    fence: tuple[str, ...] = ()
    parameters: ParameterFormat | None = None
    bare: bool = False
    id_size: int = 0
    also: tuple[str, ...] = ()  # marks that are in none of the other fields
    turns: tuple[str, ...] = ()  # the marks that begin or end a turn
    quote: str = '<|"|>'
    everyone: str = ""
    asides: tuple[str, ...] = ()
    enforced: bool = True
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class ThinkingFormat:
    """How reasoning is marked. `answer`: marks around the content that follows; they are not content themselves."""

    name: str
    start: str
    end: str
    answer: tuple[str, str] = ("", "")
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Format:
    """The facts that a parser needs about a model. Without `thinking`, reasoning is content."""

    calls: CallFormat
    thinking: ThinkingFormat | None = None

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning that it opened itself, as with some templates."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt has closed the reasoning, as templates do when reasoning is disabled."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.end)

    def uses(self, token: str) -> bool:
        """Whether a special token is a mark of this format, and so must be passed to the parser."""
        return bool(token.strip()) and any(token in mark for mark in self._marks())

    def emits(self, token: str) -> bool:
        """Whether a token is a mark that a model writes within its turn."""
        return self.uses(token) and token not in self.calls.turns

    def _marks(self) -> tuple[str, ...]:
        calls, texts = self.calls, self.calls.texts
        written = (texts.open, texts.begin, texts.end, texts.separator, texts.close)
        thinking = (self.thinking.start, self.thinking.end, *self.thinking.answer) if self.thinking else ()
        parameters = calls.parameters
        inner = (
            (parameters.key_begin, parameters.key_end, parameters.value_begin, parameters.value_end)
            if parameters
            else ()
        )
        return (*written, *calls.begins, *calls.ends, *calls.also, *calls.asides, *inner, *thinking)


@dataclass(frozen=True)
class GrammarParts:
    """The exact texts for a grammar of one call: free text until `trigger` begins a call, which is `begin` ARGUMENTS
    `end`; `separator` stands between two calls, `close` after the last call.

    `begin` opens the first call and starts with `trigger`; `begin_next` opens each further call. With an empty trigger,
    a call can only be at the start of the output. `style` is the notation of the arguments, with `parameters` for
    arguments between marks.
    """

    trigger: str
    begin: str
    begin_next: str
    end: str
    separator: str
    close: str
    style: Style
    parameters: ParameterFormat | None = None


def grammar_parts(format: Format, name: str, index: int | str = 0) -> GrammarParts:
    """The texts of call number `index` of an output, to the function `name`. Raises ValueError for a format without
    calls."""
    calls, texts = format.calls, format.calls.texts
    if calls.style is Style.NONE:
        raise ValueError("this format has no tool calls")
    written = json.dumps(name, ensure_ascii=False)[1:-1] if calls.style in JSON_STYLES else name
    begin = texts.begin.replace("{name}", written).replace("{index}", str(index))
    trigger = "" if calls.bare or not calls.begins else calls.begins[0]
    return GrammarParts(
        trigger, texts.open + begin, begin, texts.end, texts.separator, texts.close, calls.style, calls.parameters
    )
