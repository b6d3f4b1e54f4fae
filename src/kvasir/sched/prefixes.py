"""Prefixes: what sequences take from the prefix tree and leave there, and whose prompts are being computed just now."""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.kv.node import common
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.sched.sequence import Sequence
from kvasir.types import Request


class Prefixes:
    """shared: whether requests share what they begin with; the answers of one request always do."""

    def __init__(self, tree: PrefixTree, shared: bool):
        self._tree = tree
        self._shared = shared

    def private(self, request: Request) -> bool:
        return request.no_cache or not self._shared

    def find(self, seq: Sequence) -> Hit | None:
        """What the tree holds of a waiting sequence. One token at least is left to compute, for its logits."""
        limit = seq.known - 1
        if limit < 1 or seq.in_flight or seq.suspect or seq.needs_prompt_rows:
            return None
        hit = self._tree.match(seq.namespace, seq.tokens.tobytes(), limit)
        return hit if hit.tokens else None

    def coming(self, seq: Sequence, running: Iterable[Sequence]) -> int:
        """Leading tokens that a running sequence computes already and that this one could take from it."""
        if seq.suspect or seq.needs_prompt_rows:
            return 0
        most = 0
        for other in running:
            if other.stored < other.prompt_len and other.namespace == seq.namespace and not other.suspect:
                most = max(most, common(other.packed_prompt, seq.packed_prompt))
        return min(most, seq.known - 1)

    def remember(self, seq: Sequence) -> None:
        """Leaves what the sequence has computed to the tree, too."""
        if seq.stored and not seq.suspect:
            ids, priority = seq.tokens[: seq.stored].tobytes(), -seq.request.priority
            self._tree.insert(seq.namespace, ids, seq.blocks.ids, priority)

    def pin(self, seq: Sequence, now: float) -> None:
        """Keeps the prompt for as long as its request asks, once it is computed."""
        ttl = seq.request.cache_ttl
        if ttl and seq.stored >= seq.prompt_len and not self.private(seq.request):
            self._tree.pin(seq.namespace, seq.packed_prompt, now + ttl)

    def drop(self, seq: Sequence) -> None:
        """The last answer of its request has ended: what was theirs alone is of no use to anybody."""
        if self.private(seq.request):
            self._tree.drop(seq.namespace)
