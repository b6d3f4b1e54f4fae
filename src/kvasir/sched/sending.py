"""Sending: which blocks of prompts steps export, to be sent to other engines while the prompt is computed.

A request that sends its blocks (`Request.sends`) is one transfer. Whenever a step has computed a chunk of its prompt,
the next step exports the blocks that the chunk has filled. They are taken from the prefix tree, so blocks that were
cached before are exported too, and the transfer outlives the request. A block that was evicted before its export is not
sent: the other engine computes it.

    prompt     |--- exported ---|--- computed, in the tree ---|--- to be computed ---|
    next step                    exports up to EXPORT_BYTES    grows up to GROWN_BYTES

If the runner can read blocks while a step computes them, the blocks that a step fills *grow*: their layers are sent as
they are computed (`Work.grows`), and nothing of them is left to export afterwards. What is above the bound is exported
by later steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from kvasir.kv.node import ID_BYTES
from kvasir.kv.pool import SCRATCH
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.kv.store import Part
from kvasir.kv.tiers.block import StoredBlock, chain, fixed_chain
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.kv.transfer.outbox import Growing
from kvasir.plan import Bytes, Capacity, Work
from kvasir.sched.sequence import Sequence, Status

EXPORT_BYTES = 32 << 20  # that a step exports: some milliseconds of copying
# That a step reads while it computes. A thread copies them beside it, so the bound is wider; the next step waits for
# what is left of them.
GROWN_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Sending:
    """A transfer under way. seq: the request's first sequence. ids: of the prompt's full blocks, packed. names: of
    blocks, per group. exported: parts that steps have exported, or export now. under_way: parts of steps not committed
    yet."""

    id: str
    seq: Sequence
    ids: bytes
    names: list[list[StoredBlock]]
    exported: set[Part] = field(default_factory=set)
    under_way: int = 0
    ended: bool = False

    @property
    def complete(self) -> bool:
        """Whether no more of the prompt will be computed for this request."""
        return self.seq.status is Status.FINISHED or self.seq.counts.stored >= self.seq.prompt_len


Export = tuple[Sending, Part, int]  # with the id of the block
Grown = tuple[Sending, Part, Growing]


class Sendings:
    """The transfers to other engines. Only the scheduler uses it."""

    def __init__(self, exchange: BlockExchange, tree: PrefixTree, capacity: Capacity):
        self._exchange = exchange
        self._tree = tree
        self._kinds = [group.kind for group in capacity.groups]
        self._sizes = [group.num_bytes for group in exchange.inbox.facts.groups]
        self._block_size = capacity.block_size
        whole = [not (kind.forgets or kind.fixed) for kind in self._kinds]
        self._grows = [group for group in capacity.grows if whole[group]]
        self._growing: dict[int, dict[tuple[int, int], Grown]] = {}  # by step number, then by (group, block)
        self._open: dict[str, Sending] = {}
        self._under_way = 0  # bytes of exports of steps not committed yet

    @property
    def due(self) -> bool:
        """Whether a step is due although nothing may be left to compute."""
        return any(sending.complete for sending in self._open.values())

    def begin(self, seq: Sequence, shared: bool) -> None:
        """Begins the transfer of a new request. shared: whether its blocks may leave this engine."""
        transfer = seq.request.sends
        assert transfer
        if not self._exchange.outbox.open(transfer):
            return
        if not shared:
            self._exchange.outbox.finish(transfer.id)
            return
        space, size = seq.content.namespace, self._block_size
        blocks = chain(space, seq.content.prompt, size)
        names = [fixed_chain(space, kind.blocks(0, size), size) if kind.fixed else blocks for kind in self._kinds]
        self._open[transfer.id] = Sending(transfer.id, seq, seq.content.prompt[: len(blocks) * size * ID_BYTES], names)

    def take(self) -> list[Export]:
        """The exports of the next step. It must perform them before anything else."""
        taken: list[Export] = []
        if not self._open:
            return taken
        room, budget = self._exchange.outbox.room - self._under_way, EXPORT_BYTES
        for sending in list(self._open.values()):
            if not self._exchange.outbox.is_open(sending.id):
                del self._open[sending.id]
                continue
            for part, id in self._due(sending):
                size = self._sizes[part[0]]
                if size > room or (taken and size > budget):
                    return taken
                taken.append((sending, part, id))
                sending.exported.add(part)
                sending.under_way += 1
                self._under_way += size
                room, budget = room - size, budget - size
            if sending.complete:
                sending.ended = True
                self._finish(sending)
        return taken

    # -- blocks that grow

    def grow(self, step: int, seqs: Seq[Sequence], works: Seq[Work]) -> list[Work]:
        """The works of a step, with the blocks that are to be read as the step computes them."""
        sending_of = {id(s.seq): s for s in self._open.values() if not s.ended} if self._grows else {}
        self._growing = {
            number: found for number, found in self._growing.items() if not all(g.over for _, _, g in found.values())
        }
        if not sending_of:
            return list(works)
        grown, budget = list(works), GROWN_BYTES
        for i, (seq, work) in enumerate(zip(seqs, works, strict=True)):
            if sending := sending_of.get(id(seq)):
                grown[i] = replace(work, grows=self._grow(step, sending, work, budget))
                budget -= sum(self._sizes[group] for group, _ in grown[i].grows)
        return grown

    def _grow(self, step: int, sending: Sending, work: Work, budget: int) -> tuple[tuple[int, int], ...]:
        """The blocks (group, id) of a work that grow, of at most `budget` bytes."""
        tables, end = sending.seq.blocks.tables, min(work.end, len(sending.ids) // ID_BYTES) // self._block_size
        room, found = min(budget, self._exchange.outbox.room - self._under_way), dict[tuple[int, int], Grown]()
        for index in range(work.start // self._block_size, end):
            for group in self._grows:
                part, size = (group, index), self._sizes[group]
                if part in sending.exported or size > room:
                    continue
                growing = self._exchange.outbox.grow(sending.id, sending.names[group][index], group, size)
                if growing is None:
                    continue
                room -= size
                sending.exported.add(part)
                found[group, tables[group].ids[index]] = sending, part, growing
        self._growing.setdefault(step, {}).update(found)
        return tuple(found)

    def arrived(self, step: int, group: int, block: int, offset: int, payload: memoryview | None) -> None:
        """Takes bytes of a block that grows; none at its end. For any thread."""
        if (found := self._growing.get(step, {}).get((group, block))) is None:
            return
        if payload is None:
            found[2].seal()
        else:
            found[2].add(offset, payload)

    def drop_growing(self, step: int, blocks: Iterable[tuple[int, int]] | None = None) -> None:
        """The blocks (group, id) of a step, or all of them, will not be completed. What is lost is exported later, if
        it is computed after all."""
        found = self._growing.get(step, {})
        for sending, part, growing in [found[block] for block in (found if blocks is None else blocks)]:
            if growing.drop():
                sending.exported.discard(part)

    def _due(self, sending: Sending) -> list[tuple[Part, int]]:
        """The parts that can be exported now, with their blocks, ordered by index."""
        hit = self._match(sending, len(sending.ids) // ID_BYTES)
        due = self._parts(sending, hit)
        if sending.complete and hit.tokens == sending.seq.prompt_len:
            # An engine that samples the first token itself computes the last block.
            due |= self._parts(sending, self._match(sending, hit.tokens - self._block_size))
        return sorted(due.items(), key=lambda item: (item[0][1], item[0][0]))

    def _match(self, sending: Sending, limit: int) -> Hit:
        """The longest cached prefix of whole blocks, of at most `limit` tokens."""
        space, ids = sending.seq.content.namespace, sending.ids
        hit = self._tree.match(space, ids, limit)
        while over := hit.tokens % self._block_size:
            hit = self._tree.match(space, ids, hit.tokens - over)
        return hit

    def _parts(self, sending: Sending, hit: Hit) -> dict[Part, int]:
        """The parts needed to continue from a hit that are not exported yet. Until the prompt is complete, those of
        groups that forget are left out: what is computed next may pass them by."""
        count, found = hit.tokens // self._block_size, {}
        for group, kind in enumerate(self._kinds):
            if not sending.complete and (kind.forgets or kind.fixed):
                continue
            for index in kind.added(0, count, self._block_size) if count else ():
                part, id = (group, index), hit.blocks[group][index]
                if id != SCRATCH and part not in sending.exported:
                    found[part] = id
        return found

    def exported(self, exports: Seq[Export], payloads: Seq[Bytes]) -> None:
        """Hands the bytes that a step exported to the outbox."""
        for (sending, (group, index), _), payload in zip(exports, payloads, strict=True):
            self._exchange.outbox.put(sending.id, sending.names[group][index], group, memoryview(payload).cast("B"))
            self._back(sending, group)
            self._finish(sending)

    def forget(self, exports: Seq[Export]) -> None:
        """Takes back the exports of a step that did not run."""
        for sending, part, _ in exports:
            sending.exported.discard(part)
            self._back(sending, part[0])
            if self._exchange.outbox.is_open(sending.id):
                sending.ended = False
                self._open[sending.id] = sending

    def _back(self, sending: Sending, group: int) -> None:
        sending.under_way -= 1
        self._under_way -= self._sizes[group]

    def _finish(self, sending: Sending) -> None:
        if sending.ended and not sending.under_way:
            self._open.pop(sending.id, None)
            self._exchange.outbox.finish(sending.id)

    def wait(self, timeout: float) -> None:
        """Waits until there is room for a part, at most `timeout` seconds."""
        self._exchange.outbox.wait(max(self._sizes), timeout)
