"""Models are built and traced where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvasir
from kvasir.ops import native

ROOT = Path(__file__).parents[2]
# The modules of the eager executor, beside the bodies of the ops.
EAGER = (
    *("ops.attention.plan", "ops.attention.weights", "ops.gated_delta.plan", "ops.norm.native", "ops.products"),
    *("layers.batch", "layers.kv_cache", "layers.rope_tensors", "layers.tensors"),
)

BLOCKED = f"""
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing them raises ImportError
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
"""

TRACES = """
import numpy as np
from kvasir.layers.linear import Linear
from kvasir.layers.embedding import Embedding
from kvasir.layers.places import HostPlace
from kvasir.models.registry import model_class_for
from kvasir.ops.linear.packed import pack_rows
from kvasir.program.trace import trace
from tests.models.families import FAMILIES, config_of

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
BERT = {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 96,
}

def fill(module):
    for name, shape in module.expects().items():
        if isinstance(module, Linear | Embedding) and name.endswith("weight"):
            segments = getattr(module, "segments", 1)
            rows = np.zeros(shape, np.float32).view(np.uint8)
            module.hold(name, pack_rows("F32", rows, *shape, segments))
        else:
            module.put(name, np.zeros(shape, np.float32), HostPlace())

for config in (GPT2, BERT, *(config_of(name) for name in FAMILIES if name != "qwen3-next")):
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    for _, module in model.walk():
        fill(module)
    found = trace(model)
    assert found.hidden.width == model.config.width and len(found.ends) == len(model.layers)
    assert (found.logits is None) == (config is BERT)
"""


def modules() -> list[str]:
    """The modules of ops, layers and models, except those of the eager executor and of Triton's kernels."""
    package = Path(kvasir.__file__).parent
    paths = [path for part in ("ops", "layers", "models") for path in (package / part).rglob("*.py")]
    names = [".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    triton = [name for name in names if name in ("ops.launch", "ops.kernels", "ops.compiling") or ".triton" in name]
    return [name for name in sorted(names) if not name.endswith(".body") and name not in (*EAGER, *triton)]


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", BLOCKED + code], check=True)


def test_ops_layers_and_models_are_imported_without_torch():
    assert len(modules()) > 40
    run(f"from importlib import import_module\nfor name in {modules()!r}:\n    import_module('kvasir.' + name)\n")


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_a_forward_is_traced_without_torch():
    run(TRACES)
