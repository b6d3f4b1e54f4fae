"""What docs/architecture.md says of the files that a step and a change go through."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.ops import native

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_a_decode_step_goes_through_few_files():
    pytest.importorskip("torch")
    run = [sys.executable, str(ROOT / "scripts" / "trace_step.py")]
    last = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()[-1]
    assert int(last.split()[0]) <= 25, last


def touches(kind: str) -> set[str]:
    """The files that the page's row of a new thing of this kind names."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {kind} |")).split("|")[3]
    named = re.findall(r"`([\w/.]+)`", row)
    return {name if name.startswith("csrc/") else f"{name}.py" for name in named}


def files_with(pattern: str) -> set[str]:
    """Of the package and the kernels, those with a line that matches."""
    roots = ((ROOT / "src" / "kvasir", "*.py", ""), (ROOT / "csrc", "*.[ch]*", "csrc/"))
    return {
        f"{prefix}{path.relative_to(root).as_posix()}"
        for root, glob, prefix in roots
        for path in root.rglob(glob)
        if not {"tests", "fuzz"} & set(path.parts[len(root.parts) :]) and re.search(pattern, path.read_text(), re.I)
    }


@pytest.mark.parametrize(("kind", "pattern"), [("sampler", "top_?n_?sigma"), ("model", "phi3")])
def test_the_architecture_page_names_every_file_that_mentions_an_example(kind, pattern):
    assert touches(kind) == files_with(pattern)


def test_a_dialect_touches_its_package_its_row_and_its_field_names():
    outside = {file for file in files_with(r"\btgi\b") if not file.startswith("serve/dialects/tgi/")}
    assert outside == {"serve/dialects/__init__.py", "fields.py"}


EXAMPLES = re.findall(r"`(\w+)`, `(tests/[\w/]+\.py)` \((\d+) lines\)", PAGE)


@pytest.mark.parametrize(("name", "path", "lines"), EXAMPLES)
def test_examples_have_the_line_counts_stated_on_the_page(name, path, lines):
    text = (ROOT / path).read_text()
    assert f"class {name}(" in text and len(text.splitlines()) == int(lines)


def test_each_kind_has_an_example():
    assert len(EXAMPLES) == 2 and all(touches(kind) for kind in ("sampler", "model", "cache kind", "executor"))
