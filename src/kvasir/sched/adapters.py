"""Adapters in memory: which are there, which load, which leave, and the runner's ids of those that sequences use.

    absent --begin--> loading --arrive--> held --join--> installed     in memory: at most `most_held`, `most_bytes`
       ^                 |                 |  ^              |         installed: has an id of the runner
       +-----failed------+                 |  +--id taken----+
       +----------------evicted------------+----evicted------+

A waiting sequence joins once all its adapters are held; until then later ones overtake it. Only adapters that no
running sequence uses are evicted, or lose their id: first those that no sequence wants, then the least recently used.
In one turn of planning, sequences come in the order of service, and what one of them wants is not evicted for a later
one.

So that the overtaking ends: if what a sequence needs is taken by adapters of running sequences, it *claims* enough of
them. Later sequences of that turn can then join only with adapters that are in use and not claimed, so those in use
become fewer until the claim is met.

Adapters are known by their content hash. Names are the business of the engine's handle (engine.adapters).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.errors import InvalidRequest, KvasirError, ModelFileError, quoted
from kvasir.inputs import Adapter
from kvasir.metrics import Histogram
from kvasir.plan import Adapted
from kvasir.sched.sequence import Sequence

MOST_SIZES = 1 << 15  # contents whose size in memory is remembered
MOST_LOADS = 2  # at a time: the loader is never idle, and a more urgent adapter does not wait for many others
HINT = "use fewer or smaller adapters, or raise --max-loras and --lora-memory"


class Loader(Protocol):
    """Loads adapters beside the steps. The result's `nbytes` is its size; the runner installs it."""

    def begin(self, path: str, content: str) -> Future[Any]: ...

    def close(self) -> None:
        """Begins no more loads, and waits for the one in progress."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """An adapter that is in memory, is pinned, or is wanted by an unfinished sequence.

    size: bytes, of its tensors until it has been loaded once, then of what is held. loading: its load, if one is open;
    began: when. held: what the loader returned. id: the runner's, 0 for none. users: sequences that run with it.
    wants: all unfinished sequences with it that are not paused. dropped: it leaves once no sequence wants it. used: the
    last turn in which a sequence asked for it or joined with it."""

    content: str
    path: str
    size: int
    loading: Future[Any] | None = None
    began: float = 0.0
    held: Any = None
    id: int = 0
    users: set[Sequence] = field(default_factory=set)
    wants: dict[Sequence, None] = field(default_factory=dict)
    pinned: bool = False
    dropped: bool = False
    used: int = 0

    @property
    def in_memory(self) -> bool:
        """Whether it takes memory."""
        return self.loading is not None or self.held is not None


class AdapterPool:
    """entries: by content. changes: by id, a content to install, "" to remove; not planned yet. Without any of either
    there is nothing to do in a turn.

    loader: None if the runner takes no adapters. ids: the runner's, 1 to this number. most_bytes, most_held: limits
    of what is in memory; most_held: at least `ids`. clock: in seconds."""

    def __init__(
        self,
        loader: Loader | None = None,
        ids: int = 0,
        most_bytes: int = 0,
        most_held: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._loader, self._clock = loader, clock
        self._most = ids if loader else 0
        self._most_bytes, self._most_held = most_bytes, max(ids, most_held)
        self.entries: dict[str, Entry] = {}
        self._sizes: dict[str, int] = {}  # by content: of what has been loaded, also if it is absent now
        self._memory: set[Entry] = set()  # those that are in memory
        self._pinned: set[Entry] = set()
        self._dropped: set[Entry] = set()  # that are to leave the memory
        self._bytes = self._loading = 0  # of those in memory; how many of them load
        self._free = list(range(self._most, 0, -1))
        self.changes: dict[int, str] = {}
        self._queue: dict[Entry, None] = {}  # to be loaded, in the order of arrival; some are not wanted any more
        self._turn = 0
        self._claimed: set[Entry] | None = None  # in this turn
        self._narrowed = False  # a sequence may have become impossible
        self.loads = self.evictions = 0
        self.load_seconds = Histogram()

    # -- sequences ---------------------------------------------------------------------------------------------

    def refuse_impossible(self, adapters: Seq[Adapter]) -> None:
        """Raises InvalidRequest for adapters that are not loaded, or that can never be in memory together."""
        for adapter in adapters:
            if not adapter.content or not self._most:
                hint = "load it first" if self._most else "this engine has no adapters; leave it out"
                raise InvalidRequest(f"adapter {quoted(adapter.name)} is not loaded", hint, "adapter")
        sizes = {a.content: self._sizes.get(a.content, a.nbytes) for a in adapters}
        if adapters and (why := self._impossible(sizes)):
            raise InvalidRequest(why, HINT, "adapter")

    def _impossible(self, sizes: dict[str, int]) -> str:
        """Why these adapters never fit beside the pinned ones; "" if they do."""
        sizes = sizes | {entry.content: entry.size for entry in self._pinned}
        total = sum(sizes.values())
        if len(sizes) <= self._most and total <= self._most_bytes:
            return ""
        return (
            f"the memory holds {self._most} adapters of {self._most_bytes} bytes together; those of the request and "
            f"the pinned ones are {len(sizes)}, of {total} bytes"
        )

    def enter(self, seq: Sequence) -> None:
        """A sequence begins to wait, also after a pause."""
        for adapter in seq.content.adapters:
            entry = self._entry(adapter.content, adapter.path, adapter.nbytes)
            if not entry.in_memory:
                entry.path = adapter.path  # the one that was checked last
                self._queue[entry] = None
            entry.wants[seq] = None
            self._keep(entry)
            self._narrowed = self._narrowed or bool(self._pinned)
        if seq.content.adapters:
            self.prefetch()

    def _entry(self, content: str, path: str, nbytes: int) -> Entry:
        """The entry of an adapter, which is made if there is none. nbytes: of its tensors."""
        entry = self.entries.get(content)
        if entry is None:
            entry = self.entries[content] = Entry(content, path, self._sizes.get(content, nbytes))
        return entry

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended, or is paused. Nothing is evicted before the next turn."""
        for entry in self._of(seq):
            entry.users.discard(seq)
            entry.wants.pop(seq, None)
            self._forget(entry)

    def stop(self, seq: Sequence) -> None:
        """A sequence leaves its row."""
        for entry in self._of(seq):
            entry.users.discard(seq)

    def _of(self, seq: Sequence) -> list[Entry]:
        """The adapters of a sequence, each once."""
        contents = dict.fromkeys(adapter.content for adapter in seq.content.adapters)
        return [self.entries[content] for content in contents if content in self.entries]

    def ready(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can join in this turn, as far as its adapters go. If not, their loads begin as
        soon as there is memory. Call it for the sequences of a turn in the order of service."""
        if not seq.content.adapters:
            return True
        entries = self._of(seq)
        for entry in entries:
            entry.used = self._turn
        if self._claimed is not None:
            return all(entry.users and entry not in self._claimed for entry in entries)
        absent = [entry for entry in entries if entry.held is None]
        if absent:
            short = [entry for entry in absent if not (entry.loading or self._begin(entry))]
            if short:
                spare = self._spare()
                size = self._bytes + sum(e.size for e in short) - self._most_bytes - sum(e.size for e in spare)
                self._claim(size, len(self._memory) + len(short) - self._most_held - len(spare), entries)
            return False
        lacking = sum(not entry.id for entry in entries) - len(self._free)
        if lacking > 0 and (lacking := lacking - len(self._installed())) > 0:
            self._claim(0, lacking, entries)
            return False
        return True

    def loading(self) -> set[Sequence]:
        """The sequences that wait for a load, or until one can begin."""
        full = self._loading >= MOST_LOADS
        absent = (e for e in self.entries.values() if e.held is None and (e.loading or full)) if self._loading else ()
        return {seq for entry in absent for seq in entry.wants}

    def join(self, seq: Sequence) -> tuple[Adapted, ...]:
        """Gives ids to the adapters of a ready sequence; they keep them until it leaves its row. Returns its adapters
        by id, in their order."""
        for entry in self._of(seq):
            entry.users.add(seq)
            entry.used = self._turn
            if not entry.id:
                if not self._free:
                    self._uninstall(self._installed()[0])
                entry.id = self._free.pop()
                self.changes[entry.id] = entry.content
        return tuple(Adapted(self.entries[a.content].id, a.scale, a.start) for a in seq.content.adapters)

    # -- memory ------------------------------------------------------------------------------------------------

    def _spare(self) -> list[Entry]:
        """The adapters that may be evicted or lose their id, those first that are needed least."""
        found = [e for e in self._memory if e.held is not None and not e.users and not e.pinned and e.used < self._turn]
        return sorted(found, key=lambda e: (bool(e.wants), e.used, e.content))

    def _installed(self) -> list[Entry]:
        """Those of `_spare` that have an id."""
        return [entry for entry in self._spare() if entry.id]

    def _begin(self, entry: Entry, unwanted: bool = False) -> bool:
        """Begins a load, or not yet if enough loads are open; False if there is no room. unwanted: evict only what no
        sequence wants."""
        assert self._loader
        if self._loading < MOST_LOADS:
            if not self._make_room(entry.size, unwanted):
                return False
            entry.loading, entry.began = self._loader.begin(entry.path, entry.content), self._clock()
            self._put(entry)
            self._loading += 1
        return True

    def _make_room(self, size: int, unwanted: bool = False) -> bool:
        """Evicts adapters until one more of this size fits; False, and evicts none, if it cannot fit."""
        leaving: list[Entry] = []
        spare: list[Entry] | None = None
        while len(self._memory) - len(leaving) >= self._most_held or self._bytes + size > self._most_bytes:
            spare = self._spare()[::-1] if spare is None else spare
            if not spare or (unwanted and spare[-1].wants):
                return False
            leaving.append(spare.pop())
            size -= leaving[-1].size
        for entry in leaving:
            self.evictions += 1
            self._remove(entry)
        return True

    def _put(self, entry: Entry) -> None:
        self._memory.add(entry)
        self._bytes += entry.size

    def _remove(self, entry: Entry) -> None:
        """Takes an adapter that is held out of the memory."""
        if entry.id:
            self._uninstall(entry)
        entry.held = None
        self._memory.remove(entry)
        self._bytes -= entry.size
        if entry.wants:
            self._queue[entry] = None
        self._forget(entry)

    def _uninstall(self, entry: Entry) -> None:
        self.changes[entry.id] = ""
        self._free.append(entry.id)
        entry.id = 0

    def _forget(self, entry: Entry) -> None:
        """Removes the entry of an adapter that is absent and that nothing wants."""
        if not (entry.in_memory or entry.wants or entry.pinned):
            self.entries.pop(entry.content, None)
            self._dropped.discard(entry)

    def _keep(self, entry: Entry) -> None:
        entry.dropped = False
        self._dropped.discard(entry)

    def _claim(self, size: int, count: int, own: list[Entry]) -> None:
        """Claims adapters of running sequences until as much is free, once they are not used any more."""
        self._claimed = set()
        for entry in sorted(self._memory, key=lambda e: (e.used, e.content)):
            if size <= 0 and count <= 0:
                return
            if entry.users and not entry.pinned and entry not in own:
                self._claimed.add(entry)
                size, count = size - entry.size, count - 1

    # -- turns -------------------------------------------------------------------------------------------------

    def begin_turn(self) -> list[tuple[Sequence, KvasirError]]:
        """Takes the loads that have ended. Returns the sequences that cannot go on, each with the reason."""
        self._turn += 1
        self._claimed = None
        failed: dict[Sequence, KvasirError] = {}
        for entry in [e for e in self._memory if e.loading and e.loading.done()] if self._loading else ():
            if error := self._arrive(entry):
                failed |= dict.fromkeys(entry.wants, error)
        for entry in self._leaving():
            self._remove(entry)
        if self._narrowed:
            self._narrowed = False
            failed |= self._now_impossible()
        return list(failed.items())

    def _leaving(self) -> list[Entry]:
        """The dropped adapters that leave now."""
        return [e for e in self._dropped if not e.wants and e.held is not None]

    def _arrive(self, entry: Entry) -> KvasirError | None:
        """Takes a load that has ended; returns why it failed."""
        assert entry.loading is not None and entry.held is None
        loading, entry.loading = entry.loading, None
        self._loading -= 1
        self._memory.remove(entry)
        self._bytes -= entry.size
        failed: KvasirError | None = None
        try:
            held = loading.result()
        except KvasirError as error:
            failed = error
        except Exception as error:
            failed = ModelFileError(f"the adapter {quoted(entry.path)} cannot be loaded: {error}", "see the server log")
        else:
            entry.size = held.nbytes
            self._learn(entry)
            self.load_seconds.add(self._clock() - entry.began)
            self.loads += 1
            if self._make_room(entry.size):
                entry.held = held
                self._put(entry)
            else:  # larger than its file said: it is loaded again when there is room
                self._queue[entry] = None
                self._narrowed = True
        if failed:
            self._unpin(entry)
        self._forget(entry)
        return failed

    def _learn(self, entry: Entry) -> None:
        self._sizes[entry.content] = entry.size
        if len(self._sizes) > MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]

    def _now_impossible(self) -> dict[Sequence, KvasirError]:
        """The waiting sequences that can never join beside what is pinned now."""
        failed: dict[Sequence, KvasirError] = {}
        for seq in {seq: None for entry in self.entries.values() for seq in entry.wants if seq not in entry.users}:
            if why := self._impossible({entry.content: entry.size for entry in self._of(seq)}):
                failed[seq] = InvalidRequest(why, HINT, "adapter")
        return failed

    def prefetch(self) -> None:
        """Begins loads of pinned adapters and, in order of arrival, for sequences that have not come up yet, as long as
        that evicts nothing that a sequence wants."""
        if self._claimed is not None:
            return
        for entry in [e for e in self._pinned if not e.in_memory]:
            self._begin(entry)
        while self._queue:
            entry = next(iter(self._queue))
            if entry.wants and not entry.in_memory and not (self._begin(entry, unwanted=True) and entry.loading):
                return
            del self._queue[entry]

    def take_changes(self) -> tuple[tuple[int, str], ...]:
        """Returns and clears what the runner must install before the next step: content by id, "" for none."""
        changes, self.changes = tuple(self.changes.items()), {}
        return changes

    def held(self, content: str) -> Any:
        """What the loader returned for an adapter of the latest changes; None for ""."""
        return self.entries[content].held if content else None

    def lost(self, changes: Iterable[tuple[int, str]]) -> None:
        """The step that should have made these changes has failed, so their adapters may not be installed: they will
        be when a sequence joins with them again."""
        for id, content in changes:
            entry = self.entries.get(content)
            if entry and entry.id == id and not entry.users:
                self._uninstall(entry)

    @property
    def due(self) -> bool:
        """Whether a step should be planned although no sequence needs one."""
        unpacked = any(not entry.in_memory for entry in self._pinned) and not self._impossible({})
        return bool(self.changes or unpacked or self._leaving())

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for an open load; returns at once, False, if there is none."""
        loads = [entry.loading for entry in self._memory if entry.loading] if self._loading else []
        if loads:
            concurrent.futures.wait(loads, seconds, concurrent.futures.FIRST_COMPLETED)
        return bool(loads)

    # -- from the engine's handle --------------------------------------------------------------------------------

    def pin(self, content: str, path: str, nbytes: int) -> None:
        """Loads an adapter as soon as there is memory, and keeps it."""
        entry = self._entry(content, path, nbytes)
        entry.pinned, self._narrowed = True, True
        self._pinned.add(entry)
        self._keep(entry)

    def drop(self, content: str) -> None:
        """Ends the pin of an adapter; it leaves the memory once no sequence wants it."""
        if entry := self.entries.get(content):
            self._unpin(entry)
            entry.dropped = True
            self._dropped.add(entry)
            self._forget(entry)

    def _unpin(self, entry: Entry) -> None:
        entry.pinned = False
        self._pinned.discard(entry)

    def close(self) -> None:
        if self._loader:
            self._loader.close()

    # -- inspection ----------------------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """Adapters in memory, those that load included."""
        return len(self._memory)

    @property
    def resident_bytes(self) -> int:
        return self._bytes

    def check(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        running, entries = list(running), list(self.entries.values())
        uses = {(s, a.content) for s in running for a in s.content.adapters}
        assert uses == {(s, e.content) for e in entries for s in e.users}, "the use of an adapter is lost or left over"
        wants = uses | {(s, a.content) for s in waiting for a in s.content.adapters}
        assert wants == {(s, e.content) for e in entries for s in e.wants}, "the wish for an adapter is miscounted"
        ids = [e.id for e in entries if e.id]
        assert sorted([*ids, *self._free]) == list(range(1, self._most + 1)), "an adapter's id is lost or used twice"
        assert self._memory == {e for e in entries if e.in_memory}, "an adapter in memory is lost"
        assert self._bytes == sum(e.size for e in self._memory), "the bytes of adapters are miscounted"
        assert len(self._memory) <= self._most_held and self._bytes <= self._most_bytes, "adapters exceed the memory"
        assert all(e.held is not None for e in entries if e.id or e.users), "an adapter in use was evicted"
        assert all(e.in_memory or e.wants or e.pinned for e in entries), "an adapter has no reason to be known"
