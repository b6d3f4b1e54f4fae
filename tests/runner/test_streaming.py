"""Weights that are streamed through a window of memory: the same bits, and never more memory than agreed."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvasir.errors import ConfigError, DeviceFault, ModelFileError
from kvasir.ops.linear.packed import PackedMatrix
from kvasir.quant.gguf_types import GGMLType
from kvasir.runner import streaming
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.streaming import Split, WeightStream, split_layers
from kvasir.weights.find import find_model
from tests.engine.cores import core_of
from tests.oracle import mixed_requests, plain, same, together
from tests.program.made import Driver, bits, program_of
from tests.program.mini import ids_of, write_mini
from tests.runner.made import files_of

SMALL = {"executor": "program", "threads": 1, "block_size": 16, "dtype": "float32"}


@pytest.fixture(autouse=True)
def packed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_PACKED", str(tmp_path / "packed"))
    return tmp_path / "packed"


@pytest.fixture
def window(monkeypatch):
    """Streams all layers through so many places, whatever fits; None: as is decided."""

    def use(places: int | None):
        monkeypatch.setattr(streaming, "MOST_PLACES", 3)
        if places:
            split = lambda sizes, room: Split(tuple(range(len(sizes))), min(places, len(sizes)), places * max(sizes))  # noqa: E731
            monkeypatch.setattr(streaming, "split_layers", split)
        monkeypatch.setattr("kvasir.runner.allotment.budget_of", lambda needed, free, wish: needed if places else 0)

    return use


def crowded(folder, **options):
    return core_of(str(folder), **{**SMALL, "num_blocks": 24, "max_num_seqs": 5, "max_chunk": 48, **options})


def program_model(files, **wish) -> tuple[LoadedModel, WeightStream]:
    """A model whose weights are streamed."""
    loaded = load_model(files, "float32", options=LoadOptions("program", **wish))
    assert loaded.stream
    return loaded, loaded.stream


def answers(folder, **options):
    core = core_of(str(folder), **SMALL, max_num_seqs=1, num_blocks=40, **options)
    requests = mixed_requests(core.info.vocab_size, 200, count=6, longest=80)
    found = plain(core, requests)
    core.close()
    return requests, found


# -- the same bits

FAMILIES = ("llama", "llama-biased-tied", "mixtral", "gemma2", "qwen3-next", "deepseek-v3")


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (i > 1)) for i, name in enumerate(FAMILIES)]
)
def test_answers_have_the_same_bits_through_windows_of_any_size(tmp_path, window, family, places):
    folder = files_of(tmp_path, family, **({} if family == "qwen3-next" else {"num_hidden_layers": 4})).root
    requests, expected = answers(folder)
    window(places)
    core = crowded(folder, threads=1 + places % 2, overlap=places == 2)
    assert any("the weights are streamed: 0 of" in line for line in core.summary)
    same(expected, together(core, requests, seed=places, preempt=0.2))
    core.close()


KINDS = [
    kind.name for kind in GGMLType if kind.name in ("F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "TQ2_0", "MXFP4", "Q8_0")
]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in ("Q4_K", "TQ2_0"))) for k in KINDS]
)
def test_logits_of_every_format_have_the_same_bits(tmp_path, window, kind):
    files = find_model(str(write_mini(tmp_path / f"{kind}.gguf", kind)))
    ids = ids_of()[:40]

    def logits(first: bool):
        loaded = load_model(files, "float32", options=LoadOptions("program"))
        program = program_of(loaded, hooks=loaded.stream.hooks) if loaded.stream else program_of(loaded)
        found = Driver(program, ids).logits(0, len(ids))
        program.close()
        if loaded.stream:
            loaded.stream.close()
        return found

    expected = logits(True)
    window(2)
    for _ in range(2):  # it is packed once, and read by the next start
        assert np.array_equal(bits(logits(False)), bits(expected))


@pytest.mark.parametrize("quantize", ["q8", pytest.param("q4", marks=pytest.mark.slow)])
def test_quantized_weights_have_the_same_bits(tmp_path, window, quantize):
    folder = files_of(tmp_path, "llama").root
    requests, expected = answers(folder, quantize=quantize)
    window(1)
    for _ in range(2):
        core = crowded(folder, quantize=quantize)
        same(expected, together(core, requests, seed=1))
        core.close()


# -- what is decided


def test_as_many_layers_stay_as_fit_beside_the_places():
    assert split_layers([10] * 6, 60) == Split((), 0, 60)
    assert split_layers([10] * 6, 59) == Split((1, 3, 5), 2, 50)
    assert split_layers([10] * 6, 20) == Split((0, 1, 2, 3, 4, 5), 2, 20)
    assert split_layers([10] * 6, 19) == Split((0, 1, 2, 3, 4, 5), 1, 10)
    assert split_layers([10] * 6, 9) is None
    assert split_layers([10] * 16, 100) == Split((0, 2, 4, 6, 8, 9, 11, 13, 15), 3, 100)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_no_split_takes_more_than_there_is(count):
    rng = np.random.default_rng(count)
    for _ in range(200):
        sizes, room = rng.integers(1, 50, count).tolist(), int(rng.integers(1, 60 * count))
        split = split_layers(sizes, room)
        if split is None:
            assert room < 2 * max(sizes)
            continue
        place = max((sizes[i] for i in split.streamed), default=0)
        kept = sum(sizes) - sum(sizes[i] for i in split.streamed)
        assert split.nbytes == kept + place * split.places <= room
        assert len(set(split.streamed)) == len(split.streamed) and [*split.streamed] == sorted(split.streamed)


def test_weights_take_the_memory_that_was_agreed(tmp_path):
    files = files_of(tmp_path, "llama", num_hidden_layers=8)
    whole = load_model(files, "float32", options=LoadOptions("program")).held
    seen = set()
    for share in (0.3, 0.5, 0.7, 0.9):
        budget = int(whole * share)
        loaded = load_model(files, "float32", options=LoadOptions("program", weights_memory=budget))
        assert loaded.stream and loaded.held <= budget
        memories = {id(base_of(m.memory)): base_of(m.memory) for m in matrices_of(loaded.model)}
        assert sum(memory.nbytes for memory in memories.values()) <= budget + 4096 * len(memories)
        assert loaded.stream.per_step >= whole - budget - 4096 * 64
        seen.add((len(loaded.stream.streamed), loaded.stream.places))
        loaded.stream.close()
    assert len(seen) > 2


def test_a_share_for_all_weights_streams_nothing(tmp_path, packed):
    packed.mkdir(mode=0o700)
    loaded, stream = program_model(files_of(tmp_path, "llama"), agree=lambda needs: needs.all + (1 << 20))
    assert stream.streamed == () and stream.read == (0, 0.0) and loaded.held > 0
    stream.close()


def base_of(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def matrices_of(model) -> list[PackedMatrix]:
    found = [w for _, leaf in model.walk() for w in getattr(leaf, "weights", {}).values()]
    return [m for m in found if isinstance(m, PackedMatrix)]


def test_too_little_memory_is_refused(tmp_path):
    files = files_of(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"too few: this model needs [0-9]+ KiB, for the embedding table") as refused:
        load_model(files, "float32", options=LoadOptions("program", weights_memory=1))
    named = int(re.search(r"needs ([0-9]+) KiB", str(refused.value))[1])
    load_model(files, "float32", options=LoadOptions("program", weights_memory=named << 10)).stream.close()
    with pytest.raises(ConfigError, match=f"needs {named} KiB"):
        load_model(files, "float32", options=LoadOptions("program", weights_memory=(named - 1) << 10))


def test_only_programs_stream(tmp_path):
    files = files_of(tmp_path, "llama")
    with pytest.raises(ConfigError, match="only the program executor streams weights"):
        load_model(files, "float32", options=LoadOptions("eager", weights_memory=1))


# -- the file


def test_the_file_is_written_once_and_again_for_other_weights(tmp_path, window, packed):
    files = files_of(tmp_path, "llama")
    window(1)

    def load(**wish):
        program_model(files, **wish)[1].close()
        return {path.name: path.stat().st_ino for path in packed.glob("*.weights")}

    first = load()
    assert load() == first and len(first) == 1
    assert len(both := load(quantize="q8")) == 2 and first.items() < both.items()
    os.utime(files.weights[0], (1, 1))  # a changed checkpoint
    assert len(changed := load()) == 2 and not first.items() < changed.items()


def test_a_file_that_was_cut_is_written_again(tmp_path, window, packed):
    files = files_of(tmp_path, "llama")
    window(1)
    program_model(files)[1].close()
    [path] = packed.glob("*.weights")
    os.truncate(path, 4096)
    program_model(files)[1].close()
    assert path.stat().st_size > 4096


def harm(packed: Path) -> None:
    [path] = packed.glob("*.weights")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"harm")


def test_a_file_that_changes_under_a_running_engine_ends_it_without_a_wrong_token(tmp_path, window, packed):
    folder = files_of(tmp_path, "llama", num_hidden_layers=4).root
    requests, expected = answers(folder)
    window(1)
    core = crowded(folder)
    harm(packed)
    long, got = replace(requests[0], params=replace(requests[0].params, max_tokens=40, ignore_eos=True)), []
    core.add(long)
    with pytest.raises(DeviceFault, match=r"layer 0 cannot be read from .*: the checksum is wrong"):
        while core.has_work():
            got += [token for delta in core.step() for token in delta.token_ids]
    assert got == expected[long.id, 0].tokens[: len(got)] and len(got) <= 1  # layer 0 was there for one step at most
    core.close()
    core = crowded(folder)  # the next start writes the file anew
    same(expected, together(core, requests, seed=2))
    core.close()


def test_a_damaged_layer_that_stays_in_memory_ends_the_start(tmp_path, packed):
    files = files_of(tmp_path, "llama", num_hidden_layers=8)
    whole = load_model(files, "float32", options=LoadOptions("program")).held
    wish = int(0.9 * whole)
    program_model(files, weights_memory=wish)[1].close()
    harm(packed)
    with pytest.raises(ModelFileError, match="start again"):
        program_model(files, weights_memory=wish)[1].close()
    program_model(files, weights_memory=wish)[1].close()


def test_a_disk_that_fills_up_while_the_file_is_written_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, packed):
    files = files_of(tmp_path, "llama", num_hidden_layers=4)

    def full(*_, **facts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = load_model(files, "float32", options=LoadOptions("program")).held
    monkeypatch.setattr("kvasir.weights.packed_file.PackedWriter.add", full)
    with pytest.raises(ConfigError, match=r"cannot be kept: No space left on device.*KVASIR_PACKED"):
        program_model(files, weights_memory=whole * 3 // 4)
    assert {path.name for path in packed.iterdir()} == {"lock"}
