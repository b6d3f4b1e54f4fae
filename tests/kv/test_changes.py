"""Who follows a prefix tree knows which blocks it holds, whatever happens to it, and can name them itself."""

from __future__ import annotations

from hypothesis.stateful import invariant, rule

from kvasir.kv.changes import BlockRun, CacheChanges, CacheScope, ChangeLog, block_hash, chain, root_hash
from kvasir.kv.node import ID_BYTES
from kvasir.plan import unpack_ids
from tests.kv.test_radix_any_order import Serving


class Followed(Serving):
    """The tree in any order of events, with a follower who joins at some time and sometimes misses changes."""

    seen: set[bytes] | None = None

    @rule()
    def join(self):
        if self.tree.log is None:
            self.tree.log = ChangeLog(self.world.block_size, lambda number: None, contents=True)
            for namespace in (b"", b"other"):
                self.tree.log.name(namespace, lambda salt=namespace.decode(): CacheScope(salt=salt))
        changes = self.tree.log.snapshot(self.tree.nodes())
        assert changes.snapshot
        self.number, self.seen = changes.number, set()
        self.apply(changes)

    def apply(self, changes: CacheChanges) -> None:
        assert self.seen is not None
        for run in changes.runs:
            names = set(run.each())
            if run.stored:
                assert not names & self.seen, "a block came twice"
                assert run.parent in self.seen or run.parent in self.roots(), "a block came before the one it follows"
                self.check_contents(run)
                self.seen |= names
            else:
                assert names <= self.seen, "a block that was not there is gone"
                self.seen -= names

    def check_contents(self, run: BlockRun) -> None:
        """The contents of blocks give their hashes."""
        of, size, before = run.contents, self.world.block_size * ID_BYTES, run.parent
        assert of is not None and of.first == (run.parent in self.roots())
        assert not of.first or run.parent == root_hash(of.scope.salt.encode())
        for i, name in enumerate(run.each()):
            before = block_hash(before, of.ids[i * size : (i + 1) * size])
            assert before == name
        assert len(of.ids) == len(list(run.each())) * size

    def roots(self) -> set[bytes]:
        return {root_hash(namespace) for namespace in (b"", b"other")}

    @invariant()
    def is_followed(self):
        if self.seen is None:
            return
        assert self.tree.log is not None
        if changes := self.tree.log.take():
            assert changes.number == self.number + 1 and not changes.snapshot and changes.runs
            self.number = changes.number
            self.apply(changes)
        assert self.seen == self.there()
        assert self.tree.log.take() is None

    def there(self) -> set[bytes]:
        """The names of all full blocks of the tree, computed from the ids of their sequences."""
        found, size = set(), self.world.block_size
        for node in self.tree.nodes():
            ids, at = node.ids, node
            while (at := at.parent) is not None:
                ids = at.ids + ids
            found |= set(
                chain(node.namespace, unpack_ids(ids[: len(ids) // (size * ID_BYTES) * size * ID_BYTES]), {}, size)
            )
        return found


TestFollowed = Followed.TestCase
