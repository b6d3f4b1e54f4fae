"""Several adapters of a row, with scales and first positions, magnitudes and biases: against float64, and the bits of a
row whatever it is computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.errors import ConfigError  # noqa: E402
from kvasir.lora import LowRank  # noqa: E402
from kvasir.ops import native  # noqa: E402
from kvasir.ops.linear import native as matrices  # noqa: E402
from kvasir.ops.linear.packed import pack_rows  # noqa: E402
from kvasir.plan import Adapted  # noqa: E402
from kvasir.program.program import Program  # noqa: E402
from kvasir.program.trace import trace  # noqa: E402
from tests.layers.adapted import adapter_of  # noqa: E402
from tests.program.made import Company, bits, loaded, program_of, random_model  # noqa: E402
from tests.program.ranked import parts_of, ranked  # noqa: E402

IDS = [(13 * i * i + 7 * i + 3) % 300 for i in range(50)]
OTHER = [(5 * i * i + 3 * i + 8) % 300 for i in range(50)]
LATE = 21  # a first position within a piece
STEPS = (1, 20, 2, 27)


def change(slot: Any, seed: int, dtype: Any = np.float32, **parts: bool) -> LowRank:
    """A random change of a slot. parts: whether it has a magnitude and a bias."""
    rng, (outputs, inputs), rank = np.random.default_rng(seed), slot.shape, 3 + seed % 5
    a = rng.standard_normal((rank, inputs)) * inputs**-0.5
    vectors = {name: 1 + 0.2 * rng.standard_normal(outputs) for name, given in sorted(parts.items()) if given}
    b = rng.standard_normal((outputs, rank)) * rank**-0.5
    cast = {name: vector.astype(np.float32) for name, vector in vectors.items()}
    return LowRank(a.astype(dtype), b.astype(dtype), 0.3, **cast)


def changes(program: Any, seed: int, only: str = "", **parts: Any) -> dict[str, LowRank]:
    """Changes of all slots whose names have `only` in them."""
    return {
        name: change(slot, 97 * seed + i, **parts)
        for i, (name, slot) in enumerate(program.slots.items())
        if only in name
    }


def give(program: Any) -> Any:
    """Sets adapters 1 to 4: plain, with magnitudes, with biases, and in bfloat16 for a few matrices."""
    for id, found in {
        1: changes(program, 1),
        2: changes(program, 2, magnitude=True),
        3: changes(program, 3, bias=True),
        4: changes(program, 4, "attn", dtype=ml_dtypes.bfloat16),
    }.items():
        program.set_adapter(id, program.pack_adapter(adapter_of({}, matrices=found)))
    return program


MIXES = [
    [Adapted(1)],
    [Adapted(1, 0.5), Adapted(3, -2.0)],
    [Adapted(4), Adapted(2, 1.0, LATE), Adapted(1, 0.25)],
    [Adapted(3, 1.5, LATE)],
    [Adapted(2), Adapted(3, 0.7, 3), Adapted(4, -1.0, 30), Adapted(1, 0.1, 22)],
    [],
]


def alone(program: Program, mix: Sequence[Adapted]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden rows and logits of IDS in one step."""
    (hidden,) = Company(program, [IDS], [list(mix)]).step((0, 0, len(IDS)))
    return hidden, np.concatenate([program.logits_of(range(i, i + 25)).copy() for i in (0, 25)])


def beside(
    program: Program, mix: Sequence[Adapted], others: Sequence[Sequence[Adapted]]
) -> tuple[np.ndarray, np.ndarray]:
    """The same in steps, each beside rows with other adapters."""
    company = Company(program, [*[OTHER] * len(others), IDS], [*map(list, others), list(mix)])
    me, start, found = len(others), 0, ([], [])
    for count in STEPS:
        works = [(i, 0, 1 + (3 * i + start) % 4) for i in range(me)]
        works.insert(start % (me + 1), (me, start, count))
        at = works.index((me, start, count))
        found[0].append(company.step(*works)[at])
        first = sum(count for *_, count in works[:at])
        found[1].append(program.logits_of(range(first, first + count)).copy())
        start += count
    return np.concatenate(found[0]), np.concatenate(found[1])


@pytest.fixture(scope="module", params=["float32", "bfloat16", "q8", "q4"])
def model(request, tmp_path_factory):
    how = {"quantize": request.param} if request.param.startswith("q") else {"dtype": request.param}
    return loaded("llama", tmp_path_factory.mktemp("model"), **how)


