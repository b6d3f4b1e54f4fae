"""Host memory below a GPU's pool: copies in the background keep the bytes, and an engine continues from them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvasir.device.copies import MOST_SLOTS, Copier  # noqa: E402
from kvasir.runner.blocks import StagedBlocks, wait_all  # noqa: E402
from tests.engine.cores import core_of, random_model  # noqa: E402
from tests.oracle import mixed_requests, plain, same, together  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20, 40 << 20])
def test_reads_are_snapshots_and_writes_are_visible_to_later_kernels(num_bytes):
    """More copies than there are slots, of parts that do not lie in one piece, which are overwritten at once."""
    copier, count = Copier(num_bytes), MOST_SLOTS + 5 if num_bytes < 1 << 25 else 5
    pool = torch.randn(4, count, num_bytes // 16, device="cuda")
    wanted = pool.cpu().clone()
    reads = [copier.read(pool[:, i]) for i in range(count)]
    pool.fill_(float("nan"))
    found = [read.result() for read in reads]
    for i, data in enumerate(found):
        assert data.readonly and bytes(data) == wanted[:, i].contiguous().numpy().tobytes()
    for i, data in enumerate(found):
        copier.write(pool[:, count - 1 - i], data)
        again = copier.read(pool[:, count - 1 - i])
        pool[:, i] += 0.0  # queued after the copy
        assert bytes(again.result()) == bytes(data)
    assert torch.equal(pool.cpu(), wanted.flip(1))
    copier.close()


def test_staged_blocks_are_those_of_the_cache(tmp_path):
    core = core_of(random_model("qwen3-next", tmp_path), device="cuda", dtype="bfloat16", block_size=16, num_blocks=9)
    cache = core.runner.cache
    staged = StagedBlocks(cache, Copier(max(g.bytes_per_block for g in cache.groups)))
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    for group in range(len(cache.groups)):
        direct = [cache.export(group, block) for block in range(9)]
        assert list(wait_all([staged.export(group, block) for block in range(9)])) == direct
        for block in range(9):
            staged.import_(group, block, direct[8 - block])
        assert [cache.export(group, block) for block in range(9)] == direct[::-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen3-next"])
def test_an_engine_resumes_from_host_memory(tmp_path, monkeypatch, model, overlap):
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    made = tmp_path / "model"
    made.mkdir()
    folder, options = random_model(model, made), {"device": "cuda", "dtype": "float32", "block_size": 16}
    core = core_of(folder, num_blocks=40, max_num_seqs=1, cache_host=0, **options)
    requests = mixed_requests(300, 200, longest=150)
    expected = plain(core, requests)
    more = {"cache_host": 64 << 20, "cache_dir": str(tmp_path / "kv"), "overlap": overlap}
    core = core_of(folder, num_blocks=20, max_num_seqs=6, **more, **options)
    assert any(line.startswith("host ") for line in core.summary)
    for turn in range(3):
        got = together(core, requests, seed=turn, preempt=0.1)
        if core.info.grade == "exact":
            same(expected, got)
    tiers = core.stats().tiers
    assert tiers["host"].loads["loaded"] > 20 and set(core.stats().tier_loads) == {"loaded"}
    core.close(30.0)
    assert core.stats().tiers["disk"].saves["saved"] > 10
