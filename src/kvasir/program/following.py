"""The work of a rank that follows rank 0: it carries out commands until all waits end."""

from __future__ import annotations

from kvasir.parallel.channel import Channel
from kvasir.plan import Bytes
from kvasir.program import commands
from kvasir.program.commands import CALL, LOGITS, STEP, StepMemory
from kvasir.program.program import Program
from kvasir.program.shared import SharedRank
from kvasir.program.shared_packing import FollowingPacking
from kvasir.program.staged import StagedProgram


class Follower:
    """program: of this rank. steps, rows, pipe: files in memory that all ranks have open, the last for stages. channel,
    packing: to rank 0, the latter for adapters."""

    def __init__(
        self, program: Program | StagedProgram, mesh: SharedRank, steps: int, rows: int, pipe: int, channel: Channel,
        packing: Channel,
    ):  # fmt: skip
        self._packing = FollowingPacking(program.adapters, packing)
        self.program, self.mesh, self.channel, self._rows = program, mesh, channel, rows
        self._memory = StepMemory(steps, len(program.states), program.struct.max_tokens)
        if isinstance(program, StagedProgram):
            program.join(mesh, pipe, self._memory)

    def serve(self) -> None:
        """Returns once the ranks are aborted, which is also how they end. Raises what a command raises."""
        while self.mesh.next():
            kind, count, end = self._memory.command
            if kind == STEP:
                self._memory.read_step(self.program, count)
                self.program.run(count, end)
            elif kind == LOGITS and not self._leaves_logits:
                self.program.logits_of(self._memory.chosen[:count].tolist())
            elif kind == CALL:
                self.channel.send(self._answer(commands.decode(self.channel.receive())))
            self.mesh.done()

    @property
    def _leaves_logits(self) -> bool:
        """Whether another stage computes them."""
        return isinstance(self.program, StagedProgram) and self.program.tail is None

    def _answer(self, message: commands.Message) -> Bytes:
        cache = self.program.cache
        if getattr(message, "group", 0) >= len(cache.groups):
            return b""  # of a draft model, which only rank 0 has
        match message:
            case commands.RowShape():
                self.program.bind(commands.map_rows(self._rows, message))
            case commands.CopyBlocks(group, pairs):
                cache.copy(group, pairs)
            case commands.ExportBlock(group, block):
                return cache.export(group, block)
            case commands.ImportBlock(group, block, number, data) if number == self.mesh.number:
                cache.import_(group, block, data)
            case commands.FillCache(value):
                cache.fill_(value)
            case commands.SetAdapter(adapter, key, rank, dropped):
                packed = None if key is None else self._packing.take(key, rank)
                self.program.set_adapter(adapter, packed)
                self._packing.drop(dropped)
        return b""
