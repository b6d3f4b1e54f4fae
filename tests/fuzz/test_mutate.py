"""Mutations of JSON values."""

from __future__ import annotations

import json
from random import Random

import pytest

from tests.fuzz.mutate import change_values


@pytest.mark.parametrize("value", [10**400, -(10**400), 1, True, "text", None, 1.5, {"a": [1, {}]}])
def test_a_mutated_value_is_json(value):
    for seed in range(300):
        json.dumps(change_values(value, Random(seed), ("word",), lambda data, size: data[::-1]))
