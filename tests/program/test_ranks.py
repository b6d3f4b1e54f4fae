"""A model that 2, 4 or 8 ranks share, in one process: the bits are those of one rank, in every family and format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.layers.moe import MoE  # noqa: E402
from kvasir.ops.collective import all_reduce  # noqa: E402
from kvasir.ops.linear.packed import num_segments  # noqa: E402
from kvasir.ops.moe import experts  # noqa: E402
from kvasir.parallel import ExpertShare  # noqa: E402
from kvasir.program import lower  # noqa: E402
from kvasir.program.ranks import RankedProgram  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine.cores import CONFIGS, random_model  # noqa: E402
from tests.lora.adapters import change  # noqa: E402
from tests.lora.kinds import everything  # noqa: E402
from tests.program.made import SMALL, Company, Driver, bits, program_of  # noqa: E402
from tests.program.ranked import parts_of, ranked, ranked_of  # noqa: E402
from tests.program.test_adapters import made  # noqa: E402

SIZES = (2, 4, 8)
LENGTH = 50  # beyond the windows
IDS = [(17 * i * i + 3 * i + 4) % 300 for i in range(LENGTH)]
# Eight segments in every sum that ranks share, eight heads, and KV heads for some ranks or for all.
EIGHTH = {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256}
KV_HEADS = {"mistral": 1, "qwen2": 4, "qwen3": 8}
WIDE = {"hidden_size": 256}  # their head size follows from the width
MORE = {
    "qwen3-moe": {"moe_intermediate_size": 256},
    "gpt-neox": {**WIDE, "num_key_value_heads": 8},
    "stablelm": WIDE,
    "olmoe": WIDE,
    **dict.fromkeys(("bitnet", "helium", "phi", "stablelm-12b"), WIDE),
}
# One kind for each way to share a layer's matrices: heads, KV heads, experts, states, fused rows.
FEW = {
    "llama",
    "mixtral",
    "phi3",
    "gpt2",
    "bert",
    "qwen3-next",
    "granite-hybrid",
    "lfm2",
    "deepseek-v2",
    "gemma3n",
    "llama4",
}
OWN = {
    "zamba2": {"hidden_size": 64},
    "zamba2-blocks": {"hidden_size": 64},
    "mamba2": {"hidden_size": 64},
    "rwkv7": {"hidden_size": 256, "head_dim": 32, "intermediate_size": 256},
    "gpt2": {"n_embd": 256, "n_head": 8},
    "gpt-bigcode": {"n_embd": 256, "n_head": 8},
    "bert": {"hidden_size": 256, "num_attention_heads": 8},
    "phimoe": {"hidden_size": 128, "num_attention_heads": 8},  # its rotation has factors for eight pairs
    "dbrx": {"d_model": 256, "n_heads": 8},
    "glm4-moe-lite": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "falcon": {**WIDE, "num_attention_heads": 8},
    "falcon-grouped": {**WIDE, "num_attention_heads": 8},
}


def eighths(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    own = OWN.get(kind, {**EIGHTH, "num_key_value_heads": KV_HEADS.get(kind, 2), **MORE.get(kind, {})})
    config = {**CONFIGS[kind], **own, **changes}
    with monkeypatch.context() as patch:
        patch.setitem(CONFIGS, kind, config)
        return Path(random_model(kind, folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Per family a folder that can be cut in eight."""
    found: dict[str, Path] = {}
    patch = pytest.MonkeyPatch()

    def folder(kind: str) -> Path:
        if kind not in found:
            found[kind] = eighths(kind, tmp_path_factory.mktemp(kind), patch)
        return found[kind]

    return folder


def whole(folder: Path, dtype: str = "float32", **wish: Any) -> Any:
    return load_model(find_model(str(folder)), dtype, options=LoadOptions("program", **wish))


