"""Adapters of every kind that peft can make on the graph executor: against peft's own logits, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from kvasir.errors import UnsupportedModel
from kvasir.inputs import Adapter
from tests.lora.made import bound
from tests.lora.served import adapted_core, log_probabilities
from tests.lora.test_against_peft import CASES, IDS, INVOCATION, PAIRS, config_of, wanted_of, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REFUSED = {
    "offset norms": "post_norm",
    "norms of heads": "k_norm",
    "experts": r"experts\.0\.gate_up",
}


def core_of(base, adapters):
    """A core whose steps take all ids at once."""
    options = {"device": "cpu", "num_blocks": 20, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    return adapted_core(
        base, "graph", {name: bound(path, config_of(base)) for name, path in adapters.items()}, **options
    )


@pytest.mark.parametrize("name", sorted({*CASES} - {"experts of gpt-oss"}))  # a model that has no Triton kernels
def test_log_probabilities_are_those_of_peft(tmp_path, name):
    kind, changes, fields = CASES[name]
    base, tuned = write(kind, changes, {"x": fields}, tmp_path)
    if name in REFUSED:
        with pytest.raises(UnsupportedModel, match=f"{REFUSED[name]}.*graph executor cannot compute"):
            core_of(base, {"x": tmp_path / "x"})
        return
    core, wanted = core_of(base, {"x": tmp_path / "x"}), wanted_of(tuned, "x")
    start = IDS.index(INVOCATION[0]) if name == "activated" else 0
    got, without = log_probabilities(core, IDS, Adapter("x", 1.0, start)), log_probabilities(core, IDS)
    assert np.nanmax(np.abs(got - wanted)) < 5e-5
    assert np.nanmax(np.abs(without - wanted)) > 1e-3, "the adapter changes nothing: the comparison says nothing"
    assert np.array_equal(got[:start], without[:start], equal_nan=True)


@pytest.mark.parametrize("name", PAIRS)
def test_two_adapters_are_those_of_peft_in_both_orders(tmp_path, name):
    kind, *fields = PAIRS[name]
    base, tuned = write(kind, {}, dict(zip("xy", fields, strict=True)), tmp_path)
    core = core_of(base, {one: tmp_path / one for one in "xy"})
    for order in ("xy", "yx"):
        assert np.nanmax(np.abs(log_probabilities(core, IDS, *map(Adapter, order)) - wanted_of(tuned, *order))) < 1e-4