@pytest.mark.few(8)
@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_a_row_has_the_same_bits_alone_and_beside_others(model, mix):
    expected = alone(give(program_of(model)), MIXES[mix])
    for threads in (1, 2):
        program = give(program_of(model, threads=threads, blocks=60, fill=np.nan))
        for found, right in zip(beside(program, MIXES[mix], MIXES[:5]), expected, strict=True):
            assert np.array_equal(bits(found), bits(right))
    base = alone(program_of(model), [])
    assert all(np.array_equal(a, b) for a, b in zip(base, expected, strict=True)) == (not MIXES[mix])


def test_one_of_many_adapters(tmp_path):
    model, count = loaded("llama", tmp_path), 32
    program = program_of(model, threads=2, rows=256, blocks=4 * count + 1, max_rows=count)
    for id in range(1, count + 1):
        program.set_adapter(id, program.pack_adapter(adapter_of({}, matrices=changes(program, id))))
    together = Company(program, [IDS] * count, range(1, count + 1)).step(*((i, 0, 7) for i in range(count)))
    for i in (0, 13, 31):
        single = program_of(model)
        single.set_adapter(3, single.pack_adapter(adapter_of({}, matrices=changes(single, 1 + i))))
        (expected,) = Company(single, [IDS], [3]).step((0, 0, 7))
        assert np.array_equal(bits(together[i]), bits(expected))
    assert len({found.tobytes() for found in together}) == count


def test_rows_before_the_first_position_are_the_base_models(model):
    plain, program = program_of(model), give(program_of(model))
    base, (hidden, logits) = alone(plain, []), alone(program, [Adapted(1, 1.0, LATE), Adapted(2, 1.0, LATE + 4)])
    one, _ = alone(program, [Adapted(1, 1.0, LATE)])
    assert np.array_equal(bits(hidden[:LATE]), bits(base[0][:LATE]))
    assert np.array_equal(bits(logits[:LATE]), bits(base[1][:LATE]))
    assert np.array_equal(bits(hidden[: LATE + 4]), bits(one[: LATE + 4]))
    assert (hidden[LATE:] != base[0][LATE:]).any(1).all() and (hidden[LATE + 4 :] != one[LATE + 4 :]).any(1).all()


@pytest.mark.parametrize("slot", ["layers.0.attn.qkv.v", "head"])
def test_a_product_against_float64(model, slot):
    """All of: scales, several adapters in their order, factors and biases, from float32 rows whatever the weights
    are."""
    program = program_of(model, threads=2)
    weight = program.places.matrices[slot]
    whole = {"magnitude": True, "bias": True}
    mix = {
        1: change(program.slots[slot], 1),
        2: change(program.slots[slot], 2, **whole),
        3: change(program.slots[slot], 3),
    }
    instructions = program.lowered.instructions
    at = next(i for i, s in enumerate(instructions) for p, *_ in s.products if p.slot and p.slot.name == slot)
    out = next(place for p, _, place, _ in instructions[at].products if p.slot and p.slot.name == slot)
    if slot != "head":
        program.struct.count = program.struct.chosen_from = at + 1  # no further: buffers are shared
    company = Company(program, [IDS], [[Adapted(1, 0.5), Adapted(2), Adapted(3, -1.5)]])
    rows, found = 20, {}
    for name, given in {"base": {}, "adapted": mix}.items():
        for id in mix:
            program.set_adapter(id, program.pack_adapter(adapter_of({}, matrices={slot: given[id]} if given else {})))
        company.step((0, 0, rows))
        if slot == "head":
            program.logits_of(range(rows))
        x = program.memory.view(instructions[at].buffers[0], rows).astype(np.float64)
        found[name] = program.memory.view(out, rows).astype(np.float64)
    y = found["base"]
    dequantized = matrices.lookup(weight, np.arange(weight.rows)).astype(np.float64)
    for id, scale in ((1, 0.5), (2, 1.0), (3, -1.5)):
        one = mix[id]
        y = y + scale * one.scale * (x @ one.a.T.astype(np.float64) @ one.b.T)
        if one.bias is not None and one.magnitude is not None:
            norms = np.linalg.norm(dequantized + one.scale * one.b.astype(np.float64) @ one.a, axis=1)
            y = (y + scale * one.scale * one.bias) * (one.magnitude / norms)
    assert np.abs(found["adapted"] - y).max() < 2e-6 * np.abs(y).max()
    assert np.abs(found["base"] - y).max() > 0.1 * np.abs(y).max()


