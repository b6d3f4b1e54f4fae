"""Replicas with roles: some compute prompts and first tokens (prefill), others continue the answers (decode).

    client    ---- first tokens ----|---- all others ----
    prefill   prompt, first token --+
    decode              blocks -->  +-- takes the blocks, continues from the journal's row

The request moves like one whose replica is drained: the decode replica gets the ids streamed so far. Its prompt's
blocks are sent there while the prefill replica computes them; what has not arrived is computed. So no answer depends on
where it was computed, and if a replica dies the other kind does its work.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from kvasir.fleet.replica import Replica, Routed
from kvasir.types import Request, Task, Transfer

PREFILL, DECODE = "prefill", "decode"
SEND_SECONDS = 60.0  # for blocks to be sent
WAIT_SECONDS = 10.0  # for which the second replica waits for them


def role(replica: Replica) -> str:
    """The replica's role; "" if it has none, and does everything."""
    return replica.engine.info.role


def able(replicas: Sequence[Replica], entry: Routed) -> list[Replica]:
    """Those of the replicas whose role suits what the request needs next; all if none does."""
    other = DECODE if _starts(entry, replicas) else PREFILL
    fit = [r for r in replicas if role(r) != other]
    if entry.target in fit and other == PREFILL:
        return [r for r in fit if r is entry.target]
    return fit or list(replicas)


def _starts(entry: Routed, replicas: Sequence[Replica]) -> bool:
    """Whether a replica of its own should compute the prompt: nothing is computed yet, the prompt has blocks that may
    leave the replica, and no decode replica is known to have half of them, as of a conversation that it continues."""
    request = entry.request
    if entry.streamed or request.no_cache or request.inputs:
        return False
    length = len(request.prompt_ids)
    there = [r for r in replicas if r.takes]
    if length < max((r.engine.info.block_size for r in there), default=1):
        return False
    return 2 * max((r.predicted(entry) for r in there if role(r) == DECODE), default=0) < length


def routed(replica: Replica, entry: Routed, request: Request, replicas: Sequence[Replica]) -> Request:
    """The request as the replica gets it: with where the blocks of its prompt go to, or come from."""
    transfer, entry.transfer = entry.transfer, None
    if transfer and replica is entry.target:
        return replace(request, takes=Transfer(transfer.id, seconds=WAIT_SECONDS))
    entry.target = None
    if role(replica) != PREFILL or not _starts(entry, replicas) or not _continues(request):
        return request
    targets = [r for r in replicas if r.takes and role(r) == DECODE and r.engine.info.transfers_at]
    if not targets:
        return request
    entry.target = min(targets, key=lambda r: (r.held, r.index))
    address = entry.target.engine.info.transfers_at
    entry.transfer = Transfer(secrets.token_hex(16), address, SEND_SECONDS)
    return replace(request, sends=entry.transfer)


def _continues(request: Request) -> bool:
    """Whether there may be more than a first token."""
    return request.task is Task.GENERATE and request.params.max_tokens != 1


def hands_over(replica: Replica, entry: Routed, replicas: Sequence[Replica]) -> bool:
    """Whether a request should leave a prefill replica now: each of its choices has a token, and another replica
    continues them."""
    if entry.moving or role(replica) != PREFILL or not entry.open or not _continues(entry.request):
        return False
    return all(entry.streamed.get(i) for i in entry.open) and any(r.takes and role(r) != PREFILL for r in replicas)


def received(replica: Replica, entry: Routed) -> int:
    """Leading tokens of the request that are sent to the replica."""
    return len(entry.request.prompt_ids) if entry.transfer and replica is entry.target else 0
