"""A sample of the matrix, what is asked makes a difference, and planted faults are found."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers names the tensors of random models")
pytest.importorskip("gguf", reason="gguf writes one of the models")

from kvasir.ops import native  # noqa: E402
from tests.composition import adapted_faults, faults, page  # noqa: E402, F401
from tests.composition.asked import ASKED  # noqa: E402
from tests.composition.cells import Cell, Verdict  # noqa: E402
from tests.composition.fault import FAULTS, Fault  # noqa: E402
from tests.composition.features import FEATURES, REFUSES  # noqa: E402
from tests.composition.sets import REAL, sample  # noqa: E402

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_program(cell: Cell) -> Cell:
    """On the eager executor one cell takes as long as all others here: tests/engine/test_oracle_models.py has it."""
    return Cell(cell.names - {"eager executor"})


@pytest.mark.few(9)
@pytest.mark.parametrize("cell", [*map(on_program, sample(1, seed=2027))], ids=repr)
def test_a_sample(cell):
    assert cell.run().word == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("cell", sample(3, seed=3), ids=repr)
def test_a_larger_sample(cell):
    assert cell.run().word == "equal"


@pytest.mark.few(13)
@pytest.mark.parametrize("feature", [f for f in ASKED if f.ask and f.ask({"temperature": 0.0})], ids=lambda f: f.name)
def test_features_change_answers(feature):
    """Else it would be equal to anything. A random model repeats itself, so penalties move it."""
    assert Cell([feature.name, "qwen3"]).changes_answers()


@pytest.mark.parametrize(("a", "b"), [(a, min(others)) for a, others in REFUSES.items()])
def test_a_refusal_has_a_message(a, b):
    found = Cell([a, b]).run()
    assert found.word == "refused" and found.message


@cache
def passes(cell: tuple[str, ...]) -> Verdict:
    return Cell(cell).run()


# One fault for each thing that `same` compares or a feature proves.
QUICK = {
    "a chunk sees keys of its own future",
    "the last key of a window is skipped",
    "a row of the sampler keeps what the one before asked for",
    "a penalty is lost beside a neighbour",
    "answers of a request share a seed",
    "log-probabilities of the neighbour",
    "the prefix tree claims one token more than it has",
    "all share one namespace of the prefix tree",
    "one token too many counts as computed after a preemption",
    "a token sampled while its answer is paused is lost",
    "an answer misses its last token under overlap",
    "a drafted id that is wrong is kept",
    "what a grammar allows is not heard",
    "rows in columns get each other's tokens",
    "a row has the adapter of another",
    "what the old content of a name left is found",
    "a request that moves to another engine lacks its last token",
}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else pytest.mark.slow) for f in FAULTS]
)
def test_a_planted_fault_is_found(fault):
    assert {fault.name for fault in FAULTS} >= QUICK
    found_in(fault, fault.cells[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_found_in_other_cells(fault):
    for cell in fault.cells[1:]:
        found_in(fault, cell)


def found_in(fault: Fault, cell: tuple[str, ...]) -> None:
    assert passes(cell).word == "equal"
    with pytest.raises(AssertionError) as found:
        Cell(cell).run(fault.plant)
    assert ("was not at work" in str(found.value)) == fault.proof


def test_the_page_is_of_these_features():
    """Run `make composition` after a change of features or sets."""
    text = page.PATH.read_text()
    assert all(f"| {i} | {f.name} | {f.proof} |\n" in text for i, f in enumerate(FEATURES, 1))
    assert f"| {len(FEATURES) + 1} |" not in text
    assert all(f"| {why} | {Cell(names)} | equal |\n" in text for why, names in REAL.items())
