"""Programs of several models over one pool of blocks: each computes what it computes alone, a model can read another's
keys and values, and layers of one model can share them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.caches import Cross, PagedKV, Shared, Window
from kvasir.errors import ConfigError, UnsupportedModel
from kvasir.layers.kv_layout import KVLayout, no_op
from kvasir.ops import native
from kvasir.ops.attention import paged_attention
from kvasir.ops.attention.native import Layout as Tiles
from kvasir.ops.attention.native import attention
from kvasir.plan import Work
from kvasir.program.cache import NativeCache, cache_groups, no_kernel
from kvasir.program.native import MAX_GROUPS
from kvasir.program.program import Program
from kvasir.program.trace import trace
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.kv.chunked import Chunked
from tests.program.made import Driver, bits, loaded, program_of

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
IDS = [(7 * i + 3) % 290 for i in range(70)]


def programs(folder, *kinds: str) -> tuple[dict[str, Program], NativeCache]:
    """A program of each model, over one cache."""
    models = {kind: loaded(kind, folder) for kind in kinds}
    layout = KVLayout({kind: model.model.cache_spec() for kind, model in models.items()})
    cache = NativeCache(layout, [20] * len(layout.groups), 16, "float32")
    cache.fill_(float("nan"))
    made = {kind: over(model.trace, cache.of(kind)) for kind, model in models.items()}
    return made, cache


def over(traced, cache: NativeCache) -> Program:
    return Program(traced, cache, max_tokens=128, max_rows=8, max_positions=512, threads=1)


@pytest.mark.parametrize("kinds", [("llama", "qwen3"), ("gemma3", "llama"), ("mistral", "gemma3")])
def test_models_in_one_pool_give_the_same_bits_as_alone(tmp_path, kinds):
    """In turns, chunk by chunk, with the same blocks: a draft model and its target."""
    (tmp_path / "alone").mkdir()
    together, cache = programs(tmp_path, *kinds)
    drivers = {kind: Driver(program, IDS) for kind, program in together.items()}
    found = {kind: [] for kind in kinds}
    for start, count in ((0, 33), (33, 1), (34, 36)):
        for kind in kinds:
            found[kind].append(drivers[kind].hidden(start, count))
    for kind in kinds:
        alone = Driver(program_of(loaded(kind, tmp_path / "alone"), fill=float("nan")), IDS).hidden(0, len(IDS))
        assert np.array_equal(bits(np.concatenate(found[kind])), bits(alone))
    sizes = zip(cache.groups, cache.num_blocks, strict=True)
    assert sum(t.nbytes for t in cache.tensors) == sum(group.bytes_per_block * n for group, n in sizes)
    assert {group.kind.name for group in cache.groups} <= {"full", "window"}, "tables are shared by reach alone"


class Toy:
    """A forward over the parts of a target model, without its own weights."""

    def __init__(self, target, *spec):
        self.target, self.spec = target, spec

    def cache_spec(self):
        return self.spec

    def walk(self):
        return iter(())

    def queries(self, tokens_T):
        return self.target.embed(tokens_T).view(-1, 4, 16)


class Queries(Toy):
    def forward(self, tokens_T, batch):
        return self.queries(tokens_T).flatten(1)


class Reader(Toy):
    """Attention of the tokens' embeddings over a layer of the target, as an assistant reads its target's cache."""

    def forward(self, tokens_T, batch):
        plan = batch.attention(0, 2)
        return paged_attention(self.queries(tokens_T), batch.kv.k(0), batch.kv.v(0), plan, 0.25).flatten(1)


class Writer(Reader):
    def forward(self, tokens_T, batch):
        q_THd = self.queries(tokens_T)
        batch.store(0, q_THd, q_THd)
        return super().forward(tokens_T, batch)


def test_a_program_reads_the_cache_of_another_model(tmp_path):
    """What attention gives over the bytes that the target wrote, bit by bit; they stay as they are, and cost nothing
    twice."""
    target = loaded("llama", tmp_path)
    reader, queries = Reader(target.model, Shared(1, "target")), Queries(target.model, Shared(0, "target"))
    specs = {"target": target.model.cache_spec(), "reader": reader.spec, "queries": queries.spec}
    assert cache_groups(KVLayout(specs), 16, "float32") == cache_groups(specs["target"], 16, "float32")
    cache = NativeCache(KVLayout(specs), [20], 16, "float32")
    cache.fill_(float("nan"))
    traces = {"target": target.trace, "reader": trace(reader), "queries": trace(queries)}
    first, second, third = (Driver(over(traced, cache.of(name)), IDS) for name, traced in traces.items())
    for start, count in ((0, 40), (40, 30)):
        first.hidden(start, count)
        before = [array.copy() for array in cache.tensors]
        seen, q_TD = second.hidden(start, count), third.hidden(start, count)
        assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(before, cache.tensors, strict=True))
        table = np.arange(1, 20, dtype=np.int32)
        q_THd = torch.from_numpy(q_TD).view(-1, 4, 16)
        bytes_of_layer = torch.from_numpy(cache.tensors[0][1]).view(torch.uint8)
        expected = attention(
            Tiles("float32", 2, 16, 16), bytes_of_layer, q_THd, [Work(0, start, count)], [0], [table], 0.25
        )
        assert np.array_equal(bits(seen), bits(expected.reshape(len(expected), -1)))


def test_a_program_does_not_write_to_the_cache_of_another(tmp_path):
    target = loaded("llama", tmp_path)
    writer = Writer(target.model, Shared(1, "target"))
    layout = KVLayout({"target": target.model.cache_spec(), "writer": writer.spec})
    with pytest.raises(AssertionError, match="another"):
        over(trace(writer), NativeCache(layout, [20], 16, "float32").of("writer"))


class Twice(Toy):
    """Layer 1 attends to the keys and values of layer 0, or stores the same once more."""

    def forward(self, tokens_T, batch):
        q_THd = self.queries(tokens_T)
        batch.store(0, q_THd, q_THd)
        if self.spec[1].owns:
            batch.store(1, q_THd, q_THd)
        plan = batch.attention(1, 1)
        return paged_attention(q_THd, batch.kv.k(1), batch.kv.v(1), plan, 0.25).flatten(1)


def test_a_sharing_layer_reads_the_owners_keys_and_values(tmp_path):
    target, kind, found = loaded("llama", tmp_path), PagedKV(4, 16), []
    for spec in ((kind, Shared(0)), (kind, kind)):
        cache = NativeCache(spec, [20], 16, "float32")
        cache.fill_(float("nan"))
        driver = Driver(over(trace(Twice(target.model, *spec)), cache), IDS)
        found.append(np.concatenate([driver.hidden(0, 33), driver.hidden(33, 37)]))
        assert cache.groups[0].bytes_per_block == 2 * 4 * 16 * 4 * 16 * (1 if spec[1] != kind else 2)
    assert np.array_equal(bits(found[0]), bits(found[1]))


def test_heads_of_several_sizes_in_one_table(tmp_path):
    """A layer's blocks hold what its own heads need, whatever its neighbours have."""
    target, found = loaded("llama", tmp_path), {}
    for others in ((), (PagedKV(1, 32),), (PagedKV(2, 8), PagedKV(8, 64))):
        spec = (*others, PagedKV(4, 16))
        cache = NativeCache((*spec, Shared(len(others))), [20], 16, "float32")
        assert len(cache.groups) == 1 and len(cache.banks) == len(spec)
        assert sum(t.nbytes for t in cache.tensors) == 20 * cache.groups[0].bytes_per_block

        class Last(Toy):
            def forward(self, tokens_T, batch, layer=len(others)):
                q_THd = self.queries(tokens_T)
                batch.store(layer, q_THd, q_THd)
                plan = batch.attention(layer, 1)
                return paged_attention(q_THd, batch.kv.k(layer), batch.kv.v(layer), plan, 0.25).flatten(1)

        cache.fill_(float("nan"))
        driver = Driver(over(trace(Last(target.model, *spec)), cache), IDS)
        found[len(others)] = driver.hidden(0, 70)
        for block in (1, 5):
            data = cache.export(0, block)
            cache.import_(0, 9, data)
            assert bytes(cache.export(0, 9)) == bytes(data)
    assert np.array_equal(bits(found[0]), bits(found[1])) and np.array_equal(bits(found[0]), bits(found[2]))


