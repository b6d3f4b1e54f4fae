"""Low-rank adapters: against the same weights merged, in company of others, in pieces, by any number of threads."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.layers.adapters import slots  # noqa: E402
from kvasir.layers.tensors import TensorPlace  # noqa: E402
from kvasir.ops import native as door  # noqa: E402
from kvasir.plan import Adapted, Capacity, Join, SamplingSpec, StepPlan, Work, pack_ids  # noqa: E402
from kvasir.program import native  # noqa: E402
from kvasir.runner.eager_executor import EagerExecutor  # noqa: E402
from kvasir.runner.load import load_model  # noqa: E402
from kvasir.runner.program_executor import ProgramExecutor  # noqa: E402
from kvasir.runner.runner import Runner  # noqa: E402
from kvasir.types import ModelInfo  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine import cores  # noqa: E402
from tests.layers.adapted import in_use, set_adapter  # noqa: E402
from tests.layers.parts import Part, batch_of  # noqa: E402
from tests.lora.adapters import change, give  # noqa: E402
from tests.models.driver import make_cache  # noqa: E402
from tests.program.made import Company, bits, loaded, only, program_of, random_model  # noqa: E402

IDS = [(13 * i * i + 7 * i + 3) % 300 for i in range(50)]
OTHER = [(5 * i * i + 3 * i + 8) % 300 for i in range(50)]
AGREE = 2e-5
SLOTS = ("llama", "gpt2", "mixtral", "qwen3-next", "granite-hybrid", "deepseek-v2")  # each has slots of its own


def made(model, seed: int, rank: int, only: str = "") -> dict:
    """A random adapter for every slot, or for those whose name has `only` in it."""
    rng, pairs = np.random.default_rng(seed), {}
    for slot, (linear, part) in slots(model).items():
        if only in slot:
            a = rng.standard_normal((rank, linear.inputs), np.float32) * linear.inputs**-0.5
            pairs[slot] = a, rng.standard_normal((linear.outputs[part], rank), np.float32) * rank**-0.5, 0.3
    assert pairs
    return pairs


def merge(model, pairs: dict) -> None:
    """Adds scale * B A to the weights themselves."""
    for slot, (linear, part) in slots(model).items():
        if slot in pairs:
            a, b, scale = pairs[slot]
            weight = linear.weights[part].transpose(0, 1).reshape(linear.outputs[part], linear.inputs)
            linear.weights[part] = TensorPlace().segmented(weight + scale * torch.from_numpy(b @ a), linear.segments)


def eager_hidden(model, sequences, adapters) -> list[np.ndarray]:
    """The last hidden rows of sequences that are computed together."""
    cache = make_cache(model, blocks=8 * len(sequences) + 1)
    blocks = [(np.arange(1 + 8 * i, 9 + 8 * i, dtype=np.int32),) for i in range(len(sequences))]
    pieces = [Part(ids, 0, table * len(cache.groups)) for ids, table in zip(sequences, blocks, strict=True)]
    batch = batch_of(pieces, cache)
    with torch.inference_mode(), in_use(model, batch, adapters):
        rows = model.forward(batch.tokens_T, batch).numpy()
    return [rows[a:b].copy() for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def eager_of(folder):
    return load_model(find_model(str(folder)), "float32").model


@pytest.fixture(scope="module", params=only(*SLOTS, "phi3", "gemma2", "gemma3n", "gemma4", "lfm2", but="bert"))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, loaded(request.param, folder)


@pytest.mark.few(4)
def test_agree_with_merged_weights(case):
    """Program and eager, rows of two adapters and of none in one step. A state whose eigenvalues are near -1 keeps
    what roundings change in it."""
    folder, model = case
    plain, one, two = eager_of(folder), eager_of(folder), eager_of(folder)
    part = "mlp" if "Moe" not in model.architecture else "qkv"
    agree = {"OlmoHybrid": 5, "Jamba": 10, "Zamba2": 200}.get(model.architecture, 1) * AGREE
    pairs = {1: made(plain, 1, 4), 2: made(plain, 2, 20, part if any(part in slot for slot in slots(plain)) else "out")}
    if model.architecture == "Mixtral":
        pairs[2] = made(plain, 2, 20, "router")
    merge(one, pairs[1])
    merge(two, pairs[2])
    sequences, ids = [IDS, OTHER, IDS, OTHER[:20]], [1, 0, 2, 1]
    expected = [eager_hidden(m, [s], [0])[0] for m, s in zip((one, plain, two, one), sequences, strict=True)]
    (unchanged,) = eager_hidden(plain, [IDS], [0])
    assert min(difference(expected[i], unchanged) for i in (0, 2)) > 1000 * AGREE
    program = program_of(model, blocks=40, rows=256, fill=np.nan)
    for adapter, its in pairs.items():
        change(program, adapter, its)
        set_adapter(plain, adapter, its)
    company = Company(program, sequences, ids)
    found = company.step(*((i, 0, len(s)) for i, s in enumerate(sequences)))
    for theirs in (found, eager_hidden(plain, sequences, ids)):
        for mine, right in zip(theirs, expected, strict=True):
            assert difference(mine, right) < agree


def pieces_of(program, adapters=(1, 0, 2)) -> np.ndarray:
    """The rows of IDS, in chunks, with neighbours before and after them."""
    company, parts, start = Company(program, [OTHER, OTHER, IDS], adapters), [], 0
    for count in (1, 20, 2, len(IDS) - 23):
        order = [(2, start, count), (0, 0, 7), (1, 0, 3)]
        order = order if start % 2 else order[::-1]
        parts.append(company.step(*order)[order.index((2, start, count))])
        start += count
    return np.concatenate(parts)


@pytest.mark.few(12)
@pytest.mark.parametrize("isa", door.ISAS)
def test_rows_have_the_same_bits_alone_and_batched(case, isa):
    _, model = case
    pairs = {1: made(model.model, 1, 40, "out"), 2: made(model.model, 2, 3)}
    alone = program_of(model)
    change(alone, 2, pairs[2])
    (expected,) = Company(alone, [IDS], [2]).step((0, 0, len(IDS)))
    try:
        door.force_isa(isa)
    except Exception as error:
        pytest.skip(str(error))
    try:
        program = program_of(model, threads=2, blocks=40, fill=np.nan)
        for adapter, its in pairs.items():
            change(program, adapter, its)
        assert np.array_equal(bits(pieces_of(program)), bits(expected))
    finally:
        door.force_isa(None)


def test_rows_without_one_keep_their_bits(case):
    _, model = case
    plain, program = program_of(model), program_of(model, threads=2, blocks=40, fill=np.nan)
    change(program, 1, made(model.model, 1, 16))
    (expected,) = Company(plain, [IDS]).step((0, 0, len(IDS)))
    assert np.array_equal(bits(pieces_of(program, (1, 0, 0))), bits(expected))
    assert np.array_equal(bits(pieces_of(program, (0, 1, 0))), bits(expected))
    assert program.struct.adapted == 3
    assert not np.array_equal(pieces_of(program, (0, 0, 1)), expected)
    Company(program, [IDS]).step((0, 0, 5))
    assert program.struct.adapted == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", only(*SLOTS, but="bert"))
def test_eager_rows_have_the_same_bits_alone_and_batched(kind, tmp_path):
    model = eager_of(random_model(kind, tmp_path))
    (plain,) = eager_hidden(model, [IDS], [0])
    set_adapter(model, 1, made(model, 1, 16))
    set_adapter(model, 2, made(model, 2, 3))
    (alone,) = eager_hidden(model, [IDS], [2])
    found = eager_hidden(model, [OTHER[:9], IDS, OTHER, IDS], [1, 2, 0, 0])
    assert np.array_equal(bits(found[1]), bits(alone)) and np.array_equal(bits(found[3]), bits(plain))
    set_adapter(model, 2, {})
    assert np.array_equal(bits(eager_hidden(model, [IDS], [2])[0]), bits(plain))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "q8"}, {"quantize": "q4"}], ids=str)
def test_rows_stay_float32_for_adapters(tmp_path, options):
    """Whatever the weights are and whatever rows are turned into for them: what the first adapted product gains is
    scale * B (A x) of float32 rows."""
    model = loaded("llama", tmp_path, **options)
    slot = "layers.0.attn.qkv.v"
    (a, b, scale) = made(model.model, 1, 8, slot)[slot]
    program = program_of(model, threads=2)
    instructions = program.lowered.instructions
    at = next(i for i, s in enumerate(instructions) if s.op == "linear")
    assert instructions[at].products[2][0].slot.name == slot
    company = Company(program, [IDS], [1])
    program.struct.count = program.struct.chosen_from = at + 1  # no further: buffers are shared
    rows = len(IDS)
    change(program, 1, {slot: (a, b, 0.0)})
    company.step((0, 0, rows))
    x, out = instructions[at].buffers[0], instructions[at].products[2][2]
    x_TD, before = program.memory.view(x, rows).copy(), program.memory.view(out, rows).copy()
    change(program, 1, {slot: (a, b, scale)})
    company.step((0, 0, rows))
    gained = program.memory.view(out, rows) - before
    expected = scale * (x_TD.astype(np.float64) @ a.T.astype(np.float64)) @ b.T
    assert np.abs(gained - expected).max() < 3e-6 * max(np.abs(before).max(), np.abs(expected).max())
    assert np.abs(expected).max() > 0.1


def test_widths_that_fill_no_cache_line(tmp_path, monkeypatch):
    odd = {**cores.CONFIGS["llama"], "hidden_size": 52, "intermediate_size": 100}
    monkeypatch.setitem(cores.CONFIGS, "odd", odd)
    model, eager = loaded("odd", tmp_path), eager_of(tmp_path)
    pairs = made(eager, 1, 5)
    merge(eager, pairs)
    program = program_of(model, threads=2, fill=np.nan)
    change(program, 1, pairs)
    (found,) = Company(program, [IDS], [1]).step((0, 0, len(IDS)))
    assert difference(found, eager_hidden(eager, [IDS], [0])[0]) < AGREE
    change(program, 2, pairs)
    company = Company(program, [OTHER, IDS], [1, 2])
    parts = [company.step((0, 0, 3), (1, start, 10))[1] for start in range(0, 50, 10)]
    assert np.array_equal(bits(np.concatenate(parts)), bits(found))


def test_adapters_come_change_and_go(tmp_path):
    model = loaded("llama", tmp_path)
    program = program_of(model)
    company = Company(program, [IDS], [3])
    with pytest.raises(AssertionError, match="adapter"):
        company.step((0, 0, 20))
    results = []
    for seed, rank in ((1, 2), (2, 70), (1, 2)):
        change(program, 3, made(model.model, seed, rank))
        results.append(company.step((0, 0, 20))[0])
    assert np.array_equal(results[0], results[2]) and not np.array_equal(results[0], results[1])
    change(program, 4, made(model.model, 4, 2))
    program.set_adapter(3, None)
    for adapter in (3, 0, -1, native.MAX_ADAPTERS, 2**40, -(2**40)):
        program.states[0].adapt([Adapted(adapter)])
        with pytest.raises(AssertionError, match="adapter"):
            company.step((0, 0, 20))
    program.states[0].adapt([Adapted(4)])
    company.step((0, 0, 20))


def test_adapters_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    model = loaded("llama", tmp_path)
    eager = eager_of(tmp_path)
    program = program_of(model)
    good = made(model.model, 1, 4)
    change(program, 1, good)
    set_adapter(eager, 1, good)
    before = Company(program, [IDS], [1]).step((0, 0, 20))[0]
    slot = "layers.1.mlp.down"
    a, b, scale = good[slot]
    wrong = [(a[:, 1:], b), (a, b[1:]), (a[:3], b), (a[:0], b[:, :0]), (a[0], b), (a, b[0])]
    for call in (partial(change, program), partial(set_adapter, eager)):
        for pair in wrong:
            with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down.*\[rank, 96\].*\[64, rank\]"):
                call(1, {"layers.0.attn.out": good["layers.0.attn.out"], slot: (*pair, scale)})
        for name in ("layers.2.mlp.down", "layers.0.attn.qkv", ""):
            with pytest.raises(ValueError, match=repr(name)):
                call(1, {name: (a, b, scale)})
        for adapter in (0, -1):
            with pytest.raises(ValueError, match=f"adapter ids.* {adapter}$"):
                call(adapter, good)
    with pytest.raises(ValueError, match="adapter ids"):
        change(program, native.MAX_ADAPTERS, good)
    assert np.array_equal(before, Company(program, [IDS], [1]).step((0, 0, 20))[0])
    assert difference(eager_hidden(eager, [IDS[:20]], [1])[0], before) < AGREE


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_both_executors_have_the_same_slots(tmp_path, kind):
    model = loaded(kind, tmp_path)
    names = [*slots(model.model)]
    assert sorted([*names, "head"]) == sorted(program_of(model).places.slots)
    assert "layers.1.mlp.router" in names and "head" not in names and not any("experts" in name for name in names)


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_runners_know_a_rows_adapter_by_its_joining(tmp_path, executor):
    model, eager = loaded("llama", tmp_path), eager_of(tmp_path)
    program = program_of(model, rows=256)
    capacity, info = Capacity(4, 64, 128, 16, program.cache.groups, (20,), 300), ModelInfo("", "", (), 300, 128)
    if executor == "program":
        runner = Runner(ProgramExecutor(model.model, program), capacity, info)
    else:
        runner = Runner(EagerExecutor(eager, make_cache(eager, blocks=20), 256), capacity, info)
    give(runner, 5, made(eager, 5, 4))

    def first_tokens(step: int, adapters: list[int]) -> list[tuple | str]:
        spec = SamplingSpec(logprobs=0)
        joined = tuple(
            Join(i, pack_ids(IDS), 50, spec, (Adapted(adapter),) if adapter else ())
            for i, adapter in enumerate(adapters)
        )
        blocks = [((0, tuple(range(4 * i + 1, 4 * i + 5))),) for i in range(len(adapters))]
        works = tuple(Work(i, 0, 50, blocks[i], sample=True) for i in range(len(adapters)))
        rows = runner.sample(runner.execute(StepPlan(step, joined, works))).rows
        runner.sample(runner.execute(StepPlan(step + 1, left=tuple(range(len(adapters))))))
        return [row.error or (row.tokens, row.logprobs) for row in rows]

    (plain,) = first_tokens(0, [0])
    (adapted,) = first_tokens(2, [5])
    assert plain != adapted
    give(runner, 6, made(eager, 6, 9))
    assert first_tokens(4, [6, 5, 0])[1:] == [adapted, plain]
    runner.set_adapter(5, None)
    refused, other = first_tokens(6, [5, 0])
    assert "adapter 5, which is not loaded" in refused and other == plain
    runner.close()
