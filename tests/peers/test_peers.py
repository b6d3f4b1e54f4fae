"""The bench against other engines: figures that mean what they say, turns, ratios, and reasons for what is left out."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import shutil
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import crew as crews
from benchmarks.peers import measure, probe
from benchmarks.peers.crew import Crew, sizes
from benchmarks.peers.engines import Setup, Worker
from benchmarks.peers.environments import unpack
from benchmarks.peers.http_load import load
from benchmarks.peers.limits import limit
from benchmarks.peers.places import ROOT, AnswersTooShort, PeerError
from benchmarks.peers.probe import Foreign, Rates, rates
from benchmarks.peers.prompts import prompts_of, value_of
from benchmarks.peers.report import plot, print_rows, write
from benchmarks.peers.rows import HTTP_ROW, LLAMA, OUR_SERVER, OURS, ROWS, VLLM, VLLM_SERVER, Row
from benchmarks.peers.servers import Server
from benchmarks.peers.workers.llama_bench import figures as bench_figures
from benchmarks.peers.workers.protocol import Timeline, TooShort, in_step

MINI = ROOT / "src" / "kvasir" / "assets" / "kvasir-mini"
ROW = Row("mini decode 2", "mini", "bf16", "decode", 2, 8, 6, (LLAMA, VLLM), 1.5, 3.0)
RATES = Rates(1e10, 2e11, 3e11, 1e11, "probe.c")
WORKER = """
import itertools, os, sys
from benchmarks.peers.workers.protocol import Timeline, in_step, serve

class Fake:
    def load(self, model, threads, **_):
        self.step = float(os.environ["STEP"])
        print("noise of a library")
        return {"version": "1", "flags": model}

    def answer(self, prompts, new, flash_attn=True, kv_unified=False):
        if len(prompts[0]) == 13:
            raise ValueError("thirteen")
        if len(prompts[0]) == 17:
            sys.exit()
        if stagger := int(os.environ.get("STAGGER", 0)):  # tokens that each user is ahead of the next one
            line = Timeline(len(prompts), new)
            for user, token in itertools.product(range(len(prompts)), range(new)):
                line.add((1 + token + stagger * user) * self.step, user, 1)
            return line.figures()
        return in_step(0.5, [self.step * (1 if flash_attn else 2)] * (new - 1), len(prompts))

