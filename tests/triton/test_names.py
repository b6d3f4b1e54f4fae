"""Names that Triton's generated launchers use for themselves: an argument of such a name breaks every launch on a GPU,
and neither the interpreter nor compilation notices."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

OWN = {"params", "specialization", "options", "backend", "grid", "warmup", "debug"}
MODULES = [f"ops.{name}.triton" for name in ("activation", "attention", "embedding", "linear", "moe", "norm", "rope")]


@pytest.mark.parametrize("module", [*MODULES, "graph.triton", "sampling.triton"])
def test_no_kernel_has_an_argument_of_triton_s_own_names(module):
    kernels = [value for value in vars(import_module(f"kvasir.{module}")).values() if hasattr(value, "arg_names")]
    assert kernels and not {name for kernel in kernels for name in kernel.arg_names} & OWN
