"""`kvasir inspect --program`: the instructions of a model's step in the program executor."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kvasir.cli.show import bytes_text, fitted, print_pairs, print_table
from kvasir.cli.waiting import loading, spinner

_ROWS = 512
_LONGEST = 1024  # instructions of a part that is folded


def program_facts(model: str, quantize: str = "", dtype: str = "auto") -> dict[str, Any]:
    """Loads the model, quantized if `quantize` is given, and builds its program for steps of 512 rows.

    Raises KvasirError if the model cannot run as a program.
    """
    from kvasir.layers.kv_layout import KVLayout
    from kvasir.ops import native
    from kvasir.program.cache import NativeCache
    from kvasir.program.program import Program
    from kvasir.runner.load import LoadOptions, load_model
    from kvasir.weights.find import find_model

    with spinner(loading(model)):
        loaded = load_model(find_model(model), dtype, options=LoadOptions("program", quantize=quantize))
    assert loaded.trace is not None
    spec = loaded.model.cache_spec()
    kv_dtype = "float32" if loaded.dtype == "float32" else "bfloat16"
    groups = len(KVLayout.of(spec).groups)
    cache = NativeCache(spec, [2] * groups, 64, kv_dtype)
    program = Program(loaded.trace, cache, max_tokens=_ROWS, max_rows=1, max_positions=_ROWS, threads=1)
    instructions = program.lowered.instructions
    barriers = [*(s.barrier for s in instructions), *([True] if program.vocab else [])]
    try:
        return {
            "model": model,
            "class": loaded.architecture,
            "isa": native.isa(),
            "traced_ops": len(loaded.trace.graph.nodes),
            "rows": _ROWS,
            "arena_bytes": program.lowered.arena,
            "weight_bytes": dict(loaded.formats),
            "barriers": sum(barriers),
            "chosen_from": program.lowered.chosen_from,
            "instructions": [
                {"text": text, "barrier": barrier} for text, barrier in zip(program.names, barriers, strict=True)
            ],
        }
    finally:
        program.close()


def show_program(facts: dict[str, Any]) -> None:
    formats = sorted(facts["weight_bytes"].items(), key=lambda item: -item[1])
    print_pairs(
        [
            (
                "program",
                f"{facts['class']}: {facts['traced_ops']} ops traced, {len(facts['instructions'])} instructions",
            ),
            ("threads meet", f"{facts['barriers']} times a step"),
            ("weights", ", ".join(f"{name} {bytes_text(size)}" for name, size in formats)),
            ("buffers", f"{bytes_text(facts['arena_bytes'])} for {facts['rows']} rows at once"),
            ("kernels", facts["isa"]),
        ]
    )
    listed = []
    for number, instruction in enumerate(facts["instructions"]):
        domain = "rows" if number < facts["chosen_from"] else "chosen"
        listed.append((domain, "|" if instruction["barrier"] else "", instruction["text"]))
    rows = []
    for begin, length, times in fold(listed):
        repeated = f"x{times}" if times > 1 else ""
        rows += [(begin + i, repeated, *listed[begin + i]) for i in range(length)]
    print_table((">#", "times", "over", "", "instruction"), rows, "Instructions (| threads meet before it)")
    if len(rows) < len(listed):
        line = "\nInstructions of equal layers are listed once, with the number of times; --json lists them all."
        print(fitted(line, sys.stdout))


def fold(items: Sequence[object]) -> list[tuple[int, int, int]]:
    """The items as parts (begin, length, times): a part that is repeated stands for all its repetitions. Of the
    repetitions that begin at an item, the one that covers most is folded."""
    parts: list[tuple[int, int, int]] = []
    place = single = 0
    while place < len(items):
        length, times = max(_repetitions(items, place), key=lambda found: found[0] * (found[1] - 1), default=(1, 1))
        if times == 1:
            place += 1
            continue
        parts += [(i, 1, 1) for i in range(single, place)] + [(place, length, times)]
        place = single = place + length * times
    return parts + [(i, 1, 1) for i in range(single, place)]


def _repetitions(items: Sequence[object], place: int) -> Iterator[tuple[int, int]]:
    """(length, times) of each part from `place` on that is repeated at once."""
    for length in range(2, min(_LONGEST, (len(items) - place) // 2) + 1):
        if items[place] != items[place + length]:
            continue
        part, times = items[place : place + length], 1
        while items[place + times * length : place + (times + 1) * length] == part:
            times += 1
        if times > 1:
            yield length, times
