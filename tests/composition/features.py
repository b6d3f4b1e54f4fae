"""The features whose compositions are tried: one `Feature` each, and nothing else anywhere knows their names.

To add one, append a Feature: what turns it on (`options` of the engine, what is `ask`ed in requests, or an `act` before
each step), and what proves that it was there (`fired`). Pairs with all others, random sets, the sample of the fast
tests and the page follow. If the engine refuses some of its pairs, REFUSES says so. Then `make composition`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvasir.config import EVICTIONS
from kvasir.guided import sources
from kvasir.guided.grammar import LIMITS, GrammarLimits
from kvasir.guided.rule import ReasoningMarks, Rule
from kvasir.guided.tools import Function, free_text, tool_grammar
from kvasir.parse.format import CallFormat, Format, FormatTexts, Style
from kvasir.parse.table import choose
from kvasir.sched import lane
from kvasir.types import FinishReason, Request, ServiceClass, Task
from tests.composition import models
from tests.composition.drafter import ErraticSpeculator, HostileDrafter, KnowingDrafter
from tests.oracle import free_blocks, poison

if TYPE_CHECKING:
    from kvasir.sched.drafts import Drafter
from tests.composition.run import Run

Values = dict[str, Any]
Ids = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Feature:
    """One position of a switch; positions of the same switch exclude each other.

    proof, fired: what is counted, in words, and the count after a run; 0 means that it was not there.
    options: of the engine; a function where they depend on those of the features before it.
    base: the plain run has the options too (what rounds differently is compared with itself).
    ask: changes the sampling parameters of the requests. fields: further fields of request i. act: is called before
    each step. drafter: proposes ids that may come next.
    besides: features that come with it, unless the cell has others of their switches.
    """

    name: str
    switch: str
    proof: str
    fired: Callable[[Run], int]
    options: Mapping[str, Any] | Callable[[Values], Values] = field(default_factory=dict)
    base: bool = False
    ask: Callable[[Values], Values] | None = None
    fields: Callable[[int], Values] | None = None
    act: Callable[[Run], None] | None = None
    drafter: Callable[[Run], Drafter] | None = None
    besides: tuple[str, ...] = ()


# --- how requests are computed ----------------------------------------------------------------------


def preempt(run: Run) -> None:
    """One running sequence leaves: at the first chance, and then a dozen times more."""
    running, so_far = run.core.scheduler.running, run.total("preemptions")
    if running and (so_far == 0 or (so_far < 12 and run.random.random() < 0.25)):
        run.core.scheduler.preempt(run.random.choice(running))


def abort_neighbours(run: Run) -> None:
    """Others come and are gone a step later, or three. The former follow no grammar, which might force all they say."""
    if run.step % 2 == 0 and run.step < 10:
        run.submit_neighbour(f"gone {run.step}", **({"grammar": None} if run.step % 4 == 0 else {}))
    if run.step % 4 == 1:
        run.abort(f"gone {run.step - 1}")
    run.abort(f"gone {run.step - 3}")


def pause_for_readers(run: Run) -> None:
    """The reader of some request stops reading for a few steps: at the first chance, and then a dozen times more."""
    for name in [name for name, until in run.unread.items() if until <= run.step]:
        run.read_again(name)
    unfinished, so_far = sorted(set(run.core.scheduler.table.requests) - set(run.unread)), run.total("pauses")
    if unfinished and (so_far == 0 or (so_far < 12 and run.random.random() < 0.25)):
        run.stop_reading(run.random.choice(unfinished), steps=run.random.randint(1, 6))


def restart(run: Run) -> None:
    """Once, when something was answered and something was not: an engine dies, or two in a row."""
    if not run.restarts and run.answered and run.crowded:
        run.restart()


def accepted(run: Run) -> int:
    """Or whether there was nothing to draft: two tokens must follow the first of an answer."""
    return run.total("accepted_tokens") or all_shorter(run, 3)


def drafted(run: Run) -> int:
    return run.total("drafted_tokens") or all_shorter(run, 3)


def all_shorter(run: Run, tokens: int) -> bool:
    """Than so many: then some features have no step to be at work in."""
    return all(len(answer.tokens) < tokens for answer in run.answers.values())


def poison_free_blocks(run: Run) -> None:
    """Blocks that have been free since the previous step: no computation uses them."""
    run.poisoned += poison(run.core, [a & b for a, b in zip(run.free_blocks, free_blocks(run.core), strict=True)])


def prefix(
    name: str,
    made: Callable[[Ids], Ids],
    found: Callable[[int, int], bool],
    others: Values = {},  # noqa: B006
    own: Callable[[int], Values] | None = None,
) -> Feature:
    """Before the first step others run to their ends, with prompts made of those that will come, and such fields.
    found: whether a number of cached tokens is as it should be for a prompt of a length. own: fields of request i."""

    def warm(run: Run) -> None:
        if run.step == 0:
            run.warm(made, others)

    def fired(run: Run) -> int:
        lengths = {r.id: len(r.prompt_ids) for r in run.requests if not needs_prompt_rows(r)}
        as_expected = sum(
            found(n, lengths[key]) if key in lengths else n == 0 for (key, i), n in run.answered.items() if i == 0
        )
        return as_expected or run.evicted

    return Feature(f"prefix: {name}", "prefix", "answers that found as much of their prompt, or nothing where all its "
                   "rows are needed; else blocks that a small pool evicted before they were found", fired,
                   {"prefix_cache": True}, fields=own, act=warm)  # fmt: skip


def tier(name: str, options: Callable[[], Values], fresh: bool = False) -> Feature:
    """Before the first step others run to their ends with the prompts that will come, and what they leave is in the
    tier and no more in the pool. fresh: of an engine that came after theirs."""

    def warm(run: Run) -> None:
        if run.step == 0:
            run.warm(lambda ids: ids, {})
            run.move_to_tier(fresh)

    def fired(run: Run) -> int:
        can = any(len(r.prompt_ids) > run.block_size and not needs_prompt_rows(r) for r in run.requests)
        return run.total("loaded_tokens") if can else kept(run, run.saved)

    return Feature(f"prefix: {name}", "prefix", "tokens read from there, or parts of blocks written where no request "
                   "can use any; none of embeddings", fired,
                   lambda _: {"prefix_cache": True, **options()}, act=warm)  # fmt: skip


def disk() -> Values:
    return {"cache_dir": models.fresh_folder()}


def kept(run: Run, count: int) -> int:
    """The count of what answers leave in the cache; of embeddings, which leave nothing, whether there is nothing."""
    return count if any(r.task is Task.GENERATE for r in run.requests) else int(not count)


def evictions(policy: str) -> Feature:
    """Before the first step others fill the pool with other prompts."""

    def storm(run: Run) -> None:
        if run.step == 0:
            run.warm(lambda ids: (11, *ids[1:]), {"no_cache": False})

    return Feature(f"evictions: {policy}", "evictions", "blocks evicted by that policy; none of embeddings",
                   lambda run: kept(run, run.evicted) * run.says(f"prefix cache on ({policy})"),
                   {"prefix_cache": True, "cache_eviction": policy}, act=storm, besides=("tiny pool", "neighbours"),
                   )  # fmt: skip


def late_neighbours(run: Run) -> None:
    """Others come that have time for a step, or for none."""
    if run.step % 2 == 0 and run.step < 10:
        run.submit_neighbour(f"late {run.step}", deadline=0.005)


def displace(run: Run) -> None:
    """Where some of lower classes run and none of the highest is there, one of it comes for each row, until three
    had to leave."""
    scheduler = run.core.scheduler
    highest = any(not seq.request.slo.rank for seq in (*scheduler.running, *scheduler.waiting))
    if run.displaced < 3 and scheduler.running and not highest:
        run.displaceable += len(scheduler.running)
        for row in range(run.core.runner.capacity.max_rows):
            run.submit_neighbour(f"above {run.step} {row}", slo=ServiceClass.INTERACTIVE)


def needs_prompt_rows(request: Request) -> bool:
    return request.task is Task.EMBED or request.params.prompt_logprobs is not None


def small_pool(options: Values) -> Values:
    """What the longest request needs, one block more, and the scratch block."""
    return {"num_blocks": -(-140 // options["block_size"]) + 2}


def threads(count: int) -> Feature:
    return Feature(
        f"{count} threads", "threads", "threads of the pool; eager: those torch may use (1 in float32)",
        lambda run: count * (run.threads in (count, None)), {"threads": count},
    )  # fmt: skip


def blocks_of(size: int) -> Feature:
    return Feature(
        f"blocks of {size}", "block size", "blocks taken",
        lambda run: sum(len(ids) for work in run.works for _, ids in work.blocks) * (run.block_size == size),
        {"block_size": size},
    )  # fmt: skip


def chunks(name: str, **options: int) -> Feature:
    return Feature(
        name, "chunks", "parts of prompts computed without reaching their end",
        lambda run: sum(not w.sample and not w.want_pooled for w in run.works), options,
    )  # fmt: skip


CLASSES = tuple(ServiceClass)
COMPUTED = [
    Feature("neighbours", "neighbours", "steps with several sequences, or of embeddings, some that waited for memory",
            lambda run: sum(len(plan.works) > 1 for plan in run.plans) or kept(run, 0) * run.waited,
            {"max_num_seqs": 6}),
    chunks("chunks of 1", max_chunk=1),
    chunks("chunks of 13", max_chunk=13),
    chunks("steps of 29 tokens", max_num_batched_tokens=29),
    blocks_of(16), blocks_of(64), blocks_of(128),
    Feature("tiny pool", "pool", "preemptions, and steps in which one waited for blocks",
            lambda run: run.total("preemptions") + run.waited, small_pool, besides=("neighbours",)),
    Feature("NaN in free blocks", "poison", "blocks filled with NaN", lambda run: run.poisoned, act=poison_free_blocks),
    *map(evictions, EVICTIONS),
    prefix("all", lambda ids: ids, lambda n, length: n >= length - 1),  # the last as well before a forced id
    prefix("a part", lambda ids: (*ids[: len(ids) * 2 // 3], 7, 7, 7), lambda n, length: 0 < n < length - 1),
    prefix("nothing", lambda ids: (9, *ids), lambda n, _: n == 0),
    prefix("nothing of another's", lambda ids: ids, lambda n, _: n == 0, {"cache_salt": "another"}),
    prefix("all of one's own", lambda ids: ids, lambda n, length: n >= length - 1,
           own=lambda i: {"cache_salt": f"salt {i % 2}"}),
    prefix("not wanted", lambda ids: ids, lambda n, _: n == 0, {"no_cache": False}, lambda i: {"no_cache": True}),
    tier("in host memory", lambda: {"cache_host": 1 << 30}),
    tier("on disk", disk),
    tier("on disk, of an engine before", disk, fresh=True),
    Feature("pins", "pins", "blocks pinned; none of embeddings", lambda run: kept(run, run.pinned),
            {"prefix_cache": True}, fields=lambda i: {"cache_ttl": 0.2}),
    Feature("forced preemption", "preemption", "preemptions", lambda run: run.total("preemptions"), act=preempt),
    Feature("paused by a slow reader", "readers", "answers paused", lambda run: run.total("pauses"),
            act=pause_for_readers),
    Feature("abort of neighbours", "abort", "requests aborted", lambda run: run.aborted, act=abort_neighbours,
            besides=("neighbours",)),
    Feature("deadlines of neighbours", "deadlines", "requests that ended so", lambda run: run.timeouts,
            act=late_neighbours, besides=("neighbours",)),
    Feature("restart", "restart", "engines that took over", lambda run: run.restarts, act=restart),
    Feature("drafts", "drafts", "drafted ids that were right, or answers too short for any", accepted,
            drafter=KnowingDrafter),
    Feature("drafts: hostile", "drafts", "drafted ids, or answers too short for any", drafted, drafter=HostileDrafter),
    Feature("drafts: lookup", "drafts", "steps", lambda run: run.steps, {"speculate": "ngram,suffix"},
            drafter=ErraticSpeculator),
    threads(2), threads(3),
    Feature("overlap", "overlap", "steps planned while one ran", lambda run: run.overlapped, {"overlap": True}),
    Feature("service classes", "classes", "classes served",
            lambda run: len({r.slo for r in run.requests}), {"slo_interactive": "50/12"}, besides=("neighbours",),
            fields=lambda i: {"slo": CLASSES[i % 3], "tenant": f"tenant {i % 2}", "priority": -i}),
    Feature("classes displaced", "classes",
            "sequences that left their rows to a higher class, or answers of one step each, which leave none",
            lambda run: run.displaced or (not run.displaceable) * len(run.answers), {"max_num_seqs": 2},
            besides=("neighbours",), act=displace,
            fields=lambda i: {"slo": CLASSES[1 + i % 2], "tenant": f"tenant {i % 2}"}),
]  # fmt: skip


# --- what requests ask for --------------------------------------------------------------------------


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

# Schemas that are rewritten before they become grammars, so that the first few tokens are constrained.
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
        "b": {"oneOf": [{"enum": ["jug", "bulb"]}, {"enum": ["jug", "did"]}]},
        "did": {"enum": ["jug", "bulb"]},
        "dug": {"enum": ["jug", "bulb"]},
    },
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 2,
    "dependentRequired": {"b": ["did"]},
    "if": {"properties": {"did": {"const": "jug"}}, "required": ["did"]},
    "then": {"properties": {"b": {"const": "bulb"}}},
    "not": {"properties": {"dug": {"const": "jug"}}, "required": ["dug"]},
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


# --- what computes ----------------------------------------------------------------------------------


def executor(name: str) -> Feature:
    return Feature(f"{name} executor", "executor", "steps", lambda run: run.steps * (run.core.info.executor == name),
                   {"executor": name}, base=True)  # fmt: skip


def weights(name: str, *formats: str, **options: str) -> Feature:
    """formats: of which the engine says that it computes with one. A table becomes Q8_0 where the rest becomes Q4_0."""
    return Feature(name, "weights", f"{' or '.join(formats)} as the engine computes with",
                   lambda run: any(map(run.says, formats)), options, base=True)  # fmt: skip


def kv(dtype: str) -> Feature:
    return Feature(f"KV {dtype}", "KV", "steps on a cache of that type",
                   lambda run: run.says(f", {dtype}, ") * run.steps, {"kv_dtype": dtype}, base=True)  # fmt: skip


def model(name: str, *besides: str) -> Feature:
    return Feature(name, "model", "steps of that architecture",
                   lambda run: run.steps * (models.architecture(name) in ("", run.core.info.architecture)),
                   lambda _: models.options(name), base=True, besides=besides)  # fmt: skip


COMPUTING = [
    executor("program"),
    executor("eager"),
    weights("bfloat16", "bfloat16", dtype="bfloat16"),
    weights("float32", "float32", dtype="float32"),
    weights("q8", "Q8_0", quantize="q8"),
    weights("q4", "Q4_0", "Q8_0", quantize="q4"),
    kv("bfloat16"), kv("float16"), kv("float32"), kv("int8"),
    model("kvasir-mini"),
    model("kvasir-mini Q4_K_M"),
    *map(model, models.GENERATING),
    # Between steps none of its texts is under way, unless steps overlap.
    model("bert", "overlap", "neighbours"),
    # The model drafts for itself: any other would hardly be right.
    Feature("drafts: a model", "drafts", "drafted ids, ids forced instead, or answers too short for any",
            lambda run: drafted(run) or run.total("forced_tokens"),
            lambda options: {"speculate": f"suffix,draft={options['model']}"}, drafter=ErraticSpeculator),
]  # fmt: skip


FEATURES = [*COMPUTED, *ASKED, *COMPUTING]
NAMED = {feature.name: feature for feature in FEATURES}

# Where a cell says nothing.
DEFAULTS = ("program executor", "bfloat16", "kvasir-mini")
# All off. What is computed at once, and what may be remembered, is least.
PLAIN = {
    "block_size": 32, "num_blocks": 60, "threads": 1, "overlap": False, "max_num_seqs": 1,
    "max_num_batched_tokens": 256, "prefix_cache": False, "jump_ahead": False, "speculate": "off",
}  # fmt: skip

# The pairs that an engine refuses. Another refusal, or one that is not there, is a failure.
REFUSES = {
    "eager executor": {"KV int8", "q8", "q4"},
    "min tokens": {f.name for f in ASKED if f.switch == "grammar"} - set(OPEN),
    "bert": {"chunks of 1", "chunks of 13", "steps of 29 tokens", "drafts: a model", *(f.name for f in ASKED)},
}
