"""The digest that the native library carries follows its sources (csrc/digest.cmake)."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "csrc" / "digest.cmake"
CMAKE = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")


def digest_of(folder: Path, *names: str) -> str:
    header = folder / "generated" / "digest.h"
    files = "|".join(str(folder / name) for name in names)
    assert CMAKE
    subprocess.run([CMAKE, f"-DFILES={files}", f"-DHEADER={header}", "-P", str(SCRIPT)], check=True)
    define, name, digest = header.read_text().split()
    assert (define, name) == ("#define", "KVASIR_SOURCES_DIGEST")
    return digest.strip('"')


def test_a_byte_of_a_source(tmp_path):
    (tmp_path / "a.cpp").write_text("int a; // ; [not a list]\n")
    (tmp_path / "b.h").write_text("int b;\n")
    lines = [f"{hashlib.sha256((tmp_path / n).read_bytes()).hexdigest()} {n}\n" for n in ("a.cpp", "b.h")]
    first = digest_of(tmp_path, "a.cpp", "b.h")
    assert first == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert digest_of(tmp_path, "a.cpp") != first
    (tmp_path / "b.h").write_text("int c;\n")
    assert digest_of(tmp_path, "a.cpp", "b.h") != first
