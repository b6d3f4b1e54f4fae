"""Grammars of the text half: turns what a client asks for into the checked grammar that a Request carries.

Callers wait for slow grammars in a separate thread pool, so that they block nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from kvasir.engine.reading import Calling, Reading
from kvasir.errors import InvalidRequest, KvasirError, QueueFull
from kvasir.guided import sources
from kvasir.guided.check import GrammarCheck
from kvasir.guided.lark import behind_reasoning
from kvasir.guided.rule import ReasoningMarks, Rule
from kvasir.guided.tools import Function, free_text, tool_grammar
from kvasir.guided.vocabulary import Vocabulary
from kvasir.parse.format import Style
from kvasir.types import SamplingParams, StructuredOutputs

PARAM = "structured_outputs"
BUDGET = "thinking_token_budget"
THREADS = 32
MAX_ASKING = 256  # concurrent callers
MOST_TRIED = 64  # tools that are tried one by one if their joint grammar cannot be enforced

P = ParamSpec("P")
T = TypeVar("T")


class Grammars:
    """Thread-safe. Results of checks are cached."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        """vocabulary: raises KvasirError for a model without a tokenizer."""
        self._vocabulary = vocabulary
        self._checker = GrammarCheck(vocabulary)
        self._threads = ThreadPoolExecutor(THREADS, "kvasir-grammar-check")
        self._asking = 0

    async def later(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a method of this object, which may take seconds, in a thread. To be called from one event loop. Also
        raises QueueFull."""
        if self._asking >= MAX_ASKING:
            raise QueueFull("too many grammars are being checked", "try again in a moment")
        self._asking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **kwargs))
        finally:
            self._asking -= 1

    def warm(self) -> None:
        """Prepares for the first grammar, in the background. Errors are raised when a grammar is requested."""
        Thread(target=self._warm, name="kvasir-grammar-warm", daemon=True).start()

    def _warm(self) -> None:
        with contextlib.suppress(KvasirError):
            self._checker.warm()

    def of(self, outputs: StructuredOutputs) -> str:
        """A grammar that can be enforced. The first call may take a second. Raises InvalidRequest."""
        source, convert = self._source(outputs)
        return self._checker.check(source, convert, PARAM)

    def answer(self, reading: Reading | None, params: SamplingParams, calling: Calling | None = None) -> str | None:
        """The rule for the choices of a chat: tool calls, the structure of the content, a reasoning budget; None if
        nothing is requested. The first call may take a second. Raises InvalidRequest."""
        thinking, budget = reading.format.thinking if reading else None, params.thinking_token_budget
        if budget is not None and thinking is None:
            message = "this model marks no reasoning, so a budget cannot be applied"
            raise InvalidRequest(message, "leave it out, or set the format with --reasoning-format", param=BUDGET)
        rule = Rule()
        if calling is not None:
            assert reading is not None, "tool calls need a tool-call format"
            rule = self._calls(calling, reading, params.structured_outputs)
        elif params.structured_outputs is not None:
            rule = Rule(self._structured(params.structured_outputs, reading))
        if reading and thinking and (budget is not None or rule.free):
            anywhere = reading.format.calls.style is Style.CHANNELS
            marks = ReasoningMarks(thinking.start, thinking.end, reading.opened, anywhere)
            rule = replace(rule, reasoning=marks, budget=budget)
        return None if rule == Rule() else rule.text()

    def _calls(self, calling: Calling, reading: Reading, outputs: StructuredOutputs | None) -> Rule:
        vocabulary, format = self._vocabulary(), reading.format
        content = None if outputs is None else {"type": "object"} if outputs.json_object else _parsed(outputs.json)
        if outputs is not None and calling.required:
            self.of(outputs)  # applies to choices without a call, but is refused anyway if it cannot be enforced
            content = None

        def grammar(functions: Sequence[Function]) -> str:
            return self._checker.check(
                tool_grammar(
                    format, functions, vocabulary.specials,
                    required=calling.required, parallel=calling.parallel, opened=reading.opened, content=content,
                    ends=vocabulary.ends, thinks=reading.thinks,
                ),
                param="tools",
            )  # fmt: skip

        free = None if calling.required or content is not None else free_text(format)
        functions = [Function(*function) for function in calling.functions]
        for function in functions:
            function.check()
            if function.text and function.text.syntax == "lark":  # alone, so that its own lines are quoted
                self._checker.check(function.text.definition, param=function.text.param)
        try:
            return Rule(self._loosened(grammar, functions), free)
        except InvalidRequest as error:
            error.param = error.param or "tools"
            raise

    @staticmethod
    def _loosened(grammar: Callable[[Sequence[Function]], str], functions: Sequence[Function]) -> str:
        """The grammar; if it cannot be enforced in full, the arguments of non-strict tools are constrained less."""
        try:
            return grammar(functions)
        except InvalidRequest:
            loose = [f if f.strict else f.loosened() for f in functions]
            if loose == list(functions):
                raise
        kept = list(functions)
        if len(functions) > MOST_TRIED:
            return grammar(loose)
        for i, function in enumerate(functions):
            try:
                grammar([function])
            except InvalidRequest:
                kept[i] = loose[i]
        try:
            return grammar(kept)
        except InvalidRequest:  # it is too large, or a strict tool is at fault
            return grammar(loose)

    def _structured(self, wanted: StructuredOutputs, reading: Reading | None) -> str:
        """The grammar for `wanted`, preceded by reasoning if the model may think first."""
        grammar = self.of(wanted)
        if reading is None or reading.format.thinking is None or not reading.thinks or wanted.tags is not None:
            return grammar
        vocabulary = self._vocabulary()
        whole = behind_reasoning(grammar, reading.format, vocabulary.specials, vocabulary.ends, reading.opened)
        return self._checker.check(whole, param=PARAM)

    def close(self) -> None:
        self._checker.close()

    def _source(self, wanted: StructuredOutputs) -> tuple[str, bool]:
        """The grammar, and whether it may be in llama.cpp's dialect."""
        try:
            if wanted.grammar is not None:
                return sources.by_id(wanted.grammar, self._vocabulary().specials), True
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
    """The schema, parsed if it is given as text. Raises InvalidRequest unless it is an object or a boolean."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"a schema of type {type(schema).__name__}", "give an object")
    return schema