@pytest.mark.parametrize(
    ("kind", "program", "eager"),
    [
        (Cross(2, 16, length=5), "kernel for cross-", "cross-"),
        (Chunked(2, 16, chunk=8), "kernel for chunked", "chunked"),
        (PagedKV(2, 1026), "heads of 1026", ""),
        (PagedKV(2, 16, 1026), "values of 1026", ""),
    ],
)
def test_executors_refuse_unsupported_cache_kinds_by_name(tmp_path, monkeypatch, kind, program, eager):
    """Before anything is loaded, and in the memory itself."""
    assert program in no_kernel((kind,)) and eager in no_op((kind,)) and bool(eager) == bool(no_op((kind,)))
    with pytest.raises(ValueError, match=program):
        NativeCache((kind,), [4], 16, "float32")
    folder = random_model("llama", tmp_path)
    monkeypatch.setattr("kvasir.models.llama.Llama.cache_spec", lambda self: (kind,) * self.config.num_layers)
    with pytest.raises(ConfigError, match=program):
        load_model(find_model(folder), options=LoadOptions("program"))
    if eager:
        with pytest.raises(UnsupportedModel, match=eager):
            load_model(find_model(folder), options=LoadOptions("auto"))


def test_the_kernels_have_room_for_so_many_tables():
    spec = [Window(1, 16, window=10 * i) for i in range(1, MAX_GROUPS + 2)]
    assert no_kernel(spec[:-1]) == "" and f"not {MAX_GROUPS + 1}" in no_kernel(spec)
