"""Names that Triton's generated launchers use for themselves: an argument of such a name breaks every launch on a GPU,
and neither the interpreter nor compilation notices."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import kvasir

OWN = {"params", "specialization", "options", "backend", "grid", "warmup", "debug"}
ROOT = Path(kvasir.__file__).parent
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("triton*.py"))


def test_the_modules_of_kernels_are_found():
    assert {"ops.linear.triton", "ops.attention.triton", "sampling.triton_draw", "graph.triton"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_no_kernel_has_an_argument_of_triton_s_own_names(module):
    kernels = [value for value in vars(import_module(f"kvasir.{module}")).values() if hasattr(value, "arg_names")]
    assert not {name for kernel in kernels for name in kernel.arg_names} & OWN
