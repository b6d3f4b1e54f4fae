"""Features that requests ask for: parameters of sampling, log-probabilities, grammars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvasir.guided import sources
from kvasir.guided.grammar import LIMITS, GrammarLimits
from kvasir.guided.rule import ReasoningMarks, Rule
from kvasir.guided.tools import Function, free_text, tool_grammar
from kvasir.parse.format import CallFormat, Format, FormatTexts, Style
from kvasir.parse.table import choose
from kvasir.sched import lane
from kvasir.types import FinishReason
from tests.composition.feature import Feature
from tests.composition.run import Run


def tokens(run: Run) -> int:
    return sum(len(answer.tokens) for answer in run.answers.values())


def sampled(name: str, **params: Any) -> Feature:
    """A parameter that changes which tokens are drawn."""
    return Feature(name, name, "tokens", tokens, ask=lambda p: {"temperature": p["temperature"] or 2.0, **params})


def greedy(name: str, **params: Any) -> Feature:
    """A parameter that changes which tokens are chosen, also without drawing."""
    return Feature(name, name, "tokens", tokens, ask=lambda p: params)


def logprobs(name: str, count: int) -> Feature:
    return Feature(name, "logprobs", "tokens with that many log-probabilities",
                   lambda run: sum(len(e[3]) == count for a in run.answers.values() for e in a.logprobs),
                   ask=lambda p: {"logprobs": count})  # fmt: skip


def columns(run: Run) -> int:
    """Tokens planned in columns; answers without log-probabilities, where every row follows a grammar or drafts, or no
    step has as many rows as columns need."""
    planned = sum(len(plan.decodes) for plan in run.plans)
    few = all(len(plan.works) < lane.LEAST for plan in run.plans)
    others = few or run.drafter or all(request.grammar for request in run.requests)
    return planned or (others and sum(not answer.logprobs for answer in run.answers.values()))


# Its words are spelt in none of the BAD_WORDS, or nothing might be allowed, and hold one of the STOP_STRINGS.
SCHEMA = {
    "type": "object",
    "properties": {"filling_jug": {"type": "string"}, "kinds": {"type": "array", "items": {"enum": ["b", "bulb"]}}},
    "required": ["filling_jug", "kinds"],
    "additionalProperties": False,
}

# Schemas that are rewritten before they become grammars, so that the first few tokens are constrained. The names in
# the second hold one of the STOP_STRINGS.
LIST = {
    "type": "array",
    "items": {"enum": ["b", "d", "i"]},
    "uniqueItems": True,
    "contains": {"const": "b"},
    "minItems": 2,
    "maxItems": 3,
}
OBJECT = {
    "type": "object",
    "properties": {
        "bid": {"oneOf": [{"enum": ["jug", "bulb"]}, {"enum": ["jug", "did"]}]},
        "did": {"enum": ["jug", "bulb"]},
        "dig": {"enum": ["jug", "bulb"]},
    },
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 2,
    "dependentRequired": {"bid": ["did"]},
    "if": {"properties": {"did": {"const": "jug"}}, "required": ["did"]},
    "then": {"properties": {"bid": {"const": "bulb"}}},
    "not": {"properties": {"dig": {"const": "jug"}}, "required": ["dig"]},
}
CASES = [sources.json_schema(schema) for schema in (LIST, OBJECT)]

# Calls that begin at a single letter, since a random model would not write a longer mark.
MARKED = Format(
    CallFormat("marked", Style.NAMED, FormatTexts(" {name}", "."), begins=(" ", "e", "a", "o", "t", "n", "i", "s"))
)
TOOLS = [Function("of", {"properties": {"of": {"type": "string"}}, "required": ["of"]}), Function("kinds", SCHEMA)]


def small_lexers(run: Run) -> None:
    """What answers share of a grammar remembers so little that it fails in most of their steps."""
    guides = run.core.scheduler.guides
    if guides.limits is LIMITS:
        guides.limits = (GrammarLimits(states=5), LIMITS[1])
        guides._compiled.clear()


OPEN = ("grammar: calls in free text", "grammar: reasoning budget")  # these do not say where an answer ends


def grammar(name: str, text: str) -> Feature:
    """Jumping ahead is on, and off in the plain run."""
    return Feature(f"grammar: {name}", "grammar", "rows sampled under a mask, and ids that were forced",
                   lambda run: run.total("masked_rows") + run.total("forced_tokens"), {"jump_ahead": True},
                   fields=lambda i: {"grammar": text})  # fmt: skip


def jumped(run: Run) -> int:
    can = any(
        not p.mirostat and p.adaptive_target < 0 and not p.bad_words
        for p in (request.params for request in run.requests)
    )
    return run.total("forced_tokens") if can else run.total("masked_rows")


def ended(run: Run) -> int:
    return sum(a.reason is FinishReason.STOP for a in run.answers.values())


# Stop ids and the ids of biases are some of every vocabulary here.
STOP_IDS = tuple(range(5, 300, 4))
BIAS = {**dict.fromkeys(range(60, 110), 6.0), **dict.fromkeys(range(30), -50.0)}
BAD_WORDS = ("e", " a", "the", "and a", "o", "1", "2", "34", ".", " is", "t")
STOP_STRINGS = ("and", "e", " t", "\n", "o", "3", "?", "a", "i", "\ufffd")

ASKED = [
    Feature("n", "n", "further answers", lambda run: sum(index > 0 for _, index in run.answers),
            ask=lambda p: {"n": 3}),
    sampled("temperature", temperature=3.0),
    sampled("top-k", top_k=4),
    sampled("top-p", top_p=0.6),
    sampled("min-p", min_p=0.2),
    sampled("top-n-sigma", top_n_sigma=0.7),
    sampled("typical-p", typical_p=0.3),
    sampled("XTC", xtc_probability=0.5, xtc_threshold=0.02),
    sampled("dynamic temperature", dynatemp_range=1.9, dynatemp_exponent=2.0),
    sampled("mirostat", mirostat=2, mirostat_tau=2.0, mirostat_eta=0.9),
    sampled("adaptive-p", adaptive_target=0.5, adaptive_decay=0.7),
    greedy("repetition penalty", repetition_penalty=1.7),
    greedy("repetition window", repetition_penalty=1.7, repetition_last_n=3, presence_penalty=0.9, occurrence_last_n=3),
    greedy("presence penalty", presence_penalty=1.9),
    greedy("frequency penalty", frequency_penalty=1.9),
    greedy("DRY", dry_multiplier=9.0, dry_allowed_length=1, dry_penalty_last_n=-1),
    greedy("bad words", bad_words=BAD_WORDS),
    greedy("logit bias", logit_bias=BIAS),
    Feature("stop ids", "stop ids", "answers that ended so", ended, ask=lambda p: {"stop_token_ids": STOP_IDS}),
    Feature("min tokens", "min tokens", "answers as long",
            lambda run: sum(len(a.tokens) >= 6 for a in run.answers.values()),
            ask=lambda p: {"min_tokens": 6, "stop_token_ids": STOP_IDS}),
    Feature("stop strings", "stop strings", "answers that ended so",
            lambda run: sum(isinstance(a.stop, str) for a in run.answers.values()),
            ask=lambda p: {"stop": STOP_STRINGS}),
    logprobs("logprobs", 5),
    logprobs("most logprobs", 128),
    Feature("no logprobs", "logprobs", "tokens planned in columns, or answers without where no row may be", columns,
            ask=lambda p: {"logprobs": None}, besides=("neighbours",)),
    Feature("prompt logprobs", "prompt logprobs", "prompt tokens with log-probabilities",
            lambda run: sum(e is not None for a in run.answers.values() for e in a.prompt_logprobs or ()),
            ask=lambda p: {"prompt_logprobs": 2}),
    replace(grammar("schema", sources.json_schema(SCHEMA)), fired=jumped,
            proof="ids that were forced, with their log-probabilities; rows under a mask where none may be taken"),
    Feature("grammar: jumped", "grammar", "the same, and nothing is read of them unless asked for", jumped,
            {"jump_ahead": True}, ask=lambda p: {"logprobs": None} if p.get("logprobs", 1) == 1 else {},
            fields=lambda i: {"grammar": sources.json_schema(SCHEMA)}),
    replace(grammar("cases", ""), fields=lambda i: {"grammar": CASES[i % 2]}),
    Feature("grammar: small lexers", "grammar", "guides made anew, since what they share had failed",
            lambda run: sum(core.scheduler.guides.renewed for core in run.cores), {"jump_ahead": True},
            fields=lambda i: {"grammar": sources.regex("By( [A-Za-z0-9]+[.,;!?-]?)+")}, act=small_lexers),
    grammar("regex", sources.regex("(The )?([A-Za-z0-9]+[ .,;!?-])+")),
    grammar("tools", tool_grammar(choose(tools="pythonic"), TOOLS, {}, required=True)),
    grammar("tags", sources.structural_tags([sources.Tag("e", SCHEMA, ".")], ["e"])),
    # Ids that end an answer, and must not yet, may be all that a call can go on with: with min tokens there are none.
    replace(grammar("calls in free text", Rule(tool_grammar(MARKED, TOOLS, {}), free_text(MARKED)).text()),
            ask=lambda p: {"stop_token_ids": ()} if p.get("min_tokens") else {}),
    # The mark is spelt in none of the BAD_WORDS, and holds one of the STOP_STRINGS.
    grammar("reasoning budget", Rule(reasoning=ReasoningMarks("<think>", " si", opened=True), budget=3).text()),
    Feature("streaming", "streaming", "deltas beyond the first of a choice, or choices that one step completed",
            lambda run: run.pushed or (not run.part_way) * len(run.answers), ask=lambda p: {}),
]  # fmt: skip
