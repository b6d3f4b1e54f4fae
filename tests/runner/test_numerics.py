"""The numerics version changes with whatever may change bits, and with nothing else."""

import subprocess
import sys

import pytest

from kvasir.ops import native
from kvasir.runner import numerics
from kvasir.runner.numerics import PACKAGE, ROOMS, numerics_version, sources_digest
from tests.test_arrows import checker

OPS = ("rms_norm native",)


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)


def test_the_digest_of_sources(tmp_path):
    def digest():
        return sources_digest(tmp_path, ("ops", "layers"))

    write(tmp_path, ops__a="x = 1\n", ops__norm__native="y = 2\n", layers__b="z = 3\n", serve__c="w = 4\n")
    first = digest()
    assert digest() == first == sources_digest(tmp_path, ("layers", "ops"))
    seen = {first}
    for change in ({"ops__a": "x = 2\n"}, {"layers__b": "z = 3 \n"}, {"ops__norm__native": ""}, {"ops__new": ""}):
        write(tmp_path, **change)
        assert digest() not in seen, change
        seen.add(digest())
    (tmp_path / "layers/b.py").rename(tmp_path / "layers/d.py")
    assert digest() not in seen, "a name counts"
    last = digest()
    write(tmp_path, serve__c="w = 5\n")
    (tmp_path / "ops/notes.txt").write_text("no source")
    assert digest() == last, "other rooms and other files do not"
    with pytest.raises(AssertionError):
        sources_digest(tmp_path / "nowhere", ROOMS)


def test_every_room_that_computes_counts():
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert set(ROOMS) == rooms.intersection(checker.COMPUTING) - {"device"}


def test_it_is_the_same_in_every_process():
    own = [numerics_version(executor, "a processor", OPS) for executor in ("program", "eager")]
    code = (
        "from kvasir.runner.numerics import numerics_version as version\n"
        f"print(*(version(e, 'a processor', {OPS}) for e in ('program', 'eager')))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == own
    assert len({*own}) == 2 and all(len(bytes.fromhex(digest)) == 32 for digest in own)


def test_what_an_executor_stands_on(monkeypatch):
    def versions(device, op_table=OPS):
        return [numerics_version(executor, device, op_table) for executor in ("program", "eager")]

    program, eager = versions("a processor")
    assert versions("another")[0] == program and versions("another")[1] != eager
    assert versions("a processor", ())[0] == program and versions("a processor", ())[1] != eager
    with monkeypatch.context() as patch:
        patch.setattr(numerics.torch, "__version__", "0.1")
        assert versions("a processor")[0] == program and versions("a processor")[1] != eager
    monkeypatch.setattr(numerics, "_own_sources", lambda: "others")
    assert versions("a processor")[0] != program and versions("a processor")[1] != eager


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_the_library_tells_its_sources(monkeypatch):
    assert len(bytes.fromhex(native.sources_digest())) == 32
    found = set()
    for name in native.ISAS:
        try:
            native.force_isa(name)
        except native.ConfigError:
            break
        found.add(numerics_version("program", "a processor", OPS))
    native.force_isa(None)
    assert len(found) == 1, "it does not depend on the instruction set"
    monkeypatch.setattr(native, "sources_digest", lambda: "of another build")
    assert numerics_version("program", "a processor", OPS) not in found
