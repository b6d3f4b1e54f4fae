"""Faults of what is computed, kept, planned and sampled: see tests.composition.fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, AttentionArgs
from kvasir.plan import unpack_ids
from kvasir.sched.sequence import Status
from kvasir.seeds import answer_seed
from tests.composition.fault import fault, wrap

# --- what is computed -------------------------------------------------------------------------------


@fault("a chunk begins one token early", ("chunks of 13",), ("steps of 29 tokens", "mistral"))
def early_chunk(core: Any) -> None:
    @wrap(core.runner.executor.program, "start")
    def start(run: Callable, count: int, end: int) -> None:
        for piece in core.runner.executor.program.pieces[:count]:
            piece.start -= piece.start > 0 and piece.count > 1
        run(count, end)


@fault("a chunk begins one token early, on the eager executor", ("eager executor", "chunks of 13"))
def early_slice(core: Any) -> None:
    @wrap(core.runner.executor, "batch")
    def one_early(make: Callable, step: Any) -> Any:
        works = [replace(w, start=w.start - 1) if w.start and w.count > 1 else w for w in step.works]
        return make(replace(step, works=works))


@fault("a chunk sees keys of its own future", ("chunks of 13",), ("neighbours", "KV int8"))
def unmasked(core: Any) -> None:
    @wrap(core.runner.executor.program, "start")
    def start(run: Callable, count: int, end: int) -> None:
        for piece in core.runner.executor.program.pieces[:count]:
            piece.flags |= PIECE_BIDIRECTIONAL
        run(count, end)


@fault("the last key of a window is skipped", ("mistral", "neighbours"), ("gemma3", "KV int8"))
def short_window(core: Any) -> None:
    for held in core.runner.executor.program.memory.kept:
        if isinstance(held, AttentionArgs) and held.window:
            held.window -= 1


@fault("a neighbour's scale of a key", ("KV int8", "neighbours"), ("KV int8", "overlap"))
def foreign_scale(core: Any) -> None:
    """Scales lie after the numbers of a tile of 16 tokens: the scales of the first two are swapped before each step."""
    cache, pools = core.runner.cache, core.scheduler.kv.pools

    @wrap(core, "step")
    def step(run: Callable) -> Any:
        for group, pool in enumerate(pools):
            layout = cache.layout_at(cache.groups[group].layers[0])
            numbers = 16 * ((layout.head_dim + 15) // 16 * 16)
            for block in (b for b in range(1, pool.num_blocks) if pool._count[b]):
                scales = cache.tensors[group][:, 0, block, numbers : numbers + 8]
                scales[:] = np.roll(scales, 4, -1)
        return run()


@fault("a row of the sampler keeps what the one before asked for", ("temperature",), ("logit bias", "n"))
def stale_spec(core: Any) -> None:
    used: set[int] = set()

    executor = core.runner.executor

    @wrap(executor, "enter")
    def enter(fill: Callable, join: Any, row: Any) -> None:
        state, kept = executor.program.states[join.row], executor._kept.get(join.row)
        before = bytes(state.spec)
        fill(join, row)
        if join.row in used:
            state.spec = type(state.spec).from_buffer_copy(before)
            executor._kept[join.row] += kept
        used.add(join.row)


@fault("a penalty is lost beside a neighbour", ("repetition penalty", "neighbours", "qwen3"))
def lost_penalty(core: Any) -> None:
    @wrap(core.runner.executor, "enter")
    def enter(fill: Callable, join: Any, row: Any) -> None:
        fill(join, row)
        if core.runner.rows.used > 1:
            core.runner.executor.program.states[join.row].spec.repetition_penalty = 1.0


@fault("answers of a request share a seed", ("n", "temperature"), ("n", "streaming"))
def shared_seed(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        made = make(request, index)
        made.spec = replace(made.spec, seed=answer_seed(request.params.seed, 0))
        return made


@fault("log-probabilities of the neighbour", ("neighbours",), ("neighbours", "logprobs"))
def foreign_logprobs(core: Any) -> None:
    @wrap(core.runner, "sample")
    def sample(take: Callable, *args: Any) -> Any:
        result = take(*args)
        drawn = [row.logprobs for row in result.rows if row.logprobs]
        others = iter(drawn[1:] + drawn[:1])
        return replace(result, rows=tuple(replace(r, logprobs=next(others)) if r.logprobs else r for r in result.rows))


# --- what is remembered -----------------------------------------------------------------------------


@fault("a block that is full is written again", ("blocks of 16",), ("neighbours", "chunks of 13"))
def stale_block(core: Any) -> None:
    @wrap(core.runner.rows, "_enter")
    def enter(run: Callable, row: Any, group: int, first: int, ids: Any) -> None:
        run(row, group, first, ids)
        if first:
            row.tables[group][first] = row.tables[group][first - 1]


@fault("the copy of a shared block is left out", ("prefix: a part",), ("n", "neighbours"))
def no_copy(core: Any) -> None:
    @wrap(core.runner, "execute")
    def execute(run: Callable, plan: Any) -> Any:
        return run(replace(plan, copies=()))


@fault("the prefix tree claims one token more than it has", ("prefix: a part",), ("prefix: a part", "neighbours"))
def long_hit(core: Any) -> None:
    size = core.runner.capacity.block_size

    @wrap(core.scheduler.kv.tree, "match")
    def match(find: Callable, namespace: bytes, ids: bytes, limit: int) -> Any:
        hit = find(namespace, ids, limit)
        return replace(hit, tokens=hit.tokens + 1) if hit.tokens < limit and hit.tokens % size else hit


@fault(
    "a tier gives what it gave before, of another block",
    ("prefix: on disk",),
    ("prefix: in host memory", "qwen3-next"),
    ("prefix: on disk, of an engine before", "KV int8"),
    ("prefix: on disk", "gemma3", "overlap"),
)
def foreign_part(core: Any) -> None:
    before: dict[int, Any] = {}  # by size

    @wrap(core.scheduler.store.tier, "poll")
    def poll(take: Callable, *args: Any) -> Any:
        found = take(*args)
        if not isinstance(found, memoryview):
            return found
        given = before.get(found.nbytes, found)
        before[found.nbytes] = found
        return given


@fault("all share one namespace of the prefix tree", ("prefix: nothing of another's",), proof=True)
def one_namespace(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        made = make(request, index)
        made.content.namespace = b"all"
        return made


@fault("one token too many counts as computed after a preemption", ("chunks of 13", "forced preemption"))
def long_resume(core: Any) -> None:
    @wrap(core.scheduler, "preempt")
    def preempt(leave: Callable, seq: Any) -> None:
        seq.counts.stored += (
            seq.counts.stored % core.runner.capacity.block_size > 0 and seq.counts.stored < seq.prompt_len - 1
        )
        leave(seq)


def paused(core: Any, request_id: str) -> list[Any]:
    return [s for s in core.scheduler.table.requests.get(request_id, ()) if s.status is Status.PAUSED]


@fault(
    "an answer that was paused repeats its last token",
    ("paused by a slow reader",),
    ("paused by a slow reader", "neighbours", "n"),
)
def repeated_token(core: Any) -> None:
    @wrap(core.scheduler, "resume")
    def resume(go_on: Callable, request_id: str) -> None:
        for seq in paused(core, request_id):
            if seq.counts.known == len(seq.tokens) > seq.prompt_len:
                seq.tokens.pop()
                seq.counts.known -= 1
        go_on(request_id)


@fault(
    "an answer that was paused forgets the sampler's carry",
    ("paused by a slow reader", "mirostat", "qwen3"),
    ("paused by a slow reader", "mirostat", "neighbours", "n"),
)
def forgotten_carry(core: Any) -> None:
    @wrap(core.scheduler, "resume")
    def resume(go_on: Callable, request_id: str) -> None:
        for seq in paused(core, request_id):
            seq.carry = b""
        go_on(request_id)


@fault(
    "adaptive-p forgets its history when it is preempted",
    ("forced preemption", "adaptive-p", "neighbours"),
    ("forced preemption", "adaptive-p", "neighbours", "n"),
)
def forgotten_history(core: Any) -> None:
    @wrap(core.scheduler, "preempt")
    def preempt(leave: Callable, seq: Any) -> None:
        seq.carry = b""
        leave(seq)


@fault("a token sampled while its answer is paused is lost", ("paused by a slow reader", "overlap", "neighbours"))
def lost_while_paused(core: Any) -> None:
    @wrap(core.scheduler, "_take")
    def take(commit: Callable, seq: Any, *args: Any, **named: Any) -> Any:
        is_paused, delta = seq.status is Status.PAUSED, commit(seq, *args, **named)
        return None if is_paused and seq.status is Status.PAUSED else delta


@fault(
    "what waits for the trial of other suspects begins anew",
    ("restart", "neighbours"),
    ("restart", "neighbours", "streaming", "n"),
)
def begins_anew(core: Any) -> None:
    steps: list[None] = []

    @wrap(core, "step")
    def step(run: Callable) -> Any:
        steps.append(None)
        return run()

    @wrap(core, "add")
    def add(put: Callable, request: Any) -> None:
        put(replace(request, resume_ids=(), resume_carries=()) if steps else request)


@fault(
    "a window's blocks are returned a block too early",
    ("mistral", "blocks of 16", "chunks of 13", "tiny pool", "n"),
    ("mistral", "blocks of 16", "tiny pool", "prefix: a part"),
)
def early_trim(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        made = make(request, index)
        for table in made.blocks.tables:
            if table.kind.window:
                table.kind = replace(table.kind, window=table.kind.window - core.runner.capacity.block_size)
        return made


# --- what is counted --------------------------------------------------------------------------------


@fault("a stop id is not heard beside a neighbour", ("stop ids", "neighbours"), ("stop ids", "n", "neighbours"))
def deaf(core: Any) -> None:
    @wrap(core.scheduler, "_take")
    def take(commit: Callable, seq: Any, *args: Any, **named: Any) -> Any:
        if len(core.scheduler.running) < 2:
            return commit(seq, *args, **named)
        heard, seq.stop_ids = seq.stop_ids, frozenset()
        try:
            return commit(seq, *args, **named)
        finally:
            seq.stop_ids = heard


@fault(
    "what was sampled counts as prompt in who joins again",
    ("forced preemption", "presence penalty", "qwen3"),
    ("restart", "presence penalty", "qwen2", "neighbours"),
)
def long_prompt(core: Any) -> None:
    @wrap(core.runner, "execute")
    def execute(run: Callable, plan: Any) -> Any:
        return run(replace(plan, joined=tuple(replace(j, prompt_len=len(j.ids) // 4) for j in plan.joined)))


@fault("an answer misses its last token under overlap", ("overlap", "neighbours"), ("overlap", "streaming"))
def short_answer(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        made = make(request, index)
        made.max_known -= core.runner.overlaps
        return made


@fault("a step planned ahead begins at the token before the last", ("overlap", "neighbours"), ("overlap", "llama"))
def stale_token(core: Any) -> None:
    @wrap(core.runner, "execute")
    def execute(run: Callable, plan: Any) -> Any:
        ahead, joined = len(core.scheduler.under_way) > 1, {join.row for join in plan.joined}
        for work in plan.works:
            if ahead and work.count == 1 and work.start and work.row not in joined:
                ids = core.runner.rows[work.row].ids
                ids[work.start] = ids[work.start - 1]
        return run(plan)


# --- drafts -----------------------------------------------------------------------------------------


@fault("a drafted id that is wrong is kept", ("drafts", "neighbours"), ("drafts", "llama"))
def kept_draft(core: Any) -> None:
    def kept(work: Any, row: Any) -> Any:
        if row.error or row.accepted == work.drafted:
            return row
        wrong = unpack_ids(work.appended)[-work.drafted :][row.accepted]
        mine = core.runner.rows[work.row]
        mine.ids[mine.known - 1] = wrong
        return replace(row, tokens=(*row.tokens[:-1], wrong))

    @wrap(core.runner, "sample")
    def sample(take: Callable, pending: Any, *args: Any) -> Any:
        result = take(pending, *args)
        return replace(result, rows=tuple(map(kept, pending.step.plan.work, result.rows)))


@fault("masks along a draft are those of its beginning", ("drafts", "grammar: schema", "neighbours"))
def one_mask(core: Any) -> None:
    @wrap(core.scheduler, "masks")
    def masks(make: Callable, plan: Any) -> Any:
        drafted = {work.row: work.drafted for work in plan.work}
        made = make(plan)
        return {row: mask[: len(mask) // (drafted[row] + 1)] * (drafted[row] + 1) for row, mask in made.items()}


# --- grammars ---------------------------------------------------------------------------------------


@fault("forced ids are read from the last row", ("grammar: schema",), ("grammar: schema", "n", "chunks of 13"))
def misread(core: Any) -> None:
    @wrap(core.runner, "sample")
    def sample(take: Callable, *args: Any) -> Any:
        result = take(*args)
        moved = (
            replace(r, read=tuple((e[0], *r.logprobs[0][1:]) for e in r.read)) if r.read and r.logprobs else r
            for r in result.rows
        )
        return replace(result, rows=tuple(moved))


@fault("rows in columns get each other's tokens", ("no logprobs",), ("no logprobs", "temperature", "overlap"))
def turned_columns(core: Any) -> None:
    @wrap(core.runner, "sample")
    def sample(take: Callable, *args: Any) -> Any:
        result = take(*args)
        return replace(result, decoded=np.frombuffer(result.decoded, np.int32)[::-1].tobytes())


@fault("what a grammar allows is not heard", ("grammar: regex", "neighbours"), ("grammar: regex", "n"))
def deaf_to_masks(core: Any) -> None:
    @wrap(core.runner, "sample")
    def sample(take: Callable, pending: Any, masks: Any, *more: Any) -> Any:
        return take(pending, {}, *more)


@fault("an item of a list may come twice", ("grammar: cases", "temperature"), ("grammar: cases", "n", "XTC"))
def twice(core: Any) -> None:
    @wrap(core.scheduler.guides, "_compile")
    def compiled(run: Callable, rule: str) -> Any:
        held = json.loads(rule)
        for reply in held["grammars"][0]["json_schema"]["allOf"]:
            if lists := reply.get("enum"):
                lists += [[item, item, *more] for [item, *more] in lists]
        return run(json.dumps(held))


@fault("conditions on an object are lost", ("grammar: cases", "n"), ("grammar: cases", "n", "chunks of 13"))
def unconditional(core: Any) -> None:
    @wrap(core.scheduler.guides, "_compile")
    def compiled(run: Callable, rule: str) -> Any:
        held = json.loads(rule)
        schema = held["grammars"][0]["json_schema"]
        if schema.get("type") == "object":
            del schema["allOf"]
        return run(json.dumps(held))


@fault(
    "answers go on with a lexer that one of them made fail",
    ("grammar: small lexers",),
    ("grammar: small lexers", "n", "neighbours"),
)
def failed_lexer(core: Any) -> None:
    @wrap(core.scheduler.guides, "_compile")
    def compiled(run: Callable, rule: str) -> Any:
        made = run(rule)

        @wrap(made.grammar, "instead_of")
        def same(_: Callable, failed: Any) -> Any:
            failed.alone = True
            return failed

        return made


@fault(
    "a new guide forgets the text of its choice",
    ("grammar: small lexers",),
    ("grammar: small lexers", "chunks of 13"),
)
def forgetful(core: Any) -> None:
    class Forgetful(list):
        def __iadd__(self, ids: Any) -> Any:
            return self

    @wrap(core.scheduler.guides, "_compile")
    def compiled(run: Callable, rule: str) -> Any:
        made = run(rule)

        @wrap(made.grammar, "begin")
        def begin(make: Callable) -> Any:
            guide = make()
            guide._ids = Forgetful()
            return guide

        return made


@fault("an id that a grammar forces is not reported", ("grammar: jumped",), ("grammar: jumped", "n", "chunks of 13"))
def untold_id(core: Any) -> None:
    @wrap(core.scheduler, "enter_grammars")
    def enter(make: Callable) -> Any:
        made = make()
        for seq in core.scheduler.waiting:
            seq.emission.unemitted = max(0, seq.emission.unemitted - 1)
        return made


# --- what moves between engines ---------------------------------------------------------------------


@fault(
    "a request that moves to another engine lacks its last token", ("replicas: 2",), ("hand-over", "n", "temperature")
)
def short_row(core: Any) -> None:
    @wrap(core, "add")
    def add(put: Callable, request: Any) -> None:
        put(replace(request, resume_ids=tuple(ids[:-1] for ids in request.resume_ids)))