serve(Fake())
"""


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path, tmp_path, 2, tmp_path / "logs")


def fake(name, tmp_path, step=0.001, stagger=0) -> Worker:
    """Tells that each of its steps took `step` seconds, and that each user began `stagger` steps after another."""
    environment = {"STEP": str(step), "STAGGER": str(stagger)}
    return Worker(name, [sys.executable, "-c", WORKER], environment, tmp_path / "logs" / f"{name}.log")


# -- workers -----------------------------------------------------------------------------------------------


def test_a_timeline_counts_only_while_all_users_run():
    line = Timeline(users=2, new=4)
    for time_, user in ((1, 0), (2, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1), (6, 1)):
        line.add(time_, user, 1)
    line.add(7, 0, 0)
    # From 3 (the last user began) to 5 (the first was done): four tokens; the one at 6 ran alone.
    assert line.figures() == {"first_s": 3, "decode_tokens": 4, "decode_s": 2, "total_s": 6}


def test_a_timeline_refuses_incomplete_measurements():
    short = Timeline(users=1, new=2)
    short.add(1.0, 0, 1)
    with pytest.raises(ValueError, match="not 2"):
        short.figures()
    apart = Timeline(users=2, new=2)
    for time_, user in ((1, 0), (2, 0), (3, 1), (4, 1)):
        apart.add(time_, user, 1)
    with pytest.raises(TooShort, match="only 0 of 4"):
        apart.figures()
    first = Timeline(users=2, new=1)
    first.add(1, 0, 1)
    first.add(2, 1, 1)
    assert first.figures()["first_s"] == 2


def test_steps_of_all_users_make_the_same_figures():
    assert in_step(1.0, [0.5, 0.5], users=3) == {"first_s": 1.0, "decode_tokens": 6, "decode_s": 1.0, "total_s": 2.0}


def test_a_worker_answers_refuses_and_ends(tmp_path):
    worker = fake("one", tmp_path)
    try:
        assert worker.ask("load", model="m", threads=1) == {"version": "1", "flags": "m"}
        assert worker.ask("answer", prompts=[[1, 2]], new=3)["decode_tokens"] == 2
        assert worker.peak_rss > 1 << 20
        with pytest.raises(PeerError, match="thirteen"):
            worker.ask("answer", prompts=[[0] * 13], new=3)
        assert worker.ask("answer", prompts=[[1, 2]], new=2)["decode_tokens"] == 1  # alive after an error
        with pytest.raises(PeerError, match="ended"):
            worker.ask("answer", prompts=[[0] * 17], new=3)
    finally:
        worker.close()
    assert "noise of a library" in (tmp_path / "logs" / "one.log").read_text()


def test_a_worker_leaves_no_process_and_no_file(tmp_path):
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '100']).pid, file=sys.stderr); sys.stdin.read()"
    worker = Worker("one", [sys.executable, "-uc", code], {}, tmp_path / "log")
    while not (tmp_path / "log").read_text().endswith("\n"):
        time.sleep(0.01)
    left = psutil.Process(int((tmp_path / "log").read_text()))
    worker.close()
    assert left.wait(10) is None or not left.is_running()


def test_the_result_of_llama_batched_bench():
    line = json.dumps({"pp": 16, "t_pp": 0.5, "speed_pp": 32.0, "t_tg": 2.0, "speed_tg": 4.0})
    found = bench_figures(f"loading\n{line}\n", users=2, new=4)
    assert found == {"first_s": 0.5, "decode_tokens": 8, "decode_s": 2.0, "total_s": 2.5}
    assert bench_figures("{not a result}", users=2, new=4) == {}


@pytest.mark.slow
def test_our_worker_on_the_bundled_model(tmp_path):
    command = [sys.executable, "-m", "benchmarks.peers.workers.kvasir"]
    worker = Worker(OURS, command, {"PYTHONPATH": str(ROOT / "src")}, tmp_path / "log")
    try:
        worker.ask("load", model=str(MINI), threads=1, max_model_len=128, max_num_seqs=2)
        reported = worker.ask("answer", prompts=[[5, 6, 7], [8, 9, 10]], new=24)
        assert (
            24 <= reported["decode_tokens"] <= 46
            and 0 < reported["first_s"] < reported["total_s"]
            and reported["step_seconds"] > 0
        )
        sampled = worker.ask("answer", prompts=[[5, 6, 7]], new=6, sampling=crews.SAMPLING)
        assert sampled["decode_tokens"] == 5
        assert worker.ask("answer", prompts=[[5, 6, 7]], new=6, generate=True)["total_s"] > 0
        with pytest.raises(PeerError, match="PromptTooLong"):
            worker.ask("answer", prompts=[[5] * 200], new=6)
    finally:
        worker.close()


# -- the table and its figures -----------------------------------------------------------------------------


def test_rows_have_distinct_names_and_consistent_aims():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in (*ROWS, HTTP_ROW):
        assert row.met(row.aim, row.bar) and not row.met(row.bar, row.aim), row.name
        assert (row.new > 1 or row.figure == "prefill") and row.users >= 1


def test_prompts_differ_by_round_unless_kept():
    assert prompts_of(ROW, 0, 100) == prompts_of(ROW, 0, 100) != prompts_of(ROW, 1, 100)
    kept = replace(ROW, kept=True)
    assert prompts_of(kept, 0, 100) == prompts_of(kept, 1, 100)
    assert len(prompts_of(HTTP_ROW, 0, 100)) == HTTP_ROW.users
    assert all(0 <= token < 7 for ids in prompts_of(ROW, 3, 7) for token in ids)


def test_the_value_of_a_row_by_its_figure():
    reported = {"first_s": 2.0, "decode_tokens": 30, "decode_s": 3.0, "total_s": 6.0, "step_seconds": 4.0}
    assert value_of(ROW, reported, 6) == 10
    assert value_of(replace(ROW, figure="prefill"), reported, 6) == 2 * 8 / 2.0
    assert value_of(replace(ROW, figure="total"), reported, 6) == 2 * 6 / 6.0
    assert value_of(replace(ROW, figure="overhead"), {**reported, "kernel_seconds": 3.0}, 6) == 0.25
    with pytest.raises(PeerError, match="kernels"):
        value_of(replace(ROW, figure="overhead"), reported, 6)


def test_sizes_hold_every_row():
    group = [ROW, replace(ROW, users=1, prompt=1000, new=60)]
    room = sizes(group, max_context=4096, kv_bytes=10)
    assert room["max_model_len"] >= 1060 and room["max_num_seqs"] == 2
    assert room["kv_memory"] >= 10 * max(1060, 2 * 14)
    assert sizes(group, max_context=512, kv_bytes=10)["max_model_len"] == 512


def test_limits_are_bytes_and_multiply_adds():
    decode = limit(ROW, MINI, RATES)
    assert decode and limit(ROW, MINI, replace(RATES, bytes_per_s=2e10)) == pytest.approx(2 * decode)
    prefill = replace(ROW, figure="prefill", prompt=512)
    reads = limit(prefill, MINI, RATES)
    assert reads and limit(prefill, MINI, replace(RATES, bf16_macs_per_s=2e11)) == pytest.approx(2 * reads)
    assert limit(prefill, MINI, replace(RATES, bf16_macs_per_s=0.0)) is None
    assert limit(replace(ROW, figure="http"), MINI, RATES) is None
    four_bits, eight_bits = replace(prefill, kind="Q4_K_M"), replace(prefill, kind="Q8_0")
    assert limit(eight_bits, MINI, RATES) == pytest.approx(2 * reads)
    assert limit(four_bits, MINI, RATES) == pytest.approx(3 * reads)


@pytest.mark.slow
def test_the_machine_report_has_its_rates():
    gave = rates(1)
    assert gave.bytes_per_s > 1e8 and gave.method in probe.METHODS
    assert all(
        math.isfinite(rate) and rate >= 0 for rate in (gave.int8_macs_per_s, gave.int4_macs_per_s, gave.bf16_macs_per_s)
    )


def test_without_a_compiler_the_project_probes(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "SOURCE", Path(shutil.copy(probe.SOURCE, tmp_path)))  # not the one compiled before
    monkeypatch.setenv("PATH", str(tmp_path))
    gave = rates(1)
    assert gave.method == "kvasir.cli.bench.probe" and gave.bytes_per_s > 1e8 and gave.int8_macs_per_s == 0


def test_foreign_load_excludes_the_measured_programs(monkeypatch):
    busy = iter([(100.0, 50.0), (110.0, 58.0)])  # 10 s of processors pass, 8 of them busy
    own = iter([5.0, 11.0])  # 6 of them ours
    monkeypatch.setattr(probe, "machine_seconds", lambda: next(busy))
    monkeypatch.setattr(probe, "cpu_seconds", lambda pids: next(own))
    assert Foreign([1]).share() == pytest.approx(0.2)


def test_own_time_is_counted():
    before, end = probe.cpu_seconds([os.getpid()]), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert probe.cpu_seconds([os.getpid()]) - before >= 0.15
    assert probe.cpu_seconds([2**22 + 1]) == 0


# -- whole rows --------------------------------------------------------------------------------------------


def run_row(row, steps, setup, monkeypatch, rounds=3, stagger=0):
    """A row with fake workers; steps: seconds of a step, by engine. The engines left out there are missing. stagger: of
    ours alone."""
    monkeypatch.setattr(Setup, "file", lambda self, engine, row: MINI)
    monkeypatch.setattr(
        crews, "start", lambda name, setup: fake(name, setup.folder, steps[name], stagger if name == OURS else 0)
    )
    monkeypatch.setattr(crews, "MISSING", {n: (lambda s, n=n: None if n in steps else f"no {n}") for n in row.peers})
    monkeypatch.setattr(crews, "sizes", lambda group, longest, kv: {"kv_memory": 1})
    monkeypatch.setattr(measure, "rates", lambda threads: RATES)
    monkeypatch.setattr(measure, "PAUSE", 0.0)
    crew, reported = Crew(setup), []
    try:
        return measure.compare(row, crew, [row], rounds, reported.append), reported
    finally:
        crew.close()


def test_a_row_is_held_against_the_better_peer(setup, monkeypatch, capsys, tmp_path):
    found, reported = run_row(ROW, {OURS: 0.001, LLAMA: 0.002, VLLM: 0.004}, setup, monkeypatch)
    assert reported == [] and len(found["rounds"]) == 3
    assert found["ratios"][LLAMA]["median"] == pytest.approx(2) and found["ratios"][VLLM]["median"] == pytest.approx(4)
    assert found["value"] == pytest.approx(2) and found["meets_bar"] and not found["meets_aim"]
    # llama.cpp is asked in four ways; without flash attention the fake takes twice as long.
    tried = found["engines"][LLAMA]["tried"]
    assert len(tried) == 4 and found["engines"][LLAMA]["options"]["flash_attn"] is True
    assert found["limit"] > 0 and found["engines"][OURS]["peak_rss"] > 0
    for one in found["rounds"]:
        assert set(one["foreign_cpu"]) == {OURS, LLAMA, VLLM} and one["machine"]["bytes_per_s"] == 1e10
    result = {"rows": [found, {**found, "figure": "overhead", "value": 0.03, "meets_aim": True}]}
    write(tmp_path / "r" / "one.json", result)
    assert json.loads((tmp_path / "r" / "one.json").read_text())["rows"][0]["value"] == found["value"]
    print_rows(result["rows"])
    assert "mini decode 2" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot(tmp_path / "one.png", result["rows"])
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_the_number_of_new_tokens_grows_until_all_users_overlap(setup, monkeypatch):
    """Prompts are read one after the other, and a fast machine is done with the first answer by then."""
    row = replace(ROW, users=4, new=16, peers=(LLAMA,))
    found, reported = run_row(row, {OURS: 0.001, LLAMA: 0.004}, setup, monkeypatch, rounds=1, stagger=12)
    assert found["new"] == 64 and len(reported) == 2 and "repeating all engines with 64 new tokens" in reported[1]
    assert found["value"] == pytest.approx(4) and found["engines"][LLAMA]["tried"]
    with pytest.raises(AnswersTooShort, match="users"):
        run_row(row, {OURS: 0.001}, setup, monkeypatch, rounds=1, stagger=60)


@pytest.mark.parametrize("old", [False, True])
def test_sources_are_unpacked_within_their_folder(old, tmp_path, monkeypatch):
    """old: as Python before 3.11.4, whose extractall knows no filter."""
    if old:
        extract = tarfile.TarFile.extractall
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: extract(self, path))

    def archive(name: str, **fields) -> Path:
        entry = tarfile.TarInfo(name)
        for field, value in fields.items():
            setattr(entry, field, value)
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as made:
            made.addfile(entry, io.BytesIO(b"abc"[: entry.size]))
        return tmp_path / "a.tar.gz"

    unpack(archive("p/one.txt", size=3), tmp_path / "out")
    assert (tmp_path / "out" / "p" / "one.txt").read_bytes() == b"abc"
    unpack(archive("p/link", type=tarfile.SYMTYPE, linkname="one.txt"), tmp_path / "out")
    assert (tmp_path / "out" / "p" / "link").read_bytes() == b"abc"
    for hostile in (
        {"name": "../beside.txt", "size": 3},
        {"name": "p/away", "type": tarfile.SYMTYPE, "linkname": "../../.."},
        {"name": "p/away", "type": tarfile.LNKTYPE, "linkname": "../a.tar.gz"},
        {"name": "p/pipe", "type": tarfile.CHRTYPE},
    ):
        with pytest.raises((PeerError, tarfile.TarError)):
            unpack(archive(**hostile), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz", "out"]


def test_a_missing_peer_is_skipped_with_a_message(setup, monkeypatch, capsys):
    found, reported = run_row(ROW, {OURS: 0.001, VLLM: 0.001}, setup, monkeypatch, rounds=1)
    assert reported == [f"  without {LLAMA}: no {LLAMA}"] and list(found["ratios"]) == [VLLM]
    alone, _ = run_row(ROW, {OURS: 0.001}, setup, monkeypatch, rounds=1)
    assert alone["value"] is None and alone["meets_bar"] is None and alone["values"][OURS]["median"] > 0
    print_rows([found, alone])
    assert "below" in capsys.readouterr().out


def test_an_engine_that_counts_no_kernels_has_no_overhead(setup, monkeypatch):
    with pytest.raises(PeerError, match="kernels"):
        run_row(replace(ROW, figure="overhead", peers=()), {OURS: 0.001}, setup, monkeypatch)


def test_over_http_slow_streams_fail_a_row():
    runs = [
        {
            "values": {"a": 30.0, "b": 10.0},
            "limit": None,
            "figures": {"a": {"tpot_p99_s": slow}, "b": {"tpot_p99_s": 2}},
        }
        for slow in (1, 1, 3)
    ]
    assert measure.summary(HTTP_ROW, ["a", "b"], runs)["meets_bar"]
    assert not measure.summary(HTTP_ROW, ["a", "b"], [*runs[2:], *runs[2:]])["meets_bar"]


# -- HTTP --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serve_streams(reply: bytes, chunked: bool):
    """A server that answers every request with the same body: its address, and what it was asked."""
    asked: list[dict] = []
    tasks = []

    async def answer(reader, writer):
        tasks.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % (b"Transfer-Encoding: chunked" if chunked else b"Server: a"))
        with contextlib.suppress(ConnectionError):
            for i in range(0, len(reply), 7):  # pieces that cut through the lines
                piece = reply[i : i + 7]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(b"0\r\n\r\n" if chunked else b"")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    async with server:
        yield f"http://{host}:{port}", asked
        await asyncio.gather(*tasks)


def events(*wires: dict) -> bytes:
    return b"".join(b"data: " + json.dumps(wire).encode() + b"\n\n" for wire in wires) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("chunked", [True, False])
async def test_streams_are_timed(chunked):
    text = {"choices": [{"text": "a"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    async with serve_streams(events(text, text, usage), chunked) as (url, asked):
        reported = await load(url, "m", [[1, 2], [3, 4], [5, 6]], new=3, users=2)
    assert (
        reported["tokens_per_s"] > 0
        and 0 < reported["tpot_p50_s"] <= reported["tpot_p99_s"]
        and reported["ttft_p50_s"] > 0
    )
    assert sorted(wire["prompt"] for wire in asked) == [[1, 2], [3, 4], [5, 6]] and asked[0]["stream"]


async def test_streams_that_fail_are_no_figures():
    usage = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}}
    for reply, reason in (
        (events(usage), "not 3"),
        (events({"error": "full"}), "full"),
        (b"", "token"),
        (b"data: {broken\n\n", "broke off"),
    ):
        async with serve_streams(reply, True) as (url, _):
            with pytest.raises(PeerError, match=reason):
                await load(url, "m", [[1]], new=3, users=1)


@pytest.mark.slow
def test_our_server_is_measured(setup, monkeypatch):
    monkeypatch.setattr(Setup, "file", lambda self, engine, row: MINI)
    row = replace(HTTP_ROW, users=2, prompt=8, new=4)
    server = Server(OUR_SERVER, setup, row)
    try:
        reported = server.measure(row, prompts_of(row, 0, 100), row.new)
    finally:
        server.close()
    assert reported["tokens_per_s"] > 0 and server.facts["ready_s"] > 0
    assert (setup.logs / f"{OUR_SERVER}.log").stat().st_size > 0


def test_an_absent_server_is_an_error(setup):
    with pytest.raises(PeerError, match="make peers"):
        Server(VLLM_SERVER, setup, HTTP_ROW)
