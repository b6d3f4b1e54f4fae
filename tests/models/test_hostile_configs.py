"""Whatever a config's fields hold, the reader gives a config or a KvasirError that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from kvasir.errors import KvasirError
from kvasir.models.registry import model_class_for
from tests.models.families import FAMILIES, config_of

Path = tuple[str | int, ...]
ABSENT: Any = object()
INFINITE = float("inf")
WRONG_TYPES = ("x", 7, 0.5, True, [1], ["a"], {"a": 1}, [None])
HOSTILE = (
    *(ABSENT, None, *WRONG_TYPES, "", [], {}, [[]], [{}], [INFINITE - INFINITE], [10**30], [-1] * 200),
    *(0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.0, -1.5, 1e308, 1e-320, INFINITE - INFINITE, INFINITE, -INFINITE),
)
# Objects that a config of any family may have.
OBJECTS: tuple[Path, ...] = (
    *(("rope_parameters",), ("rope_scaling",), ("text_config",), ("quantization_config",), ("layer_types",)),
    *(("rope_parameters", kind) for kind in ("full_attention", "sliding_attention")),
)


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """Of all fields of a config, and of the first elements of its lists."""
    for key in value if isinstance(value, dict) else range(min(len(value), 3)):
        yield (*before, key)
        if isinstance(value[key], dict | list):
            yield from paths(value[key], (*before, key))


def replaced(config: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed: Any = deepcopy(config)
    inner: Any = changed
    for key in path[:-1]:
        if isinstance(inner, dict):
            inner.setdefault(key, {})
        inner = inner[key]
    last: Any = path[-1]
    if value is not ABSENT:
        inner[last] = value
    elif isinstance(inner, list) or last in inner:
        del inner[last]
    return changed


def read(config: dict[str, Any], note: str) -> None:
    try:
        model_class_for(config).Config.from_hf(config)
    except KvasirError as error:
        assert str(error)
    except Exception as error:
        error.add_note(note)
        raise


def test_a_field_of_another_type_is_refused_by_name():
    for name in FAMILIES:
        config = config_of(name)
        changes = [(path, value) for path in OBJECTS for value in WRONG_TYPES[:-3]]
        changes += [((field,), "x") for field in config if field != "model_type"]
        for path, value in changes:
            read(replaced(config, path, value), f"{name}: {path} is {value!r}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_in_any_field_gives_a_config_or_a_refusal(name):
    config = config_of(name)
    others = {(field,) for other in FAMILIES for field in config_of(other)}
    changes = [(path, value) for path in {*paths(config), *OBJECTS} for value in HOSTILE]
    changes += [(path, value) for path in others for value in WRONG_TYPES]
    for path, value in changes:
        read(replaced(config, path, value), f"{name}: {path} is {value!r:.80}")
