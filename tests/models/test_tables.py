"""Tables that are whole beside the parts of a rank: in one memory, with the rows of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvasir.ops import native
from kvasir.ops.linear.native import lookup
from kvasir.parallel.local import LocalRanks
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.engine.cores import random_model

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # with a head of its own, and with a tied one
def test_a_ranks_part_is_in_the_memory_of_the_whole_table(tmp_path: Path, kind: str):
    files, mesh = find_model(random_model(kind, tmp_path)), LocalRanks(2).meshes[0]
    alone = load_model(files, "bfloat16", options=LoadOptions("program", block_size=16)).model
    loaded = load_model(
        files, "bfloat16", options=LoadOptions("program", block_size=16, mesh=mesh, tables=("embed", "head"))
    )
    own, whole = loaded.model, loaded.lender
    assert whole.layers is own.layers and own.embed.table.parts == 2 and whole.embed.table.parts == 1
    for name in ("embed", "head"):
        expected, part, table = (getattr(model, name).weight for model in (alone, own, whole))
        assert part.shape[0] < table.shape[0] == expected.shape[0]
        assert part.memory.ctypes.data == table.memory.ctypes.data
        rows, ids = lookup(table, np.arange(table.rows)), np.arange(part.rows)
        np.testing.assert_array_equal(rows, lookup(expected, np.arange(expected.rows)))
        np.testing.assert_array_equal(lookup(part, ids), rows[: part.rows])