def results(program: Any, kind: str = "") -> list[np.ndarray]:
    """Hidden rows and logits, in two pieces; of bert the hidden rows of the whole."""
    driver = Driver(program, IDS)
    if kind == "bert":
        return [driver.hidden(0, LENGTH, bidirectional=True)]
    hidden = [driver.hidden(0, LENGTH - 1), driver.hidden(LENGTH - 1, 1)]
    return [*hidden, program.logits_of([0]).copy()]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def check(folder: Path, kind: str, sizes: tuple[int, ...] = SIZES, dtype: str = "float32", **wish: Any) -> None:
    expected = results(program_of(whole(folder, dtype, **wish)), kind)
    for size in sizes:
        program = ranked_of(folder, size, dtype, **wish)
        program.cache.fill_(np.nan)
        assert same(results(program, kind), expected), f"{size} ranks have other bits"
        if kind != "bert":
            for rank in program.programs:
                assert np.array_equal(bits(rank.left_logits(1)), bits(expected[-1])), "each rank has all logits"
        program.close()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]
)
def test_every_family_in_2_4_and_8_ranks(folders, kind):
    check(folders(kind), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_in_bfloat16_and_narrow_caches(folders, kind):
    check(folders(kind), kind, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SMALL)
def test_shapes_that_do_not_come_out_even(tmp_path, kind, dtype):
    """Few segments, three heads, a vocabulary of 18.75 panels: parts that several ranks hold, and whole ones."""
    random_model(kind, tmp_path)
    check(tmp_path, kind, dtype=dtype)


@pytest.mark.parametrize("size", SIZES)
def test_the_parts_are_parts(folders, size):
    ranks, models = parts_of(folders("qwen2"), size)
    for mesh, part in zip(ranks.meshes, models, strict=True):
        block = part.model.layers[1]
        assert block.attn.out.sum_parts == block.mlp.down.sum_parts == size == part.model.head.vocabulary.parts
        assert block.attn.heads == 8 // size and block.attn.kv_heads == max(1, 4 // size)
        assert block.attn.qkv.rows["k"][0] == mesh.rank * 4 // size * 32
        assert block.mlp.gate_up.weights["up"].shape == (256 // size, 64)
        assert block.mlp.down.weights["weight"].shape == (64, 256 // size)
        assert part.model.embed.weight.rows < 300 / size + 16
    if size == 8:
        assert max(part.held for part in models) < whole(folders("qwen2")).held / 5


def test_experts_are_split_by_id_if_there_are_enough(folders):
    for size, held in ((2, [3, 3]), (4, [1, 2, 1, 2])):
        _, models = parts_of(folders("qwen3-moe"), size)
        shares = [part.model.layers[0].mlp.share for part in models]
        assert [last - first for first, last in (share.held for share in shares)] == held
        assert all(share.parts == 1 for share in shares)
    _, models = parts_of(folders("qwen3-moe"), 8)
    assert all(part.model.layers[0].mlp.share.parts == 8 for part in models)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_each_experts_sum_in_parts(folders, kind, monkeypatch):
    monkeypatch.setattr(MoE, "goes_by_id", lambda self, mesh: False)
    check(folders(kind), kind, (2,))


# --- adapters ---------------------------------------------------------------------------------------


def company_of(program: Any, pairs: dict[int, Any]) -> list[np.ndarray]:
    """Rows of two adapters and of none, in one step and one by one."""
    for adapter, its in pairs.items():
        change(program, adapter, its)
    company = Company(program, [IDS, IDS, IDS[::-1]], [1, 0, 2])
    return company.step((0, 0, 20), (1, 0, 20), (2, 0, 20)) + company.step((2, 20, 1), (0, 20, 1))


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_adapters_on_every_slot(folders, kind):
    model = whole(folders(kind))
    pairs = {1: made(model.model, 1, 4), 2: made(model.model, 2, 19)}
    expected = company_of(program_of(model), pairs)
    for size in (2, 8):
        program = ranked_of(folders(kind), size)
        assert same(company_of(program, pairs), expected)
        program.close()


# --- faults, planted: the equality must not hold ----------------------------------------------------


def close_but_not_same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))
    return not same(found, expected) and off < 1e-4


def test_a_sum_of_experts_before_the_sum_over_ranks_has_other_bits(folders, monkeypatch):
    def late(*args: Any) -> Any:
        share: ExpertShare = args[7]
        return all_reduce(experts(*args[:7]), share.mesh, share.parts)

    folder = folders("mixtral")
    expected = results(program_of(whole(folder)))
    monkeypatch.setattr(MoE, "goes_by_id", lambda self, mesh: False)
    parts = parts_of(folder, 2)
    assert same(results(ranked(*parts)), expected)
    monkeypatch.setattr("kvasir.layers.moe.experts", late)
    assert close_but_not_same(results(ranked_of(folder, 2)), expected)


def test_an_adapter_before_the_sum_over_ranks_has_other_bits(folders, monkeypatch):
    model = whole(folders("llama"))
    pairs = {1: made(model.model, 1, 4), 2: made(model.model, 2, 19)}
    expected = company_of(program_of(model), pairs)
    monkeypatch.setattr(lower, "split_adapters", list)
    assert close_but_not_same(company_of(ranked_of(folders("llama"), 2), pairs), expected)


def test_segments_of_the_part_instead_of_the_whole_have_other_bits(folders, monkeypatch):
    expected = results(program_of(whole(folders("llama"))))

    def by_the_part(cols: int, to: str) -> int:
        parts = num_segments(cols, to)
        return parts * num_segments(cols // parts, to)

    monkeypatch.setattr("kvasir.runner.packing.num_segments", by_the_part)
    assert close_but_not_same(results(ranked_of(folders("llama"), 8)), expected)


# --- errors -----------------------------------------------------------------------------------------


def test_an_error_of_one_rank_is_the_steps_own(folders):
    ranks, models = parts_of(folders("llama"), 2)
    program = ranked(ranks, models)
    expected = results(program)
    meet = ranks.exchange

    def fail(rank: int, mine: np.ndarray) -> Any:
        if rank == 1:
            raise ConnectionError("a rank is gone")
        return meet(rank, mine)

    ranks.exchange = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="a rank is gone"):
            results(program)
    ranks.exchange = meet  # type: ignore[method-assign]
    assert same(results(program), expected)
    program.close()


def test_a_single_rank_has_no_meetings(folders):
    program = ranked_of(folders("mixtral"), 1)
    assert isinstance(program, RankedProgram)
    assert not {one.op for one in program.lowered.instructions} & set(lower.COLLECTIVES)
    assert same(results(program), results(program_of(whole(folders("mixtral")))))


def test_adapters_of_every_kind_are_equal(folders):
    model = whole(folders("qwen3-moe"))
    given = everything(model.model, 1)
    random = np.random.default_rng(3)
    shapes = {"embed": (300, 64), "layers.0.attn.out": (64, 256), "layers.1.attn.out": (64, 256)}
    saved = {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    replaced = replace(given, tables={}, tokens={}, saved=saved)
    # The norms of a table's columns are of all rows, of which each rank has some.
    magnitude = np.linspace(0.5, 2, 64, dtype=np.float32)
    scaled = replace(given, tables={"embed": replace(given.tables["embed"], magnitude=magnitude)})
    program = program_of(model)
    expected = [of_everything(program, adapter) for adapter in (given, replaced, scaled)]
    assert not same(*expected[:2]) and not same(expected[0], expected[2])
    for size in (2, 4, 8):  # each of 8 ranks has a part of each expert
        program = ranked_of(folders("qwen3-moe"), size)
        assert same(of_everything(program, given), expected[0])
        assert same(of_everything(program, replaced), expected[1])
        assert same(of_everything(program, scaled), expected[2])
        program.close()


def of_everything(program: Any, adapter: Any) -> list[np.ndarray]:
    program.set_adapter(1, program.pack_adapter(adapter))
    hidden = Company(program, [IDS, IDS], [1, 0]).step((0, 0, 20), (1, 0, 20))
    return [*hidden, program.logits_of(range(20)).copy()]
