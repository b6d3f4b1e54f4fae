"""Prefixes: what sequences take from the prefix tree and leave there, and whose prompts are being computed just now."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.kv.node import ID_BYTES, common
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.sched.content import Numbers
from kvasir.sched.sequence import Sequence, SharedPrefix, Status
from kvasir.types import Request


class Prefixes:
    """shared: whether requests share what they begin with; the answers of one request always do.

    numbers: what stands in keys for what ids do not tell."""

    def __init__(self, tree: PrefixTree, block_size: int, shared: bool):
        self._tree = tree
        self._shared = shared
        self.numbers = Numbers()
        self._least = max(1, block_size // 2)  # tokens that are worth waiting for
        self._computing: dict[bytes, list[Sequence]] = {}  # running, with a prompt not stored yet, by what _key says

    def private(self, request: Request) -> bool:
        return request.no_cache or not self._shared

    def find(self, seq: Sequence) -> Hit | None:
        """What the tree holds of a waiting sequence. One token at least is left to compute, for its logits."""
        limit = seq.reusable
        if limit < 1 or seq.counts.in_flight or seq.suspect:
            return None
        key = seq.content.key(seq.tokens)
        hit = self._tree.match(seq.content.namespace, key, limit)
        while (stop := seq.content.stop(hit.tokens)) < hit.tokens:
            hit = self._tree.match(seq.content.namespace, key, stop)
        return hit if hit.tokens else None

    def _key(self, seq: Sequence) -> bytes:
        """Sequences that have different ones have less in common than is worth waiting for."""
        return seq.content.namespace + seq.content.prompt[: self._least * ID_BYTES]

    def begin(self, seq: Sequence) -> None:
        """The sequence runs and is to compute its prompt."""
        self._computing.setdefault(self._key(seq), []).append(seq)

    def stop(self, seq: Sequence) -> None:
        """Its prompt is computed, or it runs no more."""
        key = self._key(seq)
        neighbours = self._computing.get(key, [])
        if seq in neighbours:
            neighbours.remove(seq)
            if not neighbours:
                del self._computing[key]

    def wait_for_shared_prefix(self, seq: Sequence, found: int) -> bool:
        """Lets a running sequence go first that computes a longer prefix of this one's prompt than the `found` tokens
        that are cached. Returns whether there is one."""
        if seq.suspect:
            return False
        longest, first = 0, None
        for other in self._computing.get(self._key(seq), ()):
            shared = common(other.content.prompt, seq.content.prompt)
            if shared > longest and not other.suspect:
                longest, first = shared, other
        enough = seq.content.stop(min(longest, seq.reusable)) - self._least + 1
        if first is None or found >= enough:
            return False
        seq.shares_with = SharedPrefix(first, first.preemptions, enough)
        return True

    def waits_for_shared(self, seq: Sequence) -> bool:
        """Whether another sequence still computes what this one waits for."""
        if seq.shares_with is None:
            return False
        first, preemptions, tokens = seq.shares_with
        going = first.status is Status.RUNNING and first.preemptions == preemptions and not first.suspect
        if going and first.counts.stored < tokens:
            return True
        seq.shares_with = None
        return False

    def remember(self, seq: Sequence, now: float) -> None:
        """Leaves what the sequence has computed to the tree, too; keeps its prompt for as long as its request asks."""
        self._insert(seq)
        if seq.counts.stored >= seq.prompt_len:
            self.stop(seq)
            ttl = seq.request.cache_ttl
            if ttl and not self.private(seq.request):
                self._tree.pin(seq.content.namespace, seq.content.prompt, now + ttl)

    def leave(self, seq: Sequence, keeps: bool) -> None:
        """The sequence gives back its blocks. keeps: whether what it has computed is of use to others."""
        self.stop(seq)
        if keeps:
            self._insert(seq)
        seq.blocks.release()
        seq.counts.computed = seq.counts.stored = 0

    def _insert(self, seq: Sequence) -> None:
        if seq.counts.stored and not seq.suspect:
            ids, priority = seq.content.key(seq.tokens[: seq.counts.stored]), -seq.request.priority
            self._tree.insert(seq.content.namespace, ids, seq.blocks.ids, priority)

    def drop(self, seq: Sequence) -> None:
        """The last answer of its request has ended: what was theirs alone is of no use to anybody."""
        if self.private(seq.request):
            self._tree.drop(seq.content.namespace)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        held = [s for neighbours in self._computing.values() for s in neighbours]
        assert set(held) == {s for s in running if s.counts.stored < s.prompt_len}, "a prompt under way is lost"
