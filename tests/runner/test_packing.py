"""The startup summary lists the matrices that quantizing at load leaves unchanged."""

from __future__ import annotations

import pytest

from kvasir.ops import native
from tests.engine.cores import CONFIGS, core_of, random_model

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())

NARROW = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}


def notes(core) -> list[str]:
    return [line for line in core.summary if line.startswith("note") and "quantize" in line]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**NARROW, "intermediate_size": 72}, ["changed nothing", "40 columns", "72 columns", "not a multiple of 32"]),
        ({**NARROW, "intermediate_size": 64}, ["changed 2 of 16 matrices", "14 with 40 columns", "q_proj"]),
        ({}, []),
    ],
    ids=["none", "some", "all"],
)
def test_a_note_names_the_matrices_that_quantize_left_unchanged(tmp_path, monkeypatch, change, message):
    monkeypatch.setitem(CONFIGS, "made", {**CONFIGS["llama"], **change})
    folder = random_model("made", tmp_path)
    lines = notes(core_of(folder, executor="program", quantize="q8", threads=1))
    assert len(lines) == bool(message)
    assert all(text in line for line in lines for text in message), lines
    assert not notes(core_of(folder, executor="program", threads=1))
