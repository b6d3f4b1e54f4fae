"""Custom tools, whose calls have a text instead of arguments. To the model, each is a function of that text."""

from __future__ import annotations

import json
from typing import Any, Literal

from kvasir.engine.reading import TextGrammar
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.tools import Tool

INPUT = "input"  # the argument of the function that stands for a custom tool
Syntax = Literal["lark", "regex"]


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
        return arguments
    return str(found[INPUT]) if isinstance(found, dict) and INPUT in found else arguments
