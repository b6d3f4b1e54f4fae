"""Adapters that change experts, tables, norms, whole matrices and rows of tokens: against the eager executor, and the
same bits alone, beside other adapters, in pieces, by any number of threads and on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

torch = pytest.importorskip("torch")

from kvasir.lora import Adapter  # noqa: E402
from kvasir.ops import native as door  # noqa: E402
from kvasir.plan import Adapted  # noqa: E402
from tests.layers.adapted import adapters_of, set_adapter  # noqa: E402
from tests.layers.parts import Part, batch_of  # noqa: E402
from tests.lora.kinds import everything  # noqa: E402
from tests.models.driver import make_cache  # noqa: E402
from tests.program.made import Company, bits, loaded, only, program_of  # noqa: E402
from tests.program.test_adapters import IDS, OTHER, eager_of  # noqa: E402

FEW = ("llama", "gemma3", "gpt2", "qwen3-moe", "gpt-oss", "llama4", "nemotron-h-latent")


@pytest.fixture(scope="module", params=only(*FEW, but="bert"))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, loaded(request.param, folder)


def with_adapters(model, change=lambda adapter: adapter, **options):
    program = program_of(model, blocks=40, fill=np.nan, **options)
    for id in (1, 2):
        adapter = change(everything(model.model, id))
        assert not program.lacks(adapter)
        program.set_adapter(id, program.pack_adapter(adapter))
    return program


def results(program, company: Company, *works) -> list[np.ndarray]:
    """Hidden rows of works, then their logits."""
    hidden = company.step(*works)
    ends = np.cumsum([0, *(len(rows) for rows in hidden)])
    if not program.vocab:
        return hidden
    rows = range(ends[-1])
    logits = np.concatenate([program.logits_of(rows[i : i + 32]).copy() for i in range(0, ends[-1], 32)])
    return [np.concatenate([h, logits[a:b]], 1) for h, a, b in zip(hidden, ends[:-1], ends[1:], strict=True)]


def eager_results(model, ids: list[int], adapters: list[tuple[int, float]]) -> np.ndarray:
    cache = make_cache(model, blocks=9)
    batch = batch_of([Part(ids, 0, (np.arange(1, 9, dtype=np.int32),) * len(cache.groups))], cache)
    rows = [tuple(adapters)] * len(ids)
    with torch.inference_mode(), adapters_of(model).use(rows):
        hidden = model.forward(batch.tokens_T, batch)[: len(ids)]
        if getattr(model, "head", None) is None:
            return hidden.numpy()
        return torch.cat([hidden, model.logits(hidden)], 1).numpy()


@pytest.mark.few(len(FEW))
def test_both_executors_agree(case):
    folder, model = case
    eager = eager_of(folder)
    for id in (1, 2):
        set_adapter(eager, id, everything(model.model, id))
    program = with_adapters(model, rows=64)
    given = [(2, 1.0), (1, -0.5)]
    (found,) = results(program, Company(program, [IDS], [[Adapted(*one) for one in given]]), (0, 0, len(IDS)))
    expected = eager_results(eager, IDS, given)
    unchanged = eager_results(eager, IDS, [])
    spread = np.abs(expected).max()
    assert np.abs(unchanged - expected).max() > 0.05 * spread
    assert np.abs(found - expected).max() < 2e-4 * spread


@pytest.mark.few(3 * len(FEW))
@pytest.mark.parametrize("isa", door.ISAS)
def test_rows_have_the_same_bits_alone_and_batched(case, isa):
    check_bits(case[1], isa)


@pytest.mark.few(4)
@pytest.mark.parametrize("format", ["bfloat16", "q8", "q4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3"])
def test_in_other_formats(tmp_path, kind, format):
    """An adapter of 16 bits over weights of 16, 8 and 4 bits."""
    how = {"quantize": format} if format.startswith("q") else {"dtype": format}
    model = loaded(kind, tmp_path, **how)
    check_bits(model, door.ISAS[-1], narrow)


def narrow(adapter: Adapter) -> Adapter:
    """Its matrices in bfloat16, its other arrays in float16."""
    half = {name: array.astype(np.float16) for name, array in adapter.saved.items()}
    rows = {path: replace(some, rows=some.rows.astype(np.float16)) for path, some in adapter.tokens.items()}
    matrices, tables = (
        {name: replace(c, a=c.a.astype(bfloat16), b=c.b.astype(bfloat16), scale=0.5) for name, c in changes.items()}
        for changes in (adapter.matrices, adapter.tables)
    )
    return replace(adapter, matrices=matrices, tables=tables, saved=half, tokens=rows)


def check_bits(model, isa: str, change=lambda adapter: adapter) -> None:
    mine = [Adapted(2, 0.5), Adapted(1, 1.0, 17)]
    alone = with_adapters(model, change)
    (expected,) = results(alone, Company(alone, [IDS], [mine]), (0, 0, len(IDS)))
    try:
        door.force_isa(isa)
    except Exception as error:
        pytest.skip(str(error))
    try:
        program = with_adapters(model, change, threads=2)
        company = Company(program, [OTHER, OTHER, IDS], [1, 0, mine])
        parts, start = [], 0
        for count in (1, 20, 2, len(IDS) - 23):
            order = [(2, start, count), (0, 0, 7), (1, 0, 3)]
            order = order if start % 2 else order[::-1]
            parts.append(results(program, company, *order)[order.index((2, start, count))])
            start += count
        assert np.array_equal(bits(np.concatenate(parts)), bits(expected))
        plain = program_of(model)
        (base,) = results(plain, Company(plain, [OTHER]), (0, 0, 3))
        order = [(0, 0, 7), (1, 0, 3)]
        assert np.array_equal(bits(results(program, company, *order)[1]), bits(base))
    finally:
        door.force_isa(None)
