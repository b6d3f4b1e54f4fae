"""The description of a format: how a model marks its reasoning, and how it writes tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """What stands between a call's marks."""

    NONE = "none"
    OBJECTS = "objects"  # {"name": ..., "arguments": {...}}, one or a list of them
    KEYED = "keyed"  # {NAME: {...}}, one or a list of them
    NAMED = "named"  # the name, then the arguments as a JSON object
    MARKED = "marked"  # the name, then an object with bare keys and strings between marks
    PARAMETERS = "parameters"  # the name, then each parameter between marks, its value as plain text
    PYTHON = "python"  # [name(key=value, ...), ...]
    ADDRESSED = "addressed"  # each message begins with its recipient, a function or everyone
    CHANNELS = "channels"  # messages with headers, a call being a message to a function


JSON_STYLES = (Style.OBJECTS, Style.KEYED)  # in which the name is a JSON string, too


@dataclass(frozen=True)
class Texts:
    """Calls as the model's template writes them:

        open  begin ARGUMENTS end  separator  begin ARGUMENTS end  close

    `{name}` and `{index}` stand for the name and the place of a call.
    """

    begin: str = ""
    end: str = ""
    open: str = ""
    separator: str = ""
    close: str = ""


@dataclass(frozen=True)
class Parameters:
    """A parameter: key_begin KEY key_end KIND value_begin VALUE value_end, where "{key}" in value_end is the key. One
    line break at either end of the value belongs to the marks where `lines`. kinds: what a string is marked with, and
    what other kinds of values, which are JSON then; none: the tool's schema decides. wrap: marks that may stand around
    a value besides. tags: what stands before a tag where lists and objects are tags again, and not JSON."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    lines: bool = False
    kinds: tuple[str, ...] = ()
    wrap: tuple[str, str] = ("", "")
    tags: str = ""


@dataclass(frozen=True)
class Calls:
    """How tool calls are written.

    begins: marks of which any may begin a call; with `bare`, calls also begin without one, as the first
    thing of an answer.
    head: for NAMED, MARKED and PARAMETERS a regular expression of all from the mark to the arguments, with the groups
    `name` and perhaps `id`.
    ends: what closes a call, then what closes all of them; each may be missing, but the first of PARAMETERS.
    fence: what may stand around the JSON besides.
    id_size: the number of letters and digits that the template demands of a call's id; 0: any id will do.
    quote: for MARKED the mark around strings.
    asides: marks that say to whom the model speaks, and are no content; "{name}" stands for any function.
    enforced: whether there is a grammar of these calls.
    signs: taken for the format of a template that has all strings of one of these groups, and shows no calls.
    """

    name: str
    style: Style
    texts: Texts = Texts()
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    head: str = ""
    fence: tuple[str, ...] = ()
    parameters: Parameters | None = None
    bare: bool = False
    id_size: int = 0
    also: tuple[str, ...] = ()  # marks that appear in none of the other fields
    turns: tuple[str, ...] = ()  # those of the marks that begin or end a turn
    quote: str = '<|"|>'
    asides: tuple[str, ...] = ()
    enforced: bool = True
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Thinking:
    """How reasoning is marked. `answer`: marks around the content that follows it, which are no content."""

    name: str
    start: str
    end: str
    answer: tuple[str, str] = ("", "")
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Format:
    """What a parser has to know of a model. Without `thinking`, reasoning is content."""

    calls: Calls
    thinking: Thinking | None = None

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends within reasoning that it has opened itself, as some templates do."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt has ended the reasoning, as templates do where it is switched off."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.end)

    def uses(self, token: str) -> bool:
        """Whether a special token is a mark of this format, and therefore has to reach the parser."""
        return bool(token.strip()) and any(token in mark for mark in self._marks())

    def says(self, token: str) -> bool:
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
    """The exact texts for a grammar of one call: free text, until `trigger` begins a call, which reads
    `begin` ARGUMENTS `end`; between two calls stands `separator`, after the last `close`.

    `begin` opens the first call and starts with `trigger`, `begin_next` each further one. An empty trigger
    means that a call can only be the first thing of an answer. `style` tells how the arguments are written,
    with `parameters` for those between marks.
    """

    trigger: str
    begin: str
    begin_next: str
    end: str
    separator: str
    close: str
    style: Style
    parameters: Parameters | None = None


def grammar_parts(format: Format, name: str, index: int | str = 0) -> GrammarParts:
    """The texts of a call of the function `name`, the `index`-th of an answer. Raises ValueError for a format
    without calls."""
    calls, texts = format.calls, format.calls.texts
    if calls.style is Style.NONE:
        raise ValueError("this format has no tool calls")
    written = json.dumps(name, ensure_ascii=False)[1:-1] if calls.style in JSON_STYLES else name
    begin = texts.begin.replace("{name}", written).replace("{index}", str(index))
    trigger = "" if calls.bare or not calls.begins else calls.begins[0]
    return GrammarParts(
        trigger, texts.open + begin, begin, texts.end, texts.separator, texts.close, calls.style, calls.parameters
    )
