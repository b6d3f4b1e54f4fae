"""DiskTier: processes that die while they write, and that share a folder."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvasir.kv.tiers import record
from tests.kv._disk import opened, parts, room_for, size_of
from tests.kv._tiers import blocks_of, facts_of, load, payload_of, until

WRITER = """
import sys, time
from pathlib import Path
from kvasir.kv.tiers import disk
from tests.kv._tiers import blocks_of, facts_of, payload_of

write = disk.os.write

def write_some(fd, data):
    time.sleep(0.0005)
    return write(fd, data[:4096])

disk.os.write = write_some  # so slow that a death is nearly always in the middle of a write
facts = facts_of(64_000)
tier = disk.DiskTier(Path(sys.argv[1]), facts, 1 << 30)
tier.wait_scanned(30)
for block in blocks_of(100_000, sys.argv[2].encode()):
    while tier.stats().queued_bytes > 200_000:
        time.sleep(0.001)
    assert tier.save(block, 0, payload_of(block, 0, facts)), tier.stats()
"""


def started(script: str, *args: object) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, args)], stdout=subprocess.PIPE, env=env, text=True)


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=100)
    return out


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_nothing_wrong(folder):
    """After every death: each file that has a part's name is whole and right; the half written ones are gone."""
    facts = facts_of(64_000)
    delays = random.Random(4)
    halves = 0
    for life in range(8):
        process = started(WRITER, folder, f"life {life}")
        until(lambda p=process, n=len(parts(folder)): p.poll() is not None or len(parts(folder)) > n, 60)
        assert process.poll() is None, "the writer ended by itself"
        time.sleep(delays.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        finish(process)
        halves += len(list(folder.glob("tmp-*")))
    found = len(parts(folder))
    with opened(folder, facts, 1 << 30) as tier:
        assert not list(folder.glob("tmp-*"))
        served = 0
        for life in range(8):
            for block in blocks_of(2000, f"life {life}".encode()):
                if tier.has([block.key]):
                    assert load(tier, block) == payload_of(block, 0, facts)
                    served += 1
        assert tier.stats().loads == {"loaded": served}
    assert served == found > 0 and halves > 0


NEIGHBOUR = """
import random, sys, time
from pathlib import Path
from kvasir.kv.tiers.disk import DiskTier
from tests.kv._tiers import blocks_of, facts_of, load, payload_of

folder, seed, rounds, bound = Path(sys.argv[1]), *map(int, sys.argv[2:])
facts, choice = facts_of(8_000), random.Random(seed)
blocks = blocks_of(40)
tier = DiskTier(folder, facts, bound)
assert tier.wait_scanned(30)
for _ in range(rounds):
    block = choice.choice(blocks)
    if choice.random() < 0.5:
        tier.save(block, 0, payload_of(block, 0, facts))
        while tier.stats().queued_bytes > 20_000:
            time.sleep(0.001)
    else:
        assert load(tier, block) in (payload_of(block, 0, facts), "missing")
tier.close(30)
stats = tier.stats()
assert not stats.saves.get("error") and set(stats.loads) <= {"loaded", "missing"}, stats
print(stats.loads["loaded"], stats.saves["saved"], stats.evicted)
"""


def test_two_processes_on_one_folder(folder):
    """Both write, read and evict the same few blocks: neither sees an error nor a wrong byte."""
    bound = room_for(15, facts_of(8_000)) + record.MAX_HEADER
    pair = [started(NEIGHBOUR, folder, seed, 500, bound) for seed in (1, 2)]
    outs = [finish(process) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert all(int(n) > 0 for out in outs for n in out.split())
    with opened(folder, facts_of(8_000), bound) as tier:
        assert tier.stats().num_bytes == size_of(folder) <= bound
