"""GrownBlocks: reads blocks of the cache layer by layer, while a step computes them.

    step      layer 0 | layer 1 | layer 2 | ...      | head, sampling
    reader             layers 0 to 3 of all blocks    ...  the last layers

A layer's keys and values in a block are complete once all threads have passed the barrier after the instruction that
stores them. The step publishes how far it is, and a thread of this process reads what is complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvasir.plan import BlockSink
from kvasir.program.cache import LayerRange
from kvasir.program.program import Program

RANGES = 8  # of a block: how many pieces it comes in
POLL_SECONDS = 0.0005  # between looks how far a step is

Blocks = Sequence[tuple[int, int]]  # (group, block)


class GrownBlocks:
    """groups: those whose blocks can be read like this: all their layers have keys and values that the program stores.
    Ends its thread when it is closed."""

    def __init__(self, program: Program):
        self._program = program
        ready, self._order = _ready(program), list[tuple[int, int, LayerRange]]()
        self.groups: tuple[int, ...] = ()
        banks = program.cache.banks
        for group in range(len(program.cache.groups)):
            own = [(number, bank) for number, bank in enumerate(banks) if bank.group == group]
            places = ((number, i) for number, bank in own for i in range(len(bank.layers)))
            if any(bank.kind.plain for _, bank in own) or not all(place in ready for place in places):
                continue
            self.groups += (group,)
            for part in program.cache.layer_ranges(group, RANGES):
                last = max(ready[part.bank, i] for i in range(part.first, part.last))
                self._order.append((last, group, part))
        self._order.sort()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._stopped = False

    def begin(self, step: int, blocks: Blocks, sink: BlockSink) -> None:
        """Reads blocks that the next run fills. Call it right before the run."""
        self.settle()
        self._program.reset_progress()
        self._thread = self._thread or ThreadPoolExecutor(1, "kv-grow")
        self._running = self._thread.submit(self._read, step, blocks, sink)

    def stop(self) -> None:
        """Ends the reading of a run that did not start."""
        self._stopped = True
        self.settle()
        self._stopped = False

    def settle(self) -> None:
        """Waits until all blocks have been read: call it before anything else is written into the cache. Does not
        return before the end of a step that has not been waited for. Raises what the sink raised."""
        if running := self._running:
            self._running = None
            running.result()

    def _read(self, step: int, blocks: Blocks, sink: BlockSink) -> None:
        cache, done = self._program.cache, 0
        for ready, group, part in self._order:
            while done < ready and (done := self._program.progress()) < ready:
                if self._stopped:
                    return
                time.sleep(POLL_SECONDS)
            for of, block in blocks:
                if of == group:
                    sink(step, group, block, part.offset, cache.export_range(block, part))
        for group, block in blocks:
            sink(step, group, block, 0, None)

    def close(self) -> None:
        """Call it when no step runs. Idempotent."""
        self.stop()
        if self._thread:
            self._thread.shutdown()
            self._thread = None


def _ready(program: Program) -> dict[tuple[int, int], int]:
    """For each layer, as (bank, index in it), how many instructions are complete when its keys and values are."""
    found, instructions = dict[tuple[int, int], int](), program.lowered.instructions
    for i, instruction in enumerate(instructions):
        if instruction.op == "store_kv":
            end = program.lowered.chosen_from
            after = next((j for j in range(i + 1, end) if instructions[j].barrier), end)
            found[program.cache.place(instruction.inputs[2])] = after
    return found
