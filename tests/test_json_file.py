"""JSON files: their bounds of size and depth, and what is not JSON."""

import pytest

from kvasir.errors import ModelFileError
from kvasir.json_file import MAX_JSON_DEPTH, parse_json, read_json, read_json_object

BOUND = 1000


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.json"


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 100_000])
def test_deep_nesting_is_refused(path, depth):
    path.write_text("[" * depth + "]" * depth)
    with pytest.raises(ModelFileError, match="deep"):
        read_json(path)


def test_the_bounds_themselves_are_allowed(path):
    path.write_text("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    assert read_json(path)
    path.write_text('"' + "x" * (BOUND - 2) + '"')
    assert len(read_json(path, BOUND)) == BOUND - 2


def test_a_large_file_is_refused_without_being_parsed(path):
    path.write_bytes(b" " * (BOUND + 1))
    with pytest.raises(ModelFileError, match="larger than"):
        read_json(path, BOUND)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', "[1]", '{"a": "\xff"}'])
def test_what_json_readers_disagree_on_is_refused_with_the_name_of_the_file(path, text):
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_json_object(path)


@pytest.mark.parametrize("text", ['{"time_step_limit": [0.0, Infinity]}', '{"a": NaN}'])
def test_the_constants_of_published_configs_are_read_and_headers_have_none(path, text):
    path.write_text(text)
    assert read_json_object(path)
    with pytest.raises(ModelFileError, match="not a JSON number"):
        parse_json(text, "a header")
