"""Features of how requests are computed: in which parts, with whom, and what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.config import EVICTIONS
from kvasir.types import ServiceClass, Task
from tests.composition import models
from tests.composition.beside import HandOver, Replicas
from tests.composition.drafter import ErraticSpeculator, HostileDrafter, KnowingDrafter
from tests.composition.feature import Feature, Ids, Values, all_shorter, drafted, needs_prompt_rows
from tests.composition.run import Run
from tests.oracle import free_blocks, poison


def preempt(run: Run) -> None:
    """One running sequence leaves: at the first chance, and then a dozen times more."""
    running, so_far = run.core.scheduler.running, run.total("preemptions")
    run.preemptable += len(running)
    if running and (so_far == 0 or (so_far < 12 and run.random.random() < 0.25)):
        run.core.scheduler.preempt(run.random.choice(running))


def abort_neighbours(run: Run) -> None:
    """Others come and are gone a step later, or three. The former follow no grammar, which might force all they say."""
    if run.step % 2 == 0 and run.step < 10:
        run.submit_neighbour(f"gone {run.step}", **unforced(run.step % 4 == 0))
    if run.step % 4 == 1:
        run.abort(f"gone {run.step - 1}")
    run.abort(f"gone {run.step - 3}")


def unforced(whether: bool) -> Values:
    """Fields of a request that follows no grammar; none of them, if it may."""
    return {"grammar": None} if whether else {}


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
    """Others come that have time for a step, or for none. Those that follow no grammar need more: one may force all
    that they say in their first step."""
    if run.step % 2 == 0 and run.step < 10:
        run.submit_neighbour(f"late {run.step}", deadline=0.005, **unforced(run.step % 4 == 0))


def displace(run: Run) -> None:
    """Where some of lower classes run and none of the highest is there, one of it comes for each row, until three
    had to leave."""
    scheduler = run.core.scheduler
    highest = any(not seq.request.slo.rank for seq in (*scheduler.running, *scheduler.waiting))
    if run.displaced < 3 and scheduler.running and not highest:
        run.displaceable += len(scheduler.running)
        for row in range(run.core.runner.capacity.max_rows):
            run.submit_neighbour(f"above {run.step} {row}", slo=ServiceClass.INTERACTIVE)


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


def handed_over(run: Run) -> int:
    """Tokens of blocks that another engine sent, or blocks that a small pool evicted before; where none can be used,
    requests that moved, or had no need to."""
    can = any(len(r.prompt_ids) > run.block_size and not needs_prompt_rows(r) and not r.no_cache for r in run.requests)
    return run.total("loaded_tokens") or run.evicted if can and run.moved else run.moved or len(run.answers)


CLASSES = tuple(ServiceClass)
COMPUTED = [
    Feature("neighbours", "neighbours", "steps with several sequences; of embeddings, some that waited for memory; of"
            " several engines, some with several requests",
            lambda run: sum(len(plan.works) > 1 for plan in run.plans) or kept(run, 0) * run.waited or run.met,
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
    Feature("forced preemption", "preemption", "preemptions, or answers of one step each, which leave none",
            lambda run: run.total("preemptions") or (not run.preemptable) * len(run.answers), act=preempt),
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
    Feature("replicas: 2", "engines",
            "requests that moved to the other engine with tokens, or answers of one step each",
            lambda run: run.moved or (not run.movable) * len(run.answers), engines=Replicas),
    Feature("hand-over", "engines",
            "tokens of blocks that the other engine sent, or blocks that a small pool evicted before; where none can "
            "be used, requests that moved with tokens, or answers of one step each",
            handed_over, {"prefix_cache": True}, engines=HandOver),
    threads(2), threads(3),
    Feature("ranks: 2", "threads", "engines whose ranks are processes",
            lambda run: sum(any(" ranks of " in line for line in core.summary) for core in run.cores),
            {"tensor_parallel": 2, "threads": 2}),
    Feature("stages: 2", "threads", "engines whose stages are processes",
            lambda run: sum(any(" stages of " in line for line in core.summary) for core in run.cores),
            {"pipeline_parallel": 2, "threads": 2}),
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
