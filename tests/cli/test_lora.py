"""`kvasir run --lora`: every adapter that is given applies."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.errors import ModelFileError
from kvasir.ops import native
from tests.e2e.test_adapters import write

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def run(*flags: str) -> str:
    ask = ["run", "kvasir-mini", "What is 23 + 45?", "--temperature", "0", "--max-tokens", "12", "-q"]
    result = CliRunner().invoke(app, [*ask, "--threads", "1", *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_adapter_that_is_given_applies(tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    red, green = (str(write(tmp_path / name, seed)) for seed, name in enumerate(("red", "green")))
    plain, one, other = run(), run("--lora", red), run("--lora", green)
    assert len({plain, one, other, run("--lora", red, "--lora", f"x={green}")}) == 4
    assert run("--lora", f"x={red}") == run("--lora-modules", f"x={red}") == one
    assert run("--lora", f"{red}:0") == plain != run("--lora", f"{red}:0.5") != one
    with pytest.raises(ModelFileError, match="no such file"):
        run("--lora", str(tmp_path / "none"))
