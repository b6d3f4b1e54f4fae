"""Grammars of the text half: from what is asked for to what a Request carries, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided import sources
from kvasir.guided.check import GrammarCheck
from kvasir.guided.tools import Function, tool_grammar
from kvasir.guided.vocabulary import Vocabulary
from kvasir.parse.format import Format
from kvasir.types import StructuredOutputs

PARAM = "structured_outputs"


class Grammars:
    """Safe to use from several threads. What was checked once is remembered."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        """vocabulary: raises KvasirError for a model without."""
        self._vocabulary = vocabulary
        self._checker = GrammarCheck(vocabulary)

    def of(self, outputs: StructuredOutputs) -> str:
        """A grammar that can be enforced. May take a second, the first time. Raises InvalidRequest."""
        source, convert = self._source(outputs)
        return self._checker.check(source, convert, PARAM)

    def tools(
        self,
        format: Format,
        functions: Sequence[tuple[str, Mapping[str, Any], bool]],
        *,
        required: bool,
        parallel: bool,
        opened: bool,
        content: Mapping[str, Any] | bool | None,
    ) -> str:
        """A grammar of answers that may call functions (name, schema of its arguments, strict); see
        guided.tools.tool_grammar. Raises InvalidRequest."""
        specials = self._vocabulary().specials
        made = [Function(*function) for function in functions]
        text = tool_grammar(
            format, made, specials, required=required, parallel=parallel, opened=opened, content=content
        )
        return self._checker.check(text, param="tools")

    def close(self) -> None:
        self._checker.close()

    def _source(self, wanted: StructuredOutputs) -> tuple[str, bool]:
        """The grammar, and whether it may be in llama.cpp's dialect."""
        try:
            if wanted.grammar is not None:
                return wanted.grammar, True
            if wanted.regex is not None:
                return sources.regex(wanted.regex), False
            if wanted.choice is not None:
                return sources.choice(wanted.choice), False
            if wanted.tags is not None:
                tags = [sources.Tag(tag.begin, tag.schema, tag.end) for tag in wanted.tags]
                return sources.structural_tags(
                    tags, wanted.triggers, self._vocabulary().specials,
                    at_least_one=wanted.at_least_one, at_most_one=wanted.at_most_one,
                ), False  # fmt: skip
            schema = {"type": "object"} if wanted.json_object else _parsed(wanted.json)
            return sources.json_schema(schema, wanted.lenient), False
        except InvalidRequest as error:
            error.param = error.param or PARAM
            raise


def _parsed(schema: Any) -> Any:
    """A schema may be given as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"a schema of type {type(schema).__name__}", "give an object")
    return schema