def test_a_matrixs_own_factor_does_not_scale_its_adapters(tmp_path):
    """As of BitNet: W x is multiplied by it, what adapters add is not."""
    slot, factor = "layers.0.attn.qkv.v", 0.5
    model = loaded("llama", tmp_path).model
    qkv = model.layers[0].attn.qkv
    gained = []
    for scale in (1.0, factor):
        qkv.weights["v"].scale = scale
        qkv.scales = {"v": scale} if scale != 1 else {}
        loaded_model = replace(loaded("llama", tmp_path), model=model, trace=trace(model))
        program = program_of(loaded_model, threads=2)
        ops = [s.op for s in program.lowered.instructions]
        at = ops.index("adapt_add" if scale != 1 else "linear")
        instruction = program.lowered.instructions[at]
        out = instruction.buffers[0] if scale != 1 else instruction.products[2][2]
        program.struct.count = program.struct.chosen_from = at + 1
        company, found = Company(program, [IDS], [1]), []
        for given in ({}, {slot: change(program.slots[slot], 1)}):
            program.set_adapter(1, program.pack_adapter(adapter_of({}, matrices=given)))
            company.step((0, 0, 20))
            found.append(program.memory.view(out, 20).copy())
        gained.append(found)
    (plain, adapted), (half, changed) = gained
    assert np.array_equal(half, factor * plain)
    assert np.allclose(changed - half, adapted - plain, atol=1e-5) and np.abs(changed - half).max() > 0.1


def test_sixteen_bits_stay_sixteen_bits(tmp_path):
    """As long as B with the adapter's scale in it is exact; the bits are those of the same numbers in float32."""
    program = program_of(loaded("llama", tmp_path), threads=2)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = changes(program, 5, dtype=dtype)
        wide = {
            name: replace(one, a=one.a.astype(np.float32), b=one.b.astype(np.float32)) for name, one in narrow.items()
        }
        packed = {}
        for scale in (0.3, 0.5):
            one, other = ({n: replace(c, scale=scale) for n, c in given.items()} for given in (narrow, wide))
            packed[scale] = program.pack_adapter(adapter_of({}, matrices=one))
            program.set_adapter(1, packed[scale])
            program.set_adapter(2, program.pack_adapter(adapter_of({}, matrices=other)))
            first, second = Company(program, [IDS, IDS], [1, 2]).step((0, 0, 20), (1, 0, 20))
            assert np.array_equal(bits(first), bits(second))
        full = program.pack_adapter(adapter_of({}, matrices=wide)).nbytes
        assert packed[0.5].nbytes < 0.6 * full and 0.6 * full < packed[0.3].nbytes < full


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_ranks_have_the_bits_of_one_alone(tmp_path, kind):
    folder = tmp_path
    random_model(kind, folder)
    model = loaded(kind, folder)
    works = [(i, 0, 30) for i in range(len(MIXES))]

    def results(program: Any) -> list[np.ndarray]:
        give(program)
        company = Company(program, [IDS] * len(MIXES), MIXES)
        return (
            company.step(*works)
            + company.step(*((i, 30, 2) for i in range(len(MIXES))))
            + [program.logits_of(range(2 * len(MIXES))).copy()]
        )

    expected = results(program_of(model, rows=256, blocks=40))
    program = ranked(*parts_of(folder, 2), rows=256, blocks=40)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(results(program), expected, strict=True))
    program.close()


def test_norms_do_not_depend_on_how_they_are_computed():
    """Of whole rows, of the parts of ranks, and of every instruction set."""
    rng = np.random.default_rng(3)
    rows, cols, rank, segments = 37, 96, 5, 4
    w, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, cols), (rank, cols), (rows, rank)))
    whole = matrices.change_squares(_packed(w), a, b, segments)
    assert np.allclose(whole.sum(1), np.square(w.astype(np.float64) + b.astype(np.float64) @ a).sum(1), rtol=1e-6)
    parts = [
        matrices.change_squares(_packed(w[:, s]), np.ascontiguousarray(a[:, s]), b, segments // 2)
        for s in (slice(48), slice(48, None))
    ]
    assert np.array_equal(np.concatenate(parts, 1), whole)
    for isa in native.ISAS:
        try:
            native.force_isa(isa)
            assert np.array_equal(matrices.change_squares(_packed(w), a, b, segments), whole)
        except ConfigError:  # this processor cannot run it
            continue
        finally:
            native.force_isa(None)


def _packed(w: np.ndarray) -> Any:
    return pack_rows("F32", np.ascontiguousarray(w).view(np.uint8), w.shape[0], w.shape[1], 1)
