"""benchmarks.gpu without a GPU: the file it writes, and a second run that measures only what is missing."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from benchmarks.gpu import run as bench
from benchmarks.gpu.measure import Place
from benchmarks.gpu.models import FORMATS, bytes_read, config_of, random_matrix, random_model
from benchmarks.gpu.run import Cell, Run, Sizes


def run_of(path, minutes: float = 60.0) -> Run:
    return Run(Place("cpu"), ["tiny"], ["Q4_K"], path, full=False, minutes=minutes)


def test_cells_are_written_at_once_and_measured_again_only_after_an_error(tmp_path, monkeypatch):
    path, measured, faults = tmp_path / "gpu.json", [], [True]

    def cell(key):
        def measure(engine):
            assert engine is None
            measured.append(key)
            if key == "b" and faults and faults.pop():
                raise RuntimeError("no")
            return {"step_ms": {"median": 1.0}, "of_limit": 0.5}

        return Cell(key, measure)

    monkeypatch.setattr(Run, "list", lambda self: [cell("a"), cell("b"), cell("c")])
    assert run_of(path, minutes=0.0).measure() == ["a", "b", "c"]
    assert run_of(path).measure() == []
    assert json.loads(path.read_text())["cells"]["b"]["error"] == "RuntimeError: no"
    again = run_of(path)
    assert again.measure() == [] and measured == ["a", "b", "c", "b"]
    assert "a: 1.000 ms, 50% of the limit" in again.table()
    monkeypatch.setattr(bench, "digest", lambda: "other code")
    assert run_of(path).measure() == [] and len(measured) == 7
    found = json.loads(path.read_text())
    assert found["probe"]["copy_bytes_per_s"] > 0 and found["probe"]["matmul_flops"] > 0
    assert {"machine", "software", "gpu", "date", "seconds"} <= found.keys()


def test_every_format_gives_a_model_whose_bytes_are_counted():
    sizes = {}
    for format in FORMATS:
        model = random_model(config_of("tiny"), format, "cpu")
        sizes[format] = bytes_read(model)
        matrix = random_matrix(3, 512, 1, format, "cpu")
        assert matrix.shape == (3, 512) and all(plane.isfinite().all() for plane in matrix.planes)
    assert sizes["Q4_K"] < sizes["Q8_0"] < sizes["F8_BLOCK"] < sizes["BF16"]  # whose vocabulary is bfloat16
    tied = config_of("tiny")
    alone = bytes_read(random_model({**tied, "tie_word_embeddings": False}, "BF16", "cpu"))
    assert alone == sizes["BF16"], "a table that is only looked up is not read"


@pytest.mark.slow
def test_all_kinds_of_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SMALL", Sizes((1, 2), (66,), (3,), (1,), (1,)))
    path = tmp_path / "gpu.json"
    run, begun = run_of(path), time.monotonic()
    with bench.quiet():
        assert run.measure() == []
    cells = json.loads(path.read_text())["cells"]
    assert not [cell for cell in cells.values() if "error" in cell], run.table()
    assert {key.split("/")[0] for key in cells} == {"decode", "prefill", "kernels", "transformers", "exactness"}
    cell = cells["decode/tiny/Q4_K/2x66"]
    assert cell["kv_bytes"] == 2 * 66 * 2 * 2 * 64 * 2 and cell["replays"] == 3
    assert cell["limit_ms"] > 0 and cell["step_ms"]["median"] > cell["rows_ms"]["median"] / 2
    shares = cells["kernels/tiny/Q4_K/1"]["kernels"]
    assert abs(sum(row["share"] for row in shares.values()) - 1) < 1e-6 and {"product", "gated", "attend"} <= set(
        shares
    )
    product = cells["exactness/tiny/Q4_K/down/1"]
    assert product["tried"] and not product["failed"] and product["cost"] is not None
    print(f"{len(cells)} cells in {time.monotonic() - begun:.0f} s")
