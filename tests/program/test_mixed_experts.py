"""A mixture whose experts have several formats in one layer cannot be one call: eager takes it."""

from __future__ import annotations

import pytest

from kvasir.ops.graph import CannotTrace
from kvasir.program.lower import lower
from kvasir.program.marshal import prepared

pytest.importorskip("torch")

from tests.program.made import loaded


def test_experts_of_several_formats_are_refused_while_loading(tmp_path):
    model = loaded("mixtral", tmp_path)
    assert model.trace is not None
    node = next(n for n in model.trace.graph.nodes if n.op == "experts")
    other = loaded("mixtral", tmp_path, "bfloat16")
    theirs = next(n for n in other.trace.graph.nodes if n.op == "experts")
    node.inputs[3][0] = theirs.inputs[3][0]
    with pytest.raises(CannotTrace, match="weight formats"):
        lower(model.trace, 1, 1, prepared)
