import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

from kvasir import ops
from kvasir.device import Device
from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.ops.registry import OPS, MachineFacts, Op

CPU = Device("cpu", "a processor", 1, 1, 1, 1)


def double(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def make() -> Op:
    op = Op("double", double)
    op.impl("picky", on="cpu", refuses=lambda f: "" if f.dtype == "bfloat16" else f"not for {f.dtype}")(
        lambda x, factor=2.0: x * factor + 100
    )
    op.impl("plain", on="cpu")(lambda x, factor=2.0: x * factor + 200)
    op.impl("elsewhere", on="cuda")(lambda x, factor=2.0: x * factor + 300)
    return op


def test_before_a_choice_the_torch_body_runs():
    assert float(make()(torch.tensor(3.0))) == 6


def test_the_first_supported_implementation_is_chosen_and_the_table_explains_why():
    op = make()
    choice = op.choose(MachineFacts(CPU, "float32"))
    assert (choice.chosen, choice.refused) == ("plain", (("picky", "not for float32"),))
    assert "picky: not for float32" in str(choice)
    assert float(op(torch.tensor(3.0), factor=1.0)) == 203
    assert op.choose(MachineFacts(CPU, "bfloat16")).chosen == "picky"
    assert float(op(torch.tensor(3.0))) == 106


def test_an_explicit_choice_must_be_supported():
    op = make()
    assert op.choose(MachineFacts(CPU), "torch").chosen == "torch"
    assert float(op(torch.tensor(3.0))) == 6
    with pytest.raises(ConfigError, match=r"picky: not for float32.*torch, picky, plain"):
        op.choose(MachineFacts(CPU), "picky")
    with pytest.raises(ConfigError, match="elsewhere"):
        op.choose(MachineFacts(CPU), "elsewhere")


def test_choosing_for_one_device_does_not_affect_others():
    op = make()
    op.choose(MachineFacts(Device("cuda", "a GPU", 1, 1, 1, 1)))
    assert float(op(torch.tensor(3.0))) == 6


@pytest.fixture
def real_table():
    before = {name: (dict(op.chosen), dict(op.choices)) for name, op in OPS.items()}
    yield
    for name, op in OPS.items():
        op.chosen, op.choices = before.get(name, ({}, {}))


def test_the_table_names_every_op(real_table):
    names = {choice.op for choice in ops.table()}
    assert {"rms_norm", "layer_norm", "linear", "paged_attention", "store_kv", "rope", "silu"} <= names
    chosen = {choice.op: choice.chosen for choice in ops.choose(CPU, wanted={"rms_norm": "torch"})}
    assert chosen["rms_norm"] == "torch"
    assert {choice.op: choice.chosen for choice in ops.table()} == chosen
    # Its module, once imported, must not hide kvasir.ops.native.
    assert OPS["rms_norm"].impls[0].function.__module__ == "kvasir.ops.norm.native"
    best = {choice.op: choice.chosen for choice in ops.choose(CPU)}
    assert best["rms_norm"] == ("native" if native.available() else "torch")
    with pytest.raises(ConfigError, match="'rms'"):
        ops.choose(CPU, wanted={"rms": "torch"})


def test_an_implementation_is_imported_when_it_is_first_called(tmp_path, monkeypatch):
    (tmp_path / "doubled_elsewhere.py").write_text("def twice(x, factor=2.0):\n    return x * factor + 400\n")
    monkeypatch.syspath_prepend(tmp_path)
    op = Op("double", double)
    op.impl_at("doubled_elsewhere:twice", "elsewhere", on="cpu")
    assert op.choose(MachineFacts(CPU)).chosen == "elsewhere"
    assert "doubled_elsewhere" not in sys.modules
    assert float(op(torch.tensor(3.0))) == 406
    monkeypatch.delitem(sys.modules, "doubled_elsewhere")


def test_every_body_has_the_signature_of_its_declaration():
    import kvasir.ops.collective  # noqa: F401

    ops.table()
    own = [op for op in OPS.values() if op.__module__.startswith("kvasir.ops.")]
    assert len(own) > 15
    for op in own:
        assert signature(op.body) == signature(op.declaration), op.name
        assert all(signature(impl.function) == signature(op.declaration) for impl in op.impls), op.name
        assert op.__doc__ and not op.body.__doc__, op.name


RECORDS = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from kvasir import ops
from kvasir.ops.collective import all_gather
from kvasir.ops.graph import ROWS, Graph
from kvasir.ops.norm import rms_norm

ops.table()
graph = Graph()
x = graph.value(ROWS, (8,))
assert rms_norm(x, "weight", eps=1e-5).shape == (8,)
assert [node.op for node in graph.nodes] == ["rms_norm"]
assert graph.nodes[0].inputs == (x, "weight", 1e-5)
"""


def test_ops_are_declared_and_recorded_without_torch():
    path = str(Path(ops.__file__).parents[2])
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{RECORDS}"], check=True)
