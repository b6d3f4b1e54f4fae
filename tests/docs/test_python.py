"""The Python blocks of the pages run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs import PAGES, Block, blocks
from tests.e2e.server import serving

ADDRESS = "http://127.0.0.1:8000"
SHOWN = [block for page in PAGES for block in blocks(page) if block.language.split()[:1] == ["python"]]
# A block with the word `notest` needs a download or is a part of a program.
RUN = [block for block in SHOWN if "notest" not in block.language]


@pytest.fixture(scope="module")
def base():
    with serving("kvasir-mini") as (base, _):
        yield base


def test_most_blocks_are_run():
    assert len(RUN) > 10 and len(RUN) > 0.5 * len(SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs(block: Block, base, tmp_path):
    code = block.code.replace(ADDRESS, base)
    run = [sys.executable, "-W", "error::SyntaxWarning", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
