"""Measures one match, insert and eviction in a full prefix tree.

    python benchmarks/prefix_tree.py
    python benchmarks/prefix_tree.py --blocks 100000 --window 1024

Prompts have 1k to 12k tokens: some begin a conversation with one of a few system prompts, the others continue an
earlier conversation. Each is matched, gets its blocks (evicting others if necessary), is inserted and ends, as in a
server; the pool is several times smaller than all prompts together. The script prints medians and 99th percentiles in
microseconds:

match     one prompt
insert    the part of one prompt after its hit
evict 1   one block
evict     one block, if all missing blocks of a prompt are evicted in one call
held      sharing the blocks of a hit, and releasing the blocks of a prompt that ends, in the pool alone
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvasir.caches import PagedKV, attention
from kvasir.kv.policy import POLICIES
from kvasir.kv.pool import BlockPool
from kvasir.kv.radix import PrefixTree
from kvasir.plan import CacheGroup, pack_ids

Times = dict[str, list[float]]


def timed(times: Times, name: str, call: Callable[[], Any], per: int = 1) -> Any:
    start = time.perf_counter()
    result = call()
    times.setdefault(name, []).append((time.perf_counter() - start) / per * 1e6)
    return result


def prompts(rng: random.Random, num_prompts: int):
    """Token ids: half of the prompts continue a conversation, half begin one with one of eight system prompts."""
    systems = [rng.choices(range(150_000), k=rng.randint(200, 900)) for _ in range(8)]
    talks: list[list[int]] = []
    for _ in range(num_prompts):
        if talks and rng.random() < 0.5:
            text = talks.pop(rng.randrange(len(talks)))
            text = text + rng.choices(range(150_000), k=rng.randint(50, 2000))
        else:
            text = rng.choice(systems) + rng.choices(range(150_000), k=rng.randint(800, 11_000))
        text = text[:12_000]
        talks = [*talks[-60:], text]
        yield text


def serve(tree: PrefixTree, ids: bytes, block_size: int, times: Times) -> None:
    tokens = len(ids) // 4
    hit = timed(times, "match", lambda: tree.match(b"bench", ids, tokens - 1))
    tree.use(hit)
    tables = []
    for pool, blocks in zip(tree.pools, hit.blocks, strict=True):
        timed(times, "held", lambda pool=pool, blocks=blocks: pool.share(b for b in blocks if b))
        tables.append(blocks[: hit.tokens // block_size])  # a partly filled last block is copied
        pool.release(b for b in blocks[hit.tokens // block_size :] if b)
    for g, (pool, table) in enumerate(zip(tree.pools, tables, strict=True)):
        missing = -(-tokens // block_size) - len(table)
        if pool.free < missing and pool.idle:
            timed(times, "evict 1", lambda g=g: tree.evict(g, 1))
        lacking = missing - pool.free
        if lacking > 0:
            timed(times, "evict", lambda g=g, n=lacking: tree.evict(g, n), per=lacking)
        table += pool.take(missing)
    timed(times, "insert", lambda: tree.insert(b"bench", ids, tables))
    for pool, table in zip(tree.pools, tables, strict=True):
        timed(times, "held", lambda pool=pool, table=table: pool.release(b for b in table if b))


def measure(num_blocks: int, block_size: int, window: int, policy: str, seed: int) -> tuple[Times, PrefixTree]:
    groups = [CacheGroup(PagedKV(), (0,), 1)] + [CacheGroup(attention(1, 1, window), (1,), 1)] * (window > 0)
    pools = [BlockPool(num_blocks + 1) for _ in groups]
    tree = PrefixTree(pools, groups, block_size, POLICIES[policy])
    num_prompts = max(300, 4 * num_blocks * block_size // 6000)
    times: Times = {}
    for i, text in enumerate(prompts(random.Random(seed), num_prompts)):
        if i == num_prompts // 2:  # the tree is full
            times = {}
        serve(tree, pack_ids(text), block_size, times)
    tree.check([[] for _ in groups])
    return times, tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000], help="blocks of each pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens")
    parser.add_argument("--window", type=int, default=0, help="tokens of an additional window group; 0: none")
    parser.add_argument("--policy", choices=POLICIES, default="lru")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for num_blocks in args.blocks:
        times, tree = measure(num_blocks, args.block_size, args.window, args.policy, args.seed)
        stats = tree.stats()
        print(f"{num_blocks} blocks, {stats.nodes} nodes, {stats.hits} hits of {stats.hit_tokens} tokens")
        for name in ("match", "insert", "evict 1", "evict", "held"):
            row = sorted(times.get(name, [0.0]))
            print(f"  {name:8} {statistics.median(row):8.1f} µs    p99 {row[len(row) * 99 // 100]:8.1f} µs")


if __name__ == "__main__":
    main()
