import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def run_python():
    """Run a line of Python in a process of its own, which must end well."""

    def run(code: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)

    return run
