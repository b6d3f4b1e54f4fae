"""Bench: figures that add up, limits that are limits, files that others can read."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.shapes import SHAPES, tensor_shapes, write
from kvasir.cli.app import app
from kvasir.cli.bench import bench
from kvasir.cli.bench.limits import Machine, limits
from kvasir.cli.bench.measure import (
    MODES,
    TIMES,
    Shape,
    Timing,
    arrivals,
    kv_bytes,
    loads,
    make_requests,
    of_steps,
    percentiles,
    throughput,
)
from kvasir.cli.bench.plots import plot
from kvasir.cli.bench.probe import ForeignLoad, Probe, probe
from kvasir.cli.bench.report import BenchRun, ReportRow, as_dict, best_probe, of_dict, print_report, summarize
from kvasir.cli.model_facts import TokenWork
from kvasir.cli.show import json_text
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.fake import FakeEngine
from kvasir.engine.front import Front
from kvasir.errors import ConfigError, InvalidRequest, KvasirError
from kvasir.ops import native
from kvasir.runner.load import LoadOptions, load_model
from kvasir.statistics import EngineStats
from kvasir.types import ModelInfo
from kvasir.weights.find import find_model
from tests.cli.running import VOCABULARY, run

STEP = 0.002  # seconds that a step of the fake engine takes
FAKE = {"vocab_size": VOCABULARY, "step_seconds": STEP, "num_blocks": 200}


@pytest.fixture(scope="module")
def probed() -> Probe:
    return probe("cpu", "float32", 1)


@pytest.fixture(autouse=True)
def _one_probe(monkeypatch, probed):
    """A measured probe, taken only once: it takes longer than the measurements of these tests."""
    monkeypatch.setattr("kvasir.cli.bench.probe", lambda *_: probed)


def fake_llm(**more) -> AsyncLLM:
    return AsyncLLM("kvasir-mini", engine=FakeEngine(**{**FAKE, **more}), threads=1)


# -- whole runs --------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_each_mode(mode, capsys):
    shape = Shape(input_len=20, output_len=5, num_prompts=1 if mode == "latency" else 4, request_rate=200.0)
    reported = bench(fake_llm(), mode, shape, repeats=2)
    shown = capsys.readouterr().out
    for name, row in reported["figures"].items():
        values = [r["figures"][name] for r in reported["runs"]]
        assert len(values) == 2 and name in shown
        assert 0 < row["min"] == min(values) <= row["median"] <= max(values) == row["max"]
    for r in reported["runs"]:
        assert 0 <= r["foreign_cpu"] <= 1 and r["probe"]["bytes_per_s"] > 1e8
    requests = {"latency": 1, "load": 1 + 2 + 4}.get(mode, 4)
    assert all(len(run["samples"][name]) == requests for run in reported["runs"] for name in TIMES)
    figures = reported["runs"][0]["figures"]
    assert not {"step_kernel_ms", "read_gb_per_s"} & figures.keys(), "nothing counts kernels here"
    if mode == "latency":
        assert figures["tpot_s"] >= STEP
        assert figures["e2e_s"] == pytest.approx(figures["ttft_s"] + 4 * figures["tpot_s"])
        assert reported["figures"]["tpot_s"]["limit"] > 0
    elif mode == "load":
        assert [name for name in figures if "output" in name] == [f"at_{n}_output_tokens_per_s" for n in (1, 2, 4)]
        assert reported["figures"]["at_4_output_tokens_per_s"]["limit"] > 0
    else:
        assert figures["output_tokens_per_s"] * figures["duration_s"] == pytest.approx(20)
        assert figures["prompt_tokens_per_s"] * figures["duration_s"] == pytest.approx(80)


@pytest.mark.slow
def test_the_files_hold_all_that_is_needed_to_judge_the_figures(tmp_path, capsys):
    result = bench(fake_llm(), "latency", Shape(input_len=20, output_len=5), repeats=1, out=tmp_path)
    [file] = tmp_path.glob("*.json")
    reported = json.loads(file.read_text())
    assert reported == json.loads(json_text(result))
    assert reported["mode"] == "latency" and reported["shape"]["input_len"] == 20 and len(reported["runs"]) == 1
    assert reported["machine"]["cores"] and reported["machine"]["cpu"] and reported["software"]["torch"]
    assert reported["methods"]["bandwidth"] and reported["work"]["weight_bytes"] > 0
    assert reported["options"]["threads"] == 1 and reported["model"]["architecture"] == "fake"
    assert [p.suffix for p in tmp_path.glob("*.png")] == [".png"]
    assert str(file) in capsys.readouterr().out


def test_a_run_without_matplotlib_writes_json_and_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench(fake_llm(), "latency", Shape(4, 1), repeats=1, out=tmp_path)
    assert "pip install" in capsys.readouterr().err
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    [file] = tmp_path.iterdir()
    assert "tpot_s" not in json.loads(file.read_text())["figures"], "one token has no time per later token"


def test_a_shape_beyond_the_context_is_refused_before_measuring():
    with pytest.raises(InvalidRequest, match="context"):
        bench(fake_llm(), "throughput", Shape(1000, 5, 4), repeats=1)


def test_a_failed_request_is_no_measurement():
    def fault(plan):
        if any(work.count > 10 for work in plan.work):
            raise RuntimeError("a broken kernel")

    with pytest.raises(KvasirError, match="broken kernel"):
        bench(fake_llm(fault=fault), "throughput", Shape(20, 5, 3), repeats=1)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="written"):
        bench(fake_llm(), "latency", Shape(4, 2), repeats=1, out=tmp_path / "file" / "inside")


@pytest.mark.slow
def test_the_command_on_the_real_model(tmp_path):
    options = "--mode throughput --num-prompts 2 --input-len 16 --output-len 3 --repeats 1 --threads 1"
    done = run("kvasir.cli", "bench", "kvasir-mini", *options.split(), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    reported = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert reported["model"]["name"] == "kvasir-mini" and reported["options"]["threads"] == 1 == reported["threads"]
    assert reported["figures"]["output_tokens_per_s"]["median"] > 0
    assert "of limit" in done.stdout and "multiply-adds" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")
@pytest.mark.parametrize(
    "mode", ["latency", *(pytest.param(m, marks=pytest.mark.slow) for m in MODES if m not in ("latency", "load"))]
)
def test_kernels_and_gaps_of_a_program(mode, capsys):
    llm = AsyncLLM("kvasir-mini", threads=1, executor="program", quantize="q8", speculate="off")
    reported = bench(llm, mode, Shape(20, 400, 1 if mode == "latency" else 2), repeats=1)
    figures = reported["runs"][0]["figures"]
    step = figures["step_kernel_ms"] + figures["step_gap_ms"]
    assert figures["step_kernel_ms"] > 0 and 0 < figures["step_gap_share"] < 1
    assert figures["step_gap_share"] == pytest.approx(figures["step_gap_ms"] / step)
    loaded = load_model(find_model("kvasir-mini"), options=LoadOptions("program", quantize="q8"))
    packed = sum(loaded.formats.values())  # the head is the table: all matrices are read
    assert reported["work"]["weight_bytes"] == packed < loaded.bytes
    if mode == "latency":
        assert step == pytest.approx(1e3 * figures["tpot_s"])
        kv = 2 * 4 * 2 * 64 * 2  # keys and values, layers, heads, values of a head, bytes
        assert figures["read_mb_per_step"] == pytest.approx((packed + 220 * kv) / 1e6)
        assert figures["read_gb_per_s"] * figures["tpot_s"] == pytest.approx(figures["read_mb_per_step"] / 1e3)
        limit = reported["figures"]["read_gb_per_s"]["limit"]
        assert limit == pytest.approx(reported["runs"][0]["probe"]["bytes_per_s"] / 1e9)
    assert "step_gap_ms" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--mode", "speed"], ["--mode", "serve", "--request-rate", "-1"]])
def test_wrong_options_are_refused(options):
    error = CliRunner().invoke(app, ["bench", "kvasir-mini", *options]).exception
    assert isinstance(error, ConfigError) and error.hint


# -- requests and times ------------------------------------------------------------------------------------


async def test_requests_are_the_same_each_time_and_never_shared_between_runs():
    front = Front(FakeEngine(**FAKE))
    await front.start()
    shape = Shape(8, 4, 3)
    first, again, other = (make_requests(front, shape, 3, run) for run in (0, 0, 1))
    assert [r.prompt_ids for r in first] == [r.prompt_ids for r in again]
    assert not {r.prompt_ids for r in first} & {r.prompt_ids for r in other}
    assert all(len(r.prompt_ids) == 8 and r.params.max_tokens == 4 and r.params.ignore_eos for r in first)
    await front.stop()


async def test_sharing_steps_shows_in_the_throughput():
    """Eight rows at once take the steps of one."""
    front = Front(FakeEngine(**{**FAKE, "step_seconds": 0.01}))
    await front.start()
    one = await throughput(front, Shape(4, 10, 1), 0)
    eight = await throughput(front, Shape(4, 10, 8), 1)
    assert eight["output_tokens_per_s"] > 3 * one["output_tokens_per_s"]
    await front.stop()


def test_arrivals_are_poisson():
    shape = Shape(1, 1, num_prompts=4000, request_rate=50.0)
    gaps = np.diff(arrivals(shape, 0))
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as an exponential distribution has it
    assert (arrivals(shape, 0) == arrivals(shape, 0)).all() and (arrivals(shape, 0) != arrivals(shape, 1)).any()
    assert not arrivals(Shape(1, 1, 5), 0).any()


def test_times_of_a_request():
    timing = Timing(begun=1.0, first=1.5, last=3.5, first_tokens=2, tokens=6)
    assert (timing.ttft, timing.tpot, timing.e2e) == (0.5, 0.5, 2.5)
    assert Timing(begun=0.0, first=1.0, last=1.0, first_tokens=1, tokens=1).tpot is None


def test_percentiles_by_hand():
    assert percentiles("x", list(range(101))) == {"x_p50_s": 50.0, "x_p90_s": 90.0, "x_p99_s": 99.0}


def test_steps_between_two_counts_by_hand():
    before = EngineStats(steps=3, kernel_seconds=1.0)
    after = replace(before, steps=7, kernel_seconds=1.6)
    reported = of_steps(before, after, 0.8)
    assert reported == pytest.approx({"step_kernel_ms": 150.0, "step_gap_ms": 50.0, "step_gap_share": 0.25})
    assert of_steps(before, before, 0.0) == {} == of_steps(before, replace(before, steps=9), 1.0)


def test_a_window_bounds_what_a_token_attends_to():
    info = ModelInfo("m", "m", (), 1, 1000, kv_bytes_per_token=((0, 10), (16, 100)))
    assert kv_bytes(info, 8) == 8 * 110 and kv_bytes(info, 500) == 500 * 10 + 16 * 100


# -- limits ------------------------------------------------------------------------------------------------


def machine(weights=1000, kv=2, body=100, head=10, bandwidth=1e3, macs=1e3, rows=4) -> Machine:
    return Machine(TokenWork(weights, body, head), kv, Probe(bandwidth, macs), rows)


def test_limits_by_hand():
    reported = limits(machine(macs=0), "latency", Shape(10, 11))  # arithmetic not known
    assert reported["ttft_s"] == 1.0  # 1000 bytes at 1000 bytes a second
    assert reported["tpot_s"] == pytest.approx((1000 + 15.5 * 2) / 1000)
    assert reported["e2e_s"] == pytest.approx(reported["ttft_s"] + 10 * reported["tpot_s"])
    bound = limits(machine(bandwidth=1e9), "latency", Shape(10, 11))
    assert bound["ttft_s"] == pytest.approx((10 * 100 + 10) / 1000)
    assert bound["output_tokens_per_s"] == pytest.approx(1000 / 110)


def test_drafts_leave_later_tokens_without_a_limit():
    drafting = replace(machine(), drafts=True)
    assert not limits(drafting, "throughput", Shape(10, 11, 4)) and not limits(drafting, "load", Shape(10, 11, 4))
    plain = limits(machine(), "latency", Shape(10, 11))
    assert limits(drafting, "latency", Shape(10, 11)) == {k: plain[k] for k in ("ttft_s", "prompt_tokens_per_s")}
    assert set(limits(drafting, "serve", Shape(10, 11))) == {f"ttft_p{p}_s" for p in (50, 90, 99)}


@given(
    count=st.integers(1, 40),
    rows=st.integers(1, 16),
    input_len=st.integers(1, 500),
    output_len=st.integers(1, 500),
)
def test_a_batch_is_at_best_as_fast_as_full_steps_and_at_worst_as_its_rows_alone(count, rows, input_len, output_len):
    shape = Shape(input_len, output_len, count)
    many, one = (
        limits(machine(rows=rows), "throughput", replace(shape, num_prompts=n))["duration_s"] for n in (count, 1)
    )
    alone = limits(machine(), "latency", shape)["e2e_s"]
    assert max(1, count / rows) * one * 0.999 <= many <= count * alone * 1.001 and one <= alone * 1.001


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-0.6b", 596.0e6), ("llama-1b", 1235.8e6)])
def test_the_shapes_are_those_of_the_published_models(name, parameters, tmp_path):
    shapes = dict(tensor_shapes(SHAPES[name]))
    assert sum(map(prod, shapes.values())) == pytest.approx(parameters, rel=1e-3)
    small = {
        **SHAPES[name],
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    write({**small, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, tmp_path)
    loaded = load_model(find_model(tmp_path))  # refuses what is missing, of another shape, or left over
    assert loaded.architecture.lower() == SHAPES[name]["model_type"]


@pytest.mark.parametrize(("mode", "panels"), [("latency", 2), ("load", 2), ("serve", 2)])
def test_a_plot_has_the_panels_that_its_figures_fill(mode, panels, tmp_path):
    """Times at different loads are no distribution. What the JSON has is enough to draw it again."""
    names = [f"at_{n}_output_tokens_per_s" for n in (1, 2)] if mode == "load" else ["ttft_p50_s", "tpot_p50_s"]
    samples = {name: [0.1, 0.2, 0.4] for name in TIMES}
    runs = [BenchRun(dict.fromkeys(names, 1.0), Probe(1.0, 1.0), 0.0, samples)]
    rows = summarize(runs, dict.fromkeys(names, 2.0 if mode == "load" else 0.5))
    assert of_dict(json.loads(json_text(as_dict(rows, runs, {})))) == (rows, runs)
    for path, chosen in ((tmp_path / "all.svg", ()), (tmp_path / "one.svg", ("limit",))):
        plot(path, "title", rows, runs, chosen)
    assert [(tmp_path / name).read_text().count('id="axes_') for name in ("all.svg", "one.svg")] == [panels, 1]


def test_loads():
    assert [loads(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_shares_of_the_limit():
    probed = Probe(1.0, 1.0)
    runs = [BenchRun({"a_s": a, "b_per_s": 1 / a}, probed, 0.0) for a in (4.0, 2.0, 8.0)]
    time, rate = summarize(runs, {"a_s": 1.0, "b_per_s": 1.0})
    assert (time.median, time.min, time.max, time.of_limit) == (4.0, 2.0, 8.0, 0.25)
    assert rate.of_limit == 0.25 and not rate.is_above
    assert ReportRow("c", 1.0, 1.0, 1.0, None).of_limit is None


@pytest.mark.parametrize("row", [ReportRow("a_s", 1.0, 1.0, 1.0, 1.1), ReportRow("b_per_s", 1.1, 1.0, 1.2, 1.0)])
def test_a_figure_above_its_limit_has_no_share_of_it(row, capsys):
    assert row.is_above and row.of_limit is None
    print_report("title", [row], [BenchRun({row.name: 1.0}, Probe(1.0, 0.0), 0.5)])
    shown = capsys.readouterr().out
    assert "above" in shown and "slowed the probe" in shown and "%" not in shown.splitlines()[3]


def test_the_limit_is_that_of_the_best_probe():
    runs = [BenchRun({"a_s": 1.0}, Probe(*rates), 0.0) for rates in ((3.0, 1.0), (2.0, 4.0))]
    assert best_probe(runs) == Probe(3.0, 4.0)


def test_the_probe_measures_plausible_rates(probed):
    assert 1e8 < probed.bytes_per_s < 1e13 and 1e7 < probed.macs_per_s < 1e15


@pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")
def test_the_rate_of_arithmetic_is_known_for_each_instruction_set():
    """Wider vectors and smaller numbers never multiply slower; their ratios are those of the instructions."""
    rates = {}
    try:
        for isa in native.ISAS:
            with suppress(ConfigError):
                native.force_isa(isa)
                rates[isa] = [native.multiply_rate(numbers, 1) for numbers in native.NUMBERS]
    finally:
        native.force_isa(None)
    assert rates.pop("portable") == [0.0, 0.0, 0.0]
    assert all(min(found) > 1e8 and found[0] > found[2] for found in rates.values())


@pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")
def test_reads_take_any_size():
    for nbytes in (1 << 12, (1 << 20) + 8, (40 << 20) + 24):
        assert native.read_rate(np.ones(nbytes // 8), 2) > 1e8
    with pytest.raises(ValueError, match="float64"):
        native.read_rate(np.ones(8, np.float32), 1)


def test_the_share_of_foreign_load_is_between_0_and_1():
    load = ForeignLoad()
    sum(i * i for i in range(2_000_000))
    assert 0.0 <= load.share() <= 1.0


def test_a_model_is_named_as_for_other_commands(monkeypatch, tmp_path):
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    made = CliRunner().invoke(app, ["pull", str(find_model("kvasir-mini").root), "--name", "mine"])
    assert made.exit_code == 0, made.output
    lengths = ["--repeats", "1", "--input-len", "8", "--output-len", "4", "--num-blocks", "8"]
    done = CliRunner().invoke(app, ["bench", "mine", *lengths, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [path for path in tmp_path.glob("mine*.json")], [*tmp_path.iterdir()]
