import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def run_python():
    """Runs a line of Python in a separate process, which must succeed."""

    def run(code: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)

    return run
