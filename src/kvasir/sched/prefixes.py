"""Prefixes: what sequences take from and add to the prefix tree, and which running sequences compute their prompts."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir import inputs
from kvasir.kv.changes import CacheScope
from kvasir.kv.node import ID_BYTES, common
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.sched.content import MarkIds
from kvasir.sched.sequence import Sequence, SharedPrefix, Status
from kvasir.types import Request


class Prefixes:
    """shared: whether requests share prefixes; the sequences of one request always do.

    numbers: the numbers that replace marks in keys; see content."""

    def __init__(self, tree: PrefixTree, block_size: int, shared: bool):
        self._tree = tree
        self._shared = shared
        self.numbers = MarkIds()
        self._least = max(1, block_size // 2)  # shared tokens that are worth waiting for
        self._computing: dict[bytes, list[Sequence]] = {}  # running sequences whose prompt is not stored yet, by _key

    def private(self, request: Request) -> bool:
        """Whether the request shares no prefixes with other requests."""
        return request.no_cache or not self._shared

    def find(self, seq: Sequence) -> Hit | None:
        """The longest cached prefix of a waiting sequence, None if there is none. Leaves at least one token to compute,
        for its logits."""
        limit = seq.reusable
        if limit < 1 or seq.counts.in_flight or seq.suspect:
            return None
        key = seq.content.key(seq.tokens)
        hit = self._tree.match(seq.content.namespace, key, limit)
        while (stop := seq.content.stop(hit.tokens)) < hit.tokens:
            hit = self._tree.match(seq.content.namespace, key, stop)
        return hit if hit.tokens else None

    def _key(self, seq: Sequence) -> bytes:
        """Sequences with different keys share too short a prefix to wait for."""
        return seq.content.namespace + seq.content.prompt[: self._least * ID_BYTES]

    def begin(self, seq: Sequence) -> None:
        """Records that a running sequence computes its prompt, unless the prompt will not be kept."""
        if seq.embeds:
            return
        self._computing.setdefault(self._key(seq), []).append(seq)

    def stop(self, seq: Sequence) -> None:
        """Records that the sequence's prompt is computed, or that the sequence left its row."""
        key = self._key(seq)
        neighbours = self._computing.get(key, [])
        if seq in neighbours:
            neighbours.remove(seq)
            if not neighbours:
                del self._computing[key]

    def wait_for_shared_prefix(self, seq: Sequence, found: int) -> bool:
        """Makes a waiting sequence wait for a running one that computes a prefix of its prompt longer than the `found`
        cached tokens. Returns whether there is such a sequence."""
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
        """Whether another sequence still computes the prefix that this one waits for."""
        if seq.shares_with is None:
            return False
        first, preemptions, tokens = seq.shares_with
        going = first.status is Status.RUNNING and first.preemptions == preemptions and not first.suspect
        if going and first.counts.stored < tokens:
            return True
        seq.shares_with = None
        return False

    def remember(self, seq: Sequence, now: float) -> None:
        """Adds the computed blocks of a running sequence to the tree; pins its prompt for as long as its request
        asks."""
        self._insert(seq)
        if seq.counts.stored >= seq.prompt_len:
            self.stop(seq)
            ttl = seq.request.cache_ttl
            if ttl and not seq.embeds and not self.private(seq.request):
                self._tree.pin(seq.content.namespace, seq.content.prompt, now + ttl)

    def leave(self, seq: Sequence, keeps: bool) -> None:
        """Releases the blocks of the sequence. keeps: whether its computed blocks stay in the prefix cache."""
        self.stop(seq)
        if keeps:
            self._insert(seq)
        seq.blocks.release()
        seq.counts.computed = seq.counts.stored = 0

    def _insert(self, seq: Sequence) -> None:
        """Embeddings take nothing from the tree, and add nothing to it: it would only displace what others use."""
        if seq.counts.stored and not seq.suspect and not seq.embeds:
            if (log := self._tree.log) and log.contents:
                log.name(seq.content.namespace, lambda: scope_of(seq.request))
            ids, priority = seq.content.key(seq.tokens[: seq.counts.stored]), -seq.request.priority
            self._tree.insert(seq.content.namespace, ids, seq.blocks.ids, priority)

    def drop(self, seq: Sequence) -> None:
        """Drops the private namespace of a request whose last sequence has ended."""
        if self.private(seq.request):
            self._tree.drop(seq.content.namespace)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        held = [s for neighbours in self._computing.values() for s in neighbours]
        expected = {s for s in running if s.counts.stored < s.prompt_len and not s.embeds}
        assert set(held) == expected, "a prompt in prefill is lost"


def scope_of(request: Request) -> CacheScope:
    """What the namespace of a request that shares prefixes stands for; see admission.namespace."""
    adapters = [a.name if a.scale == 1.0 else f"{a.name}:{a.scale:g}" for a in request.adapters if not a.start]
    return CacheScope("+".join(adapters), request.cache_salt or "", inputs.scope(request.inputs, ()))
