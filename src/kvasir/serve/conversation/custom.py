"""Custom tools, whose calls have a text instead of arguments. To the model, each is a function of that text."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from kvasir.engine.reading import TextGrammar
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.tools import Tool

INPUT = "input"  # the argument of the function that stands for a custom tool
Syntax = Literal["lark", "regex"]
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_BEGIN = 64  # characters among which the text begins
_HIGH = "[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a character that JSON spells in two
_SPELLED = re.compile(rf'(?:[^"\\]|\\["\\/bfnrt]|\\u{_HIGH}\\u[0-9a-fA-F]{{4}}|\\u(?!{_HIGH})[0-9a-fA-F]{{4}})*')


def custom_function(name: str, description: str | None, grammar: TextGrammar | None) -> Tool:
    """The tool as templates read it. grammar: of the text; None for any text."""
    input: dict[str, Any] = {"type": "string"}
    parameters = {"type": "object", "properties": {INPUT: input}, "required": [INPUT]}
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if grammar is not None:
        function["strict"] = True  # a grammar that cannot be enforced is refused
        parameters["additionalProperties"] = False
        if grammar.syntax == "regex":
            input["pattern"] = f"^(?:{grammar.definition})$"
        else:
            input["description"] = f"A text of this grammar in Lark:\n{grammar.definition}"
    return {"type": "function", "function": function | {"parameters": parameters}}


def text_grammar(kind: str, syntax: Syntax | None, definition: str | None, where: str) -> TextGrammar | None:
    """The grammar of a tool's text, None for any text. kind: the type of the format. where: the field that has syntax
    and definition. Raises InvalidRequest."""
    if kind == "text":
        if syntax or definition:
            raise InvalidRequest("a grammar of the type text", "set the type grammar", param=where)
        return None
    if not syntax or not definition:
        raise InvalidRequest("the grammar is incomplete", "give syntax and definition", param=where)
    return TextGrammar(syntax, definition, f"{where}.definition")


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call: a member of the arguments, as the function describes them to the model. If the
    model broke off inside them, what there is."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        reader = CustomText()
        text = reader.feed(arguments)
        return text if reader.inside else arguments
    return str(found[INPUT]) if isinstance(found, dict) and INPUT in found else arguments


class CustomText:
    """Reads the text of a custom tool's call from arguments that arrive in pieces. What it cannot read as it comes is
    in `rest`. inside: whether the text has begun."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held: str = ""
        self.inside = False
        self._sent: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def feed(self, piece: str) -> str:
        """The text that is complete with this piece of the arguments."""
        self._pieces.append(piece)
        self._held += piece
        if not self.inside:
            begun = _BEGIN.match(self._held)
            if begun is None:
                self._held = self._held[:_MAX_BEGIN]
                return ""
            self.inside, self._held = True, self._held[begun.end() :]
        found = _SPELLED.match(self._held)
        assert found, "it also matches nothing"
        self._held = self._held[found.end() :]
        text = json.loads(f'"{found[0]}"', strict=False)
        self._sent.append(text)
        return text

    def rest(self) -> str:
        """The text after all that was fed, once the arguments have ended."""
        whole, sent = custom_input(self.arguments), "".join(self._sent)
        return whole[len(sent) :] if whole.startswith(sent) else ""
