"""The grammar of choices that may call tools: once a call has begun, it is completed according to its tool's schema, in
the model's own format. So a malformed call cannot be produced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import InvalidRequest, quoted
from kvasir.guided.lark import NUMBER, TURN, Lark
from kvasir.guided.marked import MarkedValues
from kvasir.guided.rule import Free
from kvasir.guided.schema import prepared
from kvasir.guided.sources import literals, schema_json
from kvasir.guided.text_grammar import TextGrammar, between_marks, in_json
from kvasir.parse.format import Format, GrammarParts, ParameterFormat, Style, grammar_parts
from kvasir.parse.tape import BLANK


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. strict: parts of its schema that cannot be enforced are refused, not ignored.
    text: of its only argument."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    text: TextGrammar | None = None

    def check(self) -> None:
        """Raises InvalidRequest if the parameters are not an object."""
        kinds = self.parameters.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            message = f"the parameters of {self.name[:80]!r} are of type {str(kinds)[:80]}"
            raise InvalidRequest(message, 'arguments must be an object: use "type": "object"', param="tools")

    def checked(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema of the parameters. Raises InvalidRequest if its `properties` or `required` are malformed."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise self._wrong("properties", "not an object", "map names to schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._wrong("required", "not a list of names", "list the arguments that a call must have")
        return schema

    def _wrong(self, key: str, what: str, hint: str) -> InvalidRequest:
        return InvalidRequest(f"{key} in the parameters of {quoted(self.name)} is {what}", hint, param="tools")

    def loosened(self) -> Function:
        """The function with only the names and plain types of its parameters."""
        properties, required = self.parameters.get("properties"), self.parameters.get("required")
        properties = properties if isinstance(properties, Mapping) else {}
        kinds = {key: kind.get("type") if isinstance(kind, Mapping) else None for key, kind in properties.items()}
        plain = {key: {"type": kind} if isinstance(kind, str) and kind in _TYPES else {} for key, kind in kinds.items()}
        names = [key for key in required if isinstance(key, str) and key in plain] if isinstance(required, list) else []
        return replace(self, parameters={"type": "object", "properties": plain, "required": names})


_B = f"{BLANK}*"
_UNQUOTED = (Style.PARAMETERS, Style.MARKED)  # here texts are written as they are
_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))


def tool_grammar(
    format: Format,
    functions: Sequence[Function],
    specials: Mapping[str, int],
    *,
    required: bool = False,
    parallel: bool = True,
    opened: bool = False,
    content: Mapping[str, Any] | bool | None = None,
    ends: Collection[str] = (),
    thinks: bool = True,
) -> str:
    """A grammar in llguidance's Lark. If no call is required and `content` is None, it is the grammar of the text from
    a trigger of `free_text` on, including the trigger.

    required: the choice must call at once, apart from reasoning. parallel: it may make several calls. opened: the
    prompt has opened the reasoning. content: a schema of the content in place of a call. specials: as in sources. ends:
    texts of the tokens that end a choice. thinks: a required call, and `content`, may come after reasoning. Raises
    ValueError for a format without calls, InvalidRequest for parameters that are not an object.
    """
    grammar = _Grammar(format, functions, specials, ends)
    return grammar.made(required, parallel, grammar.lead(format, opened) if thinks else "", content)


def free_text(format: Format) -> Free:
    """Where calls of a format begin in free text: at any of its marks; within reasoning only with all text that comes
    before the name, since a mark may also merely be mentioned there."""
    calls, whole = format.calls, format.calls.texts.open + format.calls.texts.begin
    lead = whole.partition("{name}")[0].partition("{index}")[0]
    inside = tuple(mark + after for mark, after in _openings(format, lead)) if format.thinking else ()
    first = "{[" if calls.style is Style.OBJECTS else whole[:1]
    return Free(calls.begins, inside, first if calls.bare else "")


def _openings(format: Format, begin: str) -> list[tuple[str, str]]:
    """Each mark of a format, with the text that follows it if a call begins with `begin` in the template: a mark inside
    `begin` may also stand alone, any other mark replaces the first."""
    begins = format.calls.begins
    first = begins[0] if begins and begin.startswith(begins[0]) else ""
    return [(m, begin.partition(m)[2] if m in begin else begin[len(first) :]) for m in begins]


class _Grammar(Lark):
    def __init__(
        self, format: Format, functions: Sequence[Function], specials: Mapping[str, int], ends: Collection[str]
    ):
        super().__init__(specials, ends)
        self.format, self.functions = format, functions
        parts = [grammar_parts(format, f.name, NUMBER) for f in functions]
        self.ends_turn = any(text in parts[0].end for text in ends)
        self.parts = [replace(part, end=self.cut(part.end)) for part in parts]
        self.arguments = [self._arguments(i, f, p) for i, (f, p) in enumerate(zip(functions, self.parts, strict=True))]

    def made(self, required: bool, parallel: bool, lead: str, content: Mapping[str, Any] | bool | None) -> str:
        several = parallel and not self.ends_turn
        separator, close = (self.words(getattr(self.parts[0], name)) for name in ("separator", "close"))
        self.rule("after", (f"({separator} ({self._calls('begin_next')}))* " if several else "") + close)
        channels = self.format.calls.style is Style.CHANNELS
        header = self.words(self.format.calls.texts.separator.removeprefix(TURN)) if channels else ""
        at_once = f"({header} ({self._calls('begin')}) after)"
        if required:
            again = "(/[ \\n]*/ " + at_once + ")*" if several and not close else ""
            self.rule("start", f"{lead} {at_once} {again}")
        elif content is not None:
            before, after = self.around(self.format)
            body = f"{before} %json {schema_json(content)} {after}"
            self.rule("start", f"{lead} ({at_once} | {body})")
        else:
            self._start_free(at_once, parallel)
        return self.text()

    def _start_free(self, at_once: str, parallel: bool) -> None:
        """Free text from a mark on; without a mark from the first character, which may also begin other text: any text
        that does not name a function as a call does, and in which no mark is spelled."""
        marks = self.format.calls.begins
        openings = [_openings(self.format, part.begin) for part in self.parts]
        for i, mark in enumerate(marks):
            calls = zip((after[i][1] for after in openings), self.arguments, self.parts, strict=True)
            options = [f"{self.words(begin)} {name} {self.words(part.end)}" for begin, name, part in calls]
            self.rule(f"section_{i}", f"{self.words(mark)} ({' | '.join(options)}) after")
        self.rule("section", " | ".join(f"section_{i}" for i in range(len(marks))))
        more = "free?" if parallel else ""
        if not self.format.calls.bare:
            self.rule("free", self.free(r"/(.|\n)+/", marks))
            self.rule("start", f"section {more}")
            return
        self.rule("free", self.free("TEXT", marks))
        unmarked = f"/(.|\\n)+/ & ~/(.|\\n)*({'|'.join(map(_escaped, marks))})(.|\\n)*/"
        self.lines.append(f"TEXT: {unmarked}")
        self.lines.append(f"PLAIN: {unmarked} & ~/{self._call_begun()}(.|\\n)*/")
        self.rule("rest", "(free | section)*" if parallel else "free* section?")
        also = f"({self._calls_of_a_type()} after) | " if self.format.calls.style is Style.OBJECTS else ""
        called = f"({also}{at_once}) {more if self.parts[0].close else ''}"
        # No TEXT comes right after PLAIN: text that PLAIN excludes could be split in two.
        special = self.free("", marks).removeprefix(" | ")
        rest = "section rest" if parallel else "section"
        rest += f" | {special} rest" if special else ""
        self.rule("start", f"section {more} | {called} | PLAIN ({rest})?")

    def _calls_of_a_type(self) -> str:
        """Calls without a mark that state their type first, as models that have seen many APIs do."""
        parts = [replace(p, begin=p.begin.replace("{", '{"type": "function", ', 1)) for p in self.parts]
        whole = zip(parts, self.arguments, strict=True)
        return f"({' | '.join(f'{self.words(p.begin)} {name} {self.words(p.end)}' for p, name in whole)})"

    def _call_begun(self) -> str:
        """A regular expression for the start of a call without a mark, up to the name of the function."""
        written = (json.dumps(f.name, ensure_ascii=False)[1:-1] for f in self.functions)
        names = "|".join(map(_escaped, written))
        if self.format.calls.style is Style.PYTHON:
            return rf"{_B}\[{_B}({names}){_B}\("
        fact = rf'"(id|tool_call_id|type)"{_B}:{_B}"([^"\\]|\\(.|\n))*"{_B},{_B}'
        return rf'{_B}(\[{_B})?\{{{_B}({fact})*"(name|tool_name)"{_B}:{_B}"({names})"'

    def _calls(self, which: str) -> str:
        """One call of any function."""
        whole = zip(self.parts, self.arguments, strict=True)
        return " | ".join(f"{self.words(getattr(p, which))} {name} {self.words(p.end)}" for p, name in whole)

    # -- arguments -------------------------------------------------------------------------------------------

    def _arguments(self, number: int, function: Function, parts: GrammarParts) -> str:
        """Adds the rule for a function's arguments and returns its name."""
        function.check()
        name, schema = f"arguments_{number}", function.parameters or {"type": "object", "properties": {}}
        schema = function.checked(prepared(schema, not function.strict))
        if function.text and (function.text.syntax == "lark" or parts.style in _UNQUOTED):
            self.rule(name, self._text(name, next(iter(schema["properties"])), function.text, parts))
        elif parts.style is Style.PARAMETERS:
            assert parts.parameters
            self.rule(name, self._parameters(name, schema, parts.parameters, not function.strict))
        elif parts.style is Style.PYTHON:
            self.rule(name, self._keywords(name, schema, not function.strict))
        elif parts.style is Style.MARKED:
            object = schema if "$ref" in schema else {**schema, "type": "object"}
            self.rule(
                name, MarkedValues(self, name, schema, not function.strict, self.format.calls.quote).value(object)
            )
        else:
            schema = schema if "$ref" in schema else {**schema, "type": "object"}
            self.rule(name, f"%json {schema_json(schema, not function.strict)}")
        return name

    def _parameters(self, rule: str, schema: Mapping[str, Any], marks: ParameterFormat, lenient: bool) -> str:
        """Each property between its marks, in the order of the schema; strings as plain text."""
        words = []
        for i, (key, kind) in enumerate(schema.get("properties", {}).items()):
            plain = self._is_text(kind)
            begin, end = self._marks(key, marks, plain or bool(self._choices(kind)))
            if plain:
                self.until(f"{rule}_{i}", end)
                value = f"{rule}_{i}"
            else:
                value = f"{self._plain(kind, schema, lenient)} {self.words(end)}"
            word = f'({begin} {value} "\\n")'
            words.append(word if key in schema.get("required", ()) else f"{word}?")
        return " ".join(words)

    def _marks(self, key: str, marks: ParameterFormat, plain: bool) -> tuple[str, str]:
        """The words before a parameter's value, and the text after it. plain: the value is no JSON."""
        line = "\n" if marks.lines else ""
        lead, end = marks.key_begin + key + marks.key_end, line + marks.value_end.replace("{key}", key)
        kinds = marks.kinds[:1] if plain else marks.kinds[1:]
        between = (line or "\n" * bool(marks.value_begin)) + marks.value_begin
        return f"({' | '.join(self.words(lead + word + between) for word in kinds or ('',))})", end

    def _text(self, name: str, key: str, grammar: TextGrammar, parts: GrammarParts) -> str:
        """A single argument, whose text follows a grammar of the client."""
        name = f"{name}_text"
        if parts.style is Style.PARAMETERS:
            assert parts.parameters
            begin, end = self._marks(key, parts.parameters, plain=True)
            without = self._spelled(end.strip(), parts.parameters.wrap[0])
            return f'{begin} {between_marks(self, name, grammar, literals(end, self.specials), without)} "\\n"'
        if parts.style is Style.MARKED:
            quote = self.format.calls.quote
            end = literals(quote + "}", self.specials)
            text = between_marks(self, name, grammar, end, self._spelled(quote))
            return f"{self.words(f'{{{key}:{quote}')} {text}"
        begin, end = (f'{key}="', '"') if parts.style is Style.PYTHON else (f'{{"{key}": "', '"}')
        return f"{json.dumps(begin)} {in_json(self, name, grammar)} {json.dumps(end)}"

    def _spelled(self, *marks: str) -> list[str]:
        """The marks that begin with text, and not with a special token."""
        return [mark for mark in marks if mark and not literals(mark, self.specials)[0].startswith("<[")]

    def _keywords(self, rule: str, schema: Mapping[str, Any], lenient: bool) -> str:
        """key=value, required keys first; values are JSON, except for True, False and None."""
        properties = schema.get("properties", {})
        pairs = {k: f"{json.dumps(k + '=')} {self._python(v, schema, lenient)}" for k, v in properties.items()}
        return self.listed(rule, pairs, schema.get("required", ()), ", ")

    def _python(self, kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        if isinstance(kind, Mapping) and kind.get("type") == "boolean":
            return '("True" | "False")'
        if isinstance(kind, Mapping) and kind.get("type") == "null":
            return '"None"'
        return self._value(kind, root, lenient)

    def _plain(self, kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        """A value as plain text: JSON, except for strings."""
        if choices := self._choices(kind):
            return f"({' | '.join(map(self.words, choices))})"
        return self._value(kind, root, lenient)

    @staticmethod
    def _choices(kind: Any) -> list[str]:
        """The texts that a value is chosen from; empty if it is not."""
        choices: Any = (kind.get("enum") or [kind.get("const")]) if isinstance(kind, Mapping) else []
        texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
        return choices if texts else []

    @staticmethod
    def _is_text(kind: Any) -> bool:
        """Whether a value is plain text: a string, or unconstrained."""
        if not isinstance(kind, Mapping):
            return False
        if kind.get("type") == "string":
            return not set(kind) & {"enum", "const"}
        return not set(kind) - {"description", "title", "default", "examples"}

    @staticmethod
    def _value(kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        schema = dict(kind) if isinstance(kind, Mapping) else {}
        schema |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {schema_json(schema, lenient)}"


def _escaped(text: str) -> str:
    """The text as a literal between the slashes of Lark's regular expressions."""
    return re.escape(text).replace("/", "\\/")
