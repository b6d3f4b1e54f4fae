"""How the choices of a conversation are parsed: which format the model writes, and how a request uses it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import InvalidRequest, QueueFull, TemplateLimit
from kvasir.guided.text_grammar import TextGrammar
from kvasir.parse.detect import DetectedFormat, Sample, detect
from kvasir.parse.format import Format, Style
from kvasir.parse.parser import Parser
from kvasir.parse.table import choose
from kvasir.text import samples
from kvasir.text.chat import ChatTemplate
from kvasir.text.tokenizer import Tokenizer

SOME_TOOL = samples.TOOLS[0]
TAIL = 64  # last tokens of the prompt, among which it may open the reasoning
SWITCHES = ("enable_thinking", "thinking")  # names of the variable that switches thinking in templates


@dataclass(frozen=True, slots=True)
class Reading:
    """How the choices of one request are parsed. opened: the prompt has opened the reasoning. thinks: reasoning may
    precede a structure. marks: the special ids that must become text."""

    format: Format
    tools: Mapping[str, Mapping[str, Any]] | None
    opened: bool
    thinks: bool
    marks: frozenset[int]

    @property
    def calls(self) -> bool:
        """Whether there are tools and a format for calling them."""
        return bool(self.tools) and self.format.calls.style is not Style.NONE

    def parser(self) -> Parser:
        """A new parser for one choice."""
        return Parser(self.format, self.tools, calls=bool(self.tools), opened=self.opened)


@dataclass(frozen=True, slots=True)
class Calling:
    """The functions that may be called: name, schema of the arguments, whether all of the schema must be enforced, the
    grammar of a single text. required: the choice must make a call. parallel: it may make several."""

    functions: Sequence[tuple[str, Mapping[str, Any], bool, TextGrammar | None]]
    required: bool
    parallel: bool


class Reader:
    """Knows the formats of a model's chat templates: as the templates show them, or as the options name them.

    Until a template has been rendered (`learn`), or if that fails, only its source decides. Thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, template: ChatTemplate | None, tools: str = "auto", reasoning: str = "auto"
    ):
        """Raises ConfigError for an unknown format."""
        self._tokenizer = tokenizer
        self._template = template
        self._names = (tools, reasoning)
        self._special = {id: tokenizer.token_text(id) for id in tokenizer.special_ids} if tokenizer else {}
        self._found: dict[str, DetectedFormat] = {}
        self._by_words: dict[str, DetectedFormat] = {}
        self._marks: dict[Format, frozenset[int]] = {}
        self._turn_tokens: dict[Format, tuple[str, ...]] = {}
        self.thinks = True  # models may think unless a request turns it off; False: only if it turns it on
        choose(tools=tools, reasoning=reasoning)

    def default_variables(self, tools: object = None) -> dict[str, bool]:
        """The template's variables for a request that says nothing about thinking."""
        name = None if self.thinks else self.switch(tools)
        return {name: False} if name else {}

    def ends_thinking(self, tools: object = None) -> bool:
        """Whether a request that says nothing about thinking must end it at once, since its template has no switch."""
        return not self.thinks and self.switch(tools) is None and self.format(tools).thinking is not None

    def learn(self, tools: object = None) -> None:
        """Finds the format of conversations with these tools by rendering some samples, which takes milliseconds. If
        that fails, a later call tries again."""
        with suppress(InvalidRequest, QueueFull):  # no template for these tools, or no free worker
            source = self._source(tools)
            if source and source not in self._found:
                self._found[source] = self._detect(source)

    def learn_all(self) -> None:
        """Calls `learn` for conversations with tools and without."""
        for tools in ([SOME_TOOL], None):
            self.learn(tools)

    def format(self, tools: object = None) -> Format:
        """The format of conversations with these tools, for which a model may have a separate template."""
        source = self._source(tools)
        found = self._found.get(source) or self._by_words.get(source)
        if found is None:
            found = self._by_words[source] = detect(source, self._special.values())
        return choose(*self._names, found=found.format)

    def fault(self, tools: object = (SOME_TOOL,)) -> str:
        """Why calls of these tools cannot be recognized in text, as a message; "" if they can. Valid after `learn`."""
        try:
            found = self._found.get(self._source(tools))
        except InvalidRequest:
            return ""
        return found.fault if found and self._names[0] == "auto" else ""

    def turn_tokens(self, tools: object = None) -> tuple[str, ...]:
        """The added tokens that the model itself writes within its turns: marks of reasoning and of calls."""
        format = self.format(tools)
        if format not in self._turn_tokens and self._tokenizer is not None:
            added = ((text, id) for text, id, _ in self._tokenizer.added_tokens if id not in self._tokenizer.eos_ids)
            self._turn_tokens[format] = tuple(text for text, _ in added if format.emits(text))
        return self._turn_tokens.get(format, ())

    def switch(self, tools: object = None) -> str | None:
        """The variable of the chat template that switches thinking on and off; None if it has none."""
        source = self._source(tools)
        found = (name for name in SWITCHES if re.search(rf"(?<![.\w'\"]){name}(?![\w'\"])", source))
        return next(found, None)

    def reading(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None, thinks: bool = True
    ) -> Reading | None:
        """The reading for a prompt and the tools that may be called; None if there is nothing to parse.

        tools: as in the API, {"type": "function", "function": {"name": ..., "parameters": ...}}.
        thinks: see thinking.may_think.
        """
        format = self.format(tools)
        has_parts = format.thinking or format.calls.style is Style.ADDRESSED
        if self._tokenizer is None or not (has_parts or (tools and format.calls.style is not Style.NONE)):
            return None
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
        end = self._tokenizer.decode(prompt_ids[-TAIL:], skip_special_tokens=False)
        if format not in self._marks:
            self._marks[format] = frozenset(id for id, text in self._special.items() if format.uses(text))
        opened = format.opened_by(end)
        thinks = opened or (thinks and not format.closed_by(end))
        return Reading(format, functions or None, opened, thinks, self._marks[format])

    def _source(self, tools: object) -> str:
        return self._template.select(tools) if self._template and self._template.sources else ""

    def _detect(self, source: str) -> DetectedFormat:
        assert self._template is not None
        special = tuple(sorted(self._special.values()))
        key = source, special
        if key not in _DETECTED:
            try:
                found = detect(source, special, map(sample_of, self._template.samples(source)))
            except TemplateLimit as error:
                found = replace(
                    detect(source, special), fault=f"the template's tool calls cannot be rendered: {error.message}"
                )
            if len(_DETECTED) >= MOST_DETECTED:
                _DETECTED.pop(next(iter(_DETECTED)), None)
            _DETECTED[key] = found
        return _DETECTED[key]


# The result depends only on the template and the vocabulary, so a model that is loaded again reuses it.
MOST_DETECTED = 64
_DETECTED: dict[tuple[str, tuple[str, ...]], DetectedFormat] = {}


def sample_of(shown: samples.SampleCall) -> Sample:
    """Converts a template's sample to the form that the table of formats takes."""
    calls = tuple((samples.NAME, arguments) for arguments in shown.calls)
    return Sample(shown.prompt, shown.turn, shown.turn_end, calls, {samples.NAME: samples.PARAMETERS})
