"""Blocks that come and go beside the computing: a step saves what the pool held before it, however late that lands."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from kvasir.resolve import resolve
from kvasir.runner.blocks import StagedBlocks, wait_all
from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, poison, same, together

torch = pytest.importorskip("torch")


class Late:
    """Copies as on a GPU, except that each completes some time later, in a separate thread."""

    def __init__(self):
        self.reads = self.writes = 0
        self.closed = False

    def read(self, source):
        self.reads += 1
        found, future = source.clone(memory_format=torch.contiguous_format), Future()
        data = found.flatten().view(torch.uint8).numpy().data.toreadonly()
        threading.Timer(0.002 * (self.reads % 3), future.set_result, (data,)).start()
        return future

    def write(self, target, data):
        self.writes += 1
        target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype).view(target.shape))

    def close(self):
        self.closed = True


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3-next", marks=pytest.mark.slow)])
def test_late_transfers_change_no_answer(tmp_path, monkeypatch, model):
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    options = {"executor": "eager", "dtype": "float32", "block_size": 16, "threads": 1}
    folder, requests = random_model(model, tmp_path), mixed_requests(300, 200, longest=150)
    expected = plain(core_of(folder, num_blocks=40, **options), requests)
    late = Late()
    monkeypatch.setattr("kvasir.engine.build.resolve", lambda *facts: replace(resolve(*facts), cache_host=64 << 20))
    monkeypatch.setattr("kvasir.runner.make_eager.copier", lambda device, max_bytes: late)
    core = core_of(folder, num_blocks=20, max_num_seqs=6, overlap=True, **options)
    for turn in range(2):
        same(expected, together(core, requests, seed=turn, preempt=0.1))
    assert late.reads > 30 and late.writes > 5
    assert set(core.stats().tier_loads) == {"loaded"}
    core.runner.close()
    assert late.closed


def test_copied_bytes_are_a_snapshot_and_equal_for_both_copiers(tmp_path):
    core = core_of(random_model("mistral", tmp_path), executor="eager", dtype="bfloat16", block_size=16, num_blocks=9)
    cache, staged = core.runner.cache, StagedBlocks(core.runner.cache, Late())
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    direct = [cache.export(0, block) for block in range(9)]
    exports = [staged.export(0, block) for block in range(9)]
    poison(core, [set(range(9))])
    assert list(wait_all(exports)) == direct
    for block in range(9):
        staged.import_(0, block, direct[8 - block])
    assert [cache.export(0, block) for block in range(9)] == direct[::-1]
