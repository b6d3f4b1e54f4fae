"""Doctor: a real examination of this machine, and what it says where something is wrong."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from kvasir.cli import doctor
from kvasir.ops import native
from kvasir.weights import find
from tests.cli.running import run


@pytest.mark.slow
def test_a_real_examination():
    done = run("kvasir.cli", "doctor", "--json")
    reported = json.loads(done.stdout)
    assert done.returncode == int(any(p["fatal"] for p in reported["problems"])), done.stderr
    assert reported["machine"]["cores"] >= 1 and reported["machine"]["memory_bytes"] > 0
    assert reported["software"]["torch"] and reported["software"]["kvasir"]
    assert {o["op"] for o in reported["ops"]} >= {"rms_norm", "linear", "paged_attention"}
    assert [s["dtype"] for s in reported["starts"]][1] == "float32"
    for start in reported["starts"]:
        assert not start["error"] and start["grade"] in ("exact", "close") and start["executor"]
        assert len(bytes.fromhex(start["numerics"])) == 32
    assert set(reported["extras"]) == set(doctor.EXTRAS)
    assert reported["native"]["available"] or reported["native"]["reason"]


def test_the_doctor_lists_only_extras_of_the_package():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "docs", "fuzz"}
    code = "\n".join(path.read_text() for folder in ("src", "examples") for path in (root / folder).rglob("*.py"))
    for extra, (distribution, _) in doctor.EXTRAS.items():
        assert any(wanted.startswith(distribution) for wanted in extras[extra])
        assert re.search(rf"^\s*(import|from) {distribution}\b", code, re.MULTILINE), f"{distribution} is used nowhere"


@pytest.fixture
def quick(monkeypatch):
    """The engine's starts, which take the time, are left out."""
    good = doctor.Start("bfloat16", "exact", "eager", "cpu", ("fine",), numerics="0123456789abcdef" * 4)
    monkeypatch.setattr(doctor, "start", lambda dtype: good)


def test_models_are_asked_how_they_write_calls(tmp_path, quick):
    """Of a real folder, whose chat template alone decides."""
    shutil.copytree(find.find_model("kvasir-mini").root, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    )
    facts, problems = doctor.examine([str(tmp_path / "model"), "kvasir-mini", str(tmp_path / "missing")])
    reported = {each["model"]: each for each in facts["formats"]}
    assert reported[str(tmp_path / "model")]["tools"] == "none"
    assert any("<call look_up" in p.message and "--tool-format" in p.next and not p.fatal for p in problems)
    assert reported[str(tmp_path / "missing")]["fault"]


def messages() -> dict[str, doctor.Problem]:
    return {problem.message: problem for problem in doctor.examine()[1]}


def find_problem(text: str) -> doctor.Problem:
    found = [problem for message, problem in messages().items() if text in message]
    assert len(found) == 1, messages()
    assert found[0].next
    return found[0]


def test_missing_kernels_are_a_note(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "PATH", tmp_path / "absent.so")
    assert not find_problem("native CPU kernels").fatal


def shown_of(capsys, **facts) -> str:
    reported, problems = doctor.examine()
    doctor.show({**reported, "native": {**reported["native"], **facts}}, problems)
    return capsys.readouterr().out


def test_the_cpu_kernels_are_reported(quick, capsys):
    best = {"available": True, "reason": "", "isa": "avx512", "lower": ["portable", "avx2"], "forced": False}
    shown = shown_of(capsys, **best)
    assert "program executor on" in shown and "avx512 kernels" in shown
    assert "KVASIR_ISA=portable or avx2" in shown
    shown = shown_of(capsys, **{**best, "isa": "portable", "lower": [], "forced": True})
    assert "portable kernels" in shown and "KVASIR_ISA" in shown and "selects lower" not in shown
    shown = shown_of(capsys, **{**best, "available": False, "reason": "no compiler"})
    assert "no program executor: no compiler" in shown and "KVASIR_ISA" not in shown


@pytest.mark.slow
def test_a_forced_instruction_set_is_reported():
    done = run("kvasir.cli", "doctor", "--json", KVASIR_ISA="portable")
    reported = json.loads(done.stdout)["native"]
    if not reported["available"]:
        pytest.skip(reported["reason"])
    assert (reported["isa"], reported["lower"], reported["forced"]) == ("portable", [], True)


def test_a_missing_package_is_fatal(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEEDED", [*doctor.NEEDED, "no-such-package-at-all"])
    assert find_problem("no-such-package-at-all").fatal
    with pytest.raises(SystemExit) as ended:
        doctor.run(json=False)
    shown = capsys.readouterr().out
    assert ended.value.code == 1 and "MISSING" in shown and "try: " in shown


def test_an_engine_that_does_not_start_is_fatal(monkeypatch, tmp_path):
    monkeypatch.setattr(find, "ASSETS", tmp_path)
    problems = messages()
    assert sum("engine" in message and p.fatal for message, p in problems.items()) == 2


def test_no_folder_for_a_socket_is_fatal(quick, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/absent")
    assert find_problem("socket").fatal


def test_a_grade_that_is_not_exact_is_reported(monkeypatch):
    close = doctor.Start("float32", "close", "eager", "cuda")
    monkeypatch.setattr(doctor, "start", lambda dtype: close)
    found = [p for p in doctor.examine()[1] if "self-test" in p.message]
    assert found and not found[0].fatal


def test_a_self_test_that_was_not_run_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "start", lambda dtype: doctor.Start("float32", "untested", "program", "cpu"))
    assert not find_problem("the self-test was not run in float32").fatal


def test_the_report_is_readable_text(quick, capsys):
    found = doctor.examine()
    doctor.show(*found, verbose=False)
    short = capsys.readouterr().out
    assert "[bench]" in short and "rms_norm" not in short and "msgspec" not in short
    doctor.show({"software": {"numpy": "2", "msgspec": ""}}, [], verbose=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "MISSING" in line] == [
        ["msgspec", "MISSING"]
    ]
    doctor.show({"software": {"kvasir": "1", "commit": None, "torch": None}}, [doctor.Problem("x", "y")], verbose=False)
    shown = capsys.readouterr().out
    assert "commit" not in shown and "torch" not in shown and "1 problem\n" in shown
    doctor.show(*found)
    shown = capsys.readouterr().out
    for text in ("processor", "memory", "rms_norm", "[bench]", "on cpu, grade exact, numerics 0123456789abcdef\n"):
        assert text in shown
