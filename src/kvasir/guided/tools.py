"""The grammar of answers that may call tools: free text, in which a call that has begun goes on as its tool's schema
says, in the words of the model's own format. So a malformed call cannot be produced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.guided.sources import literals, spelt
from kvasir.parse.format import Format, GrammarParts, Parameters, Style, grammar_parts

_INDEX = "\0"  # where a call says its number


@dataclass(frozen=True, slots=True)
class Function:
    """What may be called. strict: what its schema holds and cannot be enforced is refused; else it is ignored."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


def tool_grammar(
    format: Format,
    functions: Sequence[Function],
    specials: Mapping[str, int],
    *,
    required: bool = False,
    parallel: bool = True,
    opened: bool = False,
    content: Mapping[str, Any] | bool | None = None,
) -> str:
    """A grammar in llguidance's Lark.

    required: the answer calls at once, but for reasoning before. parallel: there may be several calls. opened: the
    prompt has opened the reasoning. content: a schema of what is said instead of a call. specials: as in sources.
    Raises ValueError for a format without calls.
    """
    return _Grammar(format, functions, specials).text(required, parallel, opened, content)


class _Grammar:
    def __init__(self, format: Format, functions: Sequence[Function], specials: Mapping[str, int]):
        self.format, self.functions, self.specials = format, functions, specials
        self.parts = [grammar_parts(format, f.name, _INDEX) for f in functions]
        self.lines = ["%llguidance {}"]
        self.arguments = [self._arguments(i, f, p) for i, (f, p) in enumerate(zip(functions, self.parts, strict=True))]

    def text(self, required: bool, parallel: bool, opened: bool, content: Mapping[str, Any] | bool | None) -> str:
        trigger, several = self.parts[0].trigger, "further" if parallel else ""
        self._rule("further", f"({self._words(self.parts[0].separator)} ({self._calls('', 'begin_next')}))*")
        close = self._words(self.parts[0].close)
        at_once = f"(({self._calls('', 'begin')}) {several} {close})"
        self._rule("ending", f"{several} {close}")
        lead = self._lead(opened)
        if required:
            again = "(/[ \\n]*/ " + at_once + ")*" if parallel and not close else ""
            self._rule("start", f"{lead} {at_once} {again}")
        elif content is not None:
            self._rule("start", f"{lead} ({at_once} | %json {json.dumps(spelt(content))})")
        elif not trigger:
            self._rule("start", f"{lead} ({at_once} | plain free*)")
            self._rule("plain", self._free(r"/[^{\[](.|\n)*/"))
            self._rule("free", self._free(r"/(.|\n)+/"))
        else:
            self._opening(trigger)
            section = f"opening ({self._calls(trigger, 'begin')}) ending"
            self._rule("section", section)
            self._rule("start", "(free | section)*" if parallel else "free* section?")
            self._rule("free", self._free(r"/(.|\n)+/", trigger))
        return "\n".join(self.lines) + "\n"

    def _rule(self, name: str, body: str) -> None:
        self.lines.append(f"{name}: {body.strip() or chr(34) * 2}")

    def _words(self, text: str) -> str:
        """A text as literals; a number where it says its index."""
        pieces = [" ".join(literals(piece, self.specials)) for piece in text.split(_INDEX)]
        return " /[0-9]+/ ".join(pieces).strip()

    def _free(self, text: str, trigger: str = "") -> str:
        ids = sorted(i for token, i in self.specials.items() if not trigger.startswith(token))
        return " | ".join([text, *([f"<[{','.join(map(str, ids))}]>"] if ids else [])])

    def _calls(self, without: str, which: str) -> str:
        """One call of any function, `without` its beginning."""
        begins = (getattr(part, which)[len(without) :] for part in self.parts)
        whole = zip(begins, self.arguments, self.parts, strict=True)
        return " | ".join(f"{self._words(begin)} {name} {self._words(part.end)}" for begin, name, part in whole)

    def _opening(self, trigger: str) -> None:
        """Free text up to the trigger, which is no text where it begins with a special token."""
        head, *rest = literals(trigger, self.specials)
        if head.startswith("<["):
            self._rule("opening", " ".join([head, *rest]))
        else:
            self._rule("opening", " ".join(["head", *rest]))
            self._rule("head[lazy]", rf"/(.|\n)*/ {head}")

    def _lead(self, opened: bool) -> str:
        """What may come before an answer that calls at once: reasoning, and blank space behind it."""
        thinking, header = self.format.thinking, ""
        turn = "<|start|>assistant"
        if (
            self.format.calls.style is Style.CHANNELS
        ):  # the prompt ends with the turn, a message begins with its channel
            header = self._words(self.parts[0].separator.removeprefix(turn))
        if thinking is None:
            return header
        self._until("thought", thinking.end)
        thought = (
            "thought" if opened else f"({self._words(thinking.start)} thought {self._words(turn) if header else ''})?"
        )
        self._rule("lead", rf"{thought} /[ \n]*/ {header}")
        return "lead"

    def _until(self, name: str, end: str) -> None:
        """Any text up to the end mark, and the mark."""
        head, *rest = literals(end, self.specials)
        if head.startswith("<["):
            others = self._free(r"/(.|\n)+/", end)
            self._rule(name, f"({others})* {' '.join([head, *rest])}")
        else:
            self._rule(name, " ".join([f"{name}_end", *rest]))
            self._rule(f"{name}_end[lazy]", rf"/(.|\n)*/ {head}")

    # -- arguments -------------------------------------------------------------------------------------------

    def _arguments(self, number: int, function: Function, parts: GrammarParts) -> str:
        """The name of the rule for a function's arguments."""
        name, schema = f"arguments_{number}", function.parameters or {"type": "object", "properties": {}}
        if parts.style is Style.PARAMETERS:
            assert parts.parameters
            self._rule(name, self._parameters(name, schema, parts.parameters, not function.strict))
        elif parts.style is Style.PYTHON:
            self._rule(name, self._keywords(name, schema, not function.strict))
        else:
            schema = schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}
            self._rule(name, "%json " + json.dumps(spelt(schema, not function.strict)))
        return name

    def _parameters(self, rule: str, schema: Mapping[str, Any], marks: Parameters, lenient: bool) -> str:
        """Each property between its marks, in the order of the schema; a string as plain text."""
        line, words = "\n" if marks.lines else "", []
        for i, (key, kind) in enumerate(schema.get("properties", {}).items()):
            begin = self._words(marks.key_begin + key + marks.key_end + (line or "\n" * bool(marks.value_begin)))
            begin = f"{begin} {self._words(marks.value_begin)}"
            if self._is_text(kind):
                self._until(f"{rule}_{i}", line + marks.value_end)
                value = f"{rule}_{i}"
            else:
                value = f"{self._plain(kind, schema, lenient)} {self._words(line + marks.value_end)}"
            word = f'({begin} {value} "\\n")'
            words.append(word if key in schema.get("required", ()) else f"{word}?")
        return " ".join(words)

    def _keywords(self, rule: str, schema: Mapping[str, Any], lenient: bool) -> str:
        """key=value, the required ones first; values are JSON, but for True, False and None."""
        required, properties = schema.get("required", ()), schema.get("properties", {})
        first = [k for k in properties if k in required]
        rest = [k for k in properties if k not in required]
        pairs = {k: f"{json.dumps(k + '=')} {self._python(v, schema, lenient)}" for k, v in properties.items()}
        if first:
            return ' ", " '.join(pairs[k] for k in first) + "".join(f' (", " {pairs[k]})?' for k in rest)
        for i, key in reversed(list(enumerate(rest))):
            behind = "".join(f' (", " {pairs[k]})?' for k in rest[i + 1 :])
            self._rule(f"{rule}_{i}", f"{pairs[key]}{behind}")
        return " | ".join(["", *(f"{rule}_{i}" for i in range(len(rest)))]) if rest else ""

    def _python(self, kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        if isinstance(kind, Mapping) and kind.get("type") == "boolean":
            return '("True" | "False")'
        if isinstance(kind, Mapping) and kind.get("type") == "null":
            return '"None"'
        return self._value(kind, root, lenient)

    def _plain(self, kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        """A value as plain text: JSON, but for strings."""
        choices: list[Any] = (kind.get("enum") or [kind.get("const")]) if isinstance(kind, Mapping) else [None]
        if all(isinstance(choice, str) and choice for choice in choices):
            return f"({' | '.join(map(self._words, choices))})"
        return self._value(kind, root, lenient)

    @staticmethod
    def _is_text(kind: Any) -> bool:
        return isinstance(kind, Mapping) and kind.get("type") == "string" and not set(kind) & {"enum", "const"}

    @staticmethod
    def _value(kind: Any, root: Mapping[str, Any], lenient: bool) -> str:
        schema = dict(kind) if isinstance(kind, Mapping) else {}
        schema |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        return "%json " + json.dumps(spelt(schema, lenient))
