"""Features of adapters: which ones requests have, from where on, and what becomes of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvasir.adapters import AdapterOption
from kvasir.inputs import Adapter
from tests.composition import adapters
from tests.composition.feature import Feature, Values, needs_prompt_rows
from tests.composition.run import LENGTHS, Run

# Of each three requests the first has no adapter, so that they are neighbours of the base model's.
CHOICES = ((), ("x",), ("y",))


def changed(run: Run) -> int:
    """Answers that are not those of the base model."""
    return sum(
        answer != run.expected(replace(request, adapters=()))[request.id, index]
        for request in run.requests
        for (id, index), answer in run.answers.items()
        if id == request.id
    )


def made(write: Callable[[str, str], str], name: str, **options: int | bool) -> Callable[[Values], Values]:
    """Options of an engine with adapters x and y. name: of the feature, which decides their numbers."""
    return lambda others: {
        "lora": [AdapterOption(one, write(others["model"], f"{name} {one}")).text for one in "xy"], **options
    }  # fmt: skip


def everything(others: Values) -> Values:
    """All that adapters change, and all that they replace."""
    folders = (write(others["model"], "everything") for write in (adapters.of_everything, adapters.of_replacements))
    return {"lora": [AdapterOption(name, folder).text for name, folder in zip("xy", folders, strict=True)]}


def little_room(others: Values) -> Values:
    """For one adapter, as the executor packs it."""
    size = adapters.file_bytes(adapters.on_linears(others["model"], "adapter x"))
    room = size * 3 // 2 if others["executor"] == "eager" else size * 9 // 4
    return {**made(adapters.on_linears, "adapter")(others), "max_loras": 1, "lora_memory": room}


def own(i: int) -> Values:
    return {"adapters": tuple(map(Adapter, CHOICES[i % 3]))}


def summed(i: int) -> Values:
    """In ascending order of their names, as the front half has them."""
    scales = ((), (0.5, 1.5), (1.0, -0.75))[i % 3]
    return {"adapters": tuple(map(Adapter, "xy", scales))}


def later(i: int) -> Values:
    start = LENGTHS[i] * 2 // 3
    return {"adapters": tuple(Adapter(name, start=start) for name in CHOICES[i % 3])}


def warm_base(run: Run) -> None:
    """Before the first step the base model answers the prompts of those that will come with an adapter."""
    if run.step == 0:
        run.warm(lambda ids: ids, {"adapters": ()}, adapted=True)


def shared(run: Run) -> int:
    """Requests with an adapter that found a part of their prompt."""
    able = [
        request
        for request in run.requests
        if request.adapters and not request.no_cache and not needs_prompt_rows(request)
    ]
    found = sum(run.answered[request.id, 0] > 0 for request in able)
    return found or (not able or run.evicted > 0 or run.restarts > 0) * changed(run)


def reload(run: Run) -> None:
    """Before the first step others run with the adapters. Then, and after every few steps, their names get other
    contents, and those of before again: requests have the one at which they came."""
    if run.step == 0:
        run.warm(lambda ids: ids, {}, adapted=True)
    if run.step % 4 == 0:
        variant = ("reloaded", "adapter")[run.step // 4 % 2]
        for name in "xy":
            run.load_adapter(name, adapters.on_linears(run.options.model, f"{variant} {name}"))


def evicted(run: Run) -> int:
    return sum(core.scheduler.adapters.evictions for core in run.cores)


ADAPTED = [
    Feature("adapter", "adapters", "answers that are not the base model's", changed,
            made(adapters.on_linears, "adapter"), fields=own),
    Feature("adapters summed", "adapters", "answers that are not the base model's", changed,
            made(adapters.on_linears, "adapter"), fields=summed),
    Feature("adapter: everything", "adapters", "answers that are not the base model's", changed,
            everything, fields=own),
    Feature("adapter: from a later position", "adapters", "prompts that found what others left, such as the base "
            "model's; where none can, answers that are not its", shared,
            made(adapters.on_linears, "adapter", prefix_cache=True), fields=later, act=warm_base),
    Feature("adapter: reloaded", "adapters", "answers that are not the base model's, while names get other contents",
            changed, made(adapters.on_linears, "adapter", prefix_cache=True), fields=own, act=reload),
    Feature("adapter: little room", "adapters", "adapters that moved out", evicted, little_room, fields=own,
            besides=("neighbours",)),
]  # fmt: skip
