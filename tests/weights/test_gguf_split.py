"""Models split over several GGUF files: one view, and clear words where parts are missing or mixed up."""

import gguf
import numpy as np
import pytest

from kvasir.errors import ModelFileError
from kvasir.weights.gguf_split import open_gguf, split_names
from tests.weights import _files as write

TENSORS = {name: np.arange(8, dtype=np.float32) + i for i, name in enumerate("abcde")}


@pytest.fixture
def parts(tmp_path):
    """A model of three parts, two tensors in each, as the `gguf` package splits it."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "split")
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_opens_the_whole_model(parts):
    assert [path.name for path in parts] == split_names("m-00001-of-00003.gguf")
    for path in parts:
        with open_gguf(path) as model:
            assert list(model.tensors) == list(TENSORS)
            assert model.metadata["general.name"] == "split"
            assert model.part("e").path == parts[2]
            for name, values in TENSORS.items():
                assert model.data(name).view("<f4").tolist() == [values.tolist()]


def test_a_file_that_is_not_split_is_a_model_of_one_part(tmp_path):
    (tmp_path / "m.gguf").write_bytes(write.small_gguf())
    with open_gguf(tmp_path / "m.gguf") as model:
        assert list(model.tensors) == ["a", "b", "c"]


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"1 of .*3 parts.*m-00002-of-00003\.gguf"):
        open_gguf(parts[0])


def test_a_huge_number_of_parts_is_only_counted(tmp_path):
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(write.small_gguf())
    with pytest.raises(ModelFileError, match=r"99998 of .*99999 parts") as caught:
        open_gguf(path)
    assert len(str(caught.value)) < 1000


def test_parts_under_wrong_names_are_refused(parts):
    swap = parts[0].with_name("swap")
    parts[1].rename(swap)
    parts[2].rename(parts[1])
    swap.rename(parts[2])
    with pytest.raises(ModelFileError, match=r"part 2\b.* name gives part 1\b"):
        open_gguf(parts[0])


def test_one_part_alone_under_a_plain_name_is_refused(parts):
    lone = parts[0].rename(parts[0].with_name("lone.gguf"))
    with pytest.raises(ModelFileError, match="part 0"):
        open_gguf(lone)


def split_part(number: int, count: int, name: str, total: int) -> bytes:
    pairs = [
        write.pair("split.no", write.U16, number),
        write.pair("split.count", write.U16, count),
        write.pair("split.tensors.count", write.I32, total),
    ]
    return write.gguf_bytes(pairs, [write.entry(name, [1], 0, 0)], bytes(4))


@pytest.mark.parametrize(("names", "total", "problem"), [("tt", 2, "'t' is in"), ("tu", 3, "2 tensors, expected 3")])
def test_parts_that_do_not_belong_together_are_refused(tmp_path, names, total, problem):
    for number, name in enumerate(names):
        content = split_part(number, 2, name, total)
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=problem):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("name", ["m.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf"])
def test_other_names_are_no_parts(name):
    assert split_names(name) == [name]
