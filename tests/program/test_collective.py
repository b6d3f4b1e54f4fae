"""Where ranks meet: behind every sum of which a rank has a part, before anything else is added to it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.layers.linear import Linear  # noqa: E402
from kvasir.layers.moe import MoE  # noqa: E402
from kvasir.parallel import Mesh  # noqa: E402
from kvasir.runner.load import load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.program.made import SMALL, Company, bits, loaded, program_of  # noqa: E402
from tests.program.test_adapters import difference, eager_hidden, made  # noqa: E402

IDS = [(17 * i * i + 3 * i + 4) % 300 for i in range(40)]
AGREE = 1e-5


@pytest.fixture(scope="module", params=[kind for kind in SMALL if kind != "bert"])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, loaded(request.param, folder)


def meetings(model) -> int:
    """Sums over ranks in a forward; a mixture's experts meet together."""
    parts = [part for _, part in model.walk()]
    within = {id(e.down) for moe in parts if isinstance(moe, MoE) for e in moe.experts}
    reducing = [p for p in parts if isinstance(p, Linear) and p.reduces and id(p) not in within]
    return len(reducing) + sum(isinstance(p, MoE) for p in parts)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_rank_alone_changes_no_bits(case, threads):
    _, model = case
    seen: list[tuple[tuple[int, ...], np.dtype]] = []
    plain = program_of(model)
    program = program_of(model, threads=threads, fill=np.nan, collective=lambda x: seen.append((x.shape, x.dtype)))
    for p in (plain, program):
        p.set_adapter(1, made(model.model, 1, 4))
    for adapter in (0, 1):
        (expected,) = Company(plain, [IDS], [adapter]).step((0, 0, len(IDS)))
        company = Company(program, [IDS], [adapter])
        seen.clear()
        found = [company.step((0, 0, 30))[0], company.step((0, 30, 10))[0]]
        assert np.array_equal(bits(np.concatenate(found)), bits(expected))
        assert meetings(model.model) == 4
        width = expected.shape[1]
        assert seen == [((30, width), np.float32)] * 4 + [((10, width), np.float32)] * 4
    if program.vocab:
        seen.clear()
        assert np.array_equal(bits(program.logits_of([9]).copy()), bits(plain.logits_of([39]).copy()))
        assert not seen


class Doubling(Mesh):
    def all_reduce(self, x):
        return 2.0 * x


def test_what_comes_back_goes_on(case):
    """Two ranks with the same parts: eager's mesh says what that means."""
    folder, model = case
    eager = load_model(find_model(str(folder)), "float32").model
    for _, part in eager.walk():
        if hasattr(part, "mesh"):
            part.mesh = Doubling()

    def double(x: np.ndarray) -> None:
        x *= 2.0

    (plain,) = Company(program_of(model), [IDS]).step((0, 0, len(IDS)))
    (found,) = Company(program_of(model, threads=2, collective=double), [IDS]).step((0, 0, len(IDS)))
    (expected,) = eager_hidden(eager, [IDS], [0])
    assert difference(found, expected) < AGREE
    # Gemma 2 and 3 normalise what comes back: twice as much is the same, but for an epsilon.
    assert "Gemma" in model.architecture or difference(plain, expected) > 1000 * AGREE


def test_an_error_of_the_collective_is_the_steps_own(tmp_path):
    model, calls = loaded("llama", tmp_path), []

    def fail(x: np.ndarray) -> None:
        calls.append(x.shape)
        raise ConnectionError("a rank is gone")

    program = program_of(model, threads=2, collective=fail)
    company = Company(program, [IDS])
    for step in (1, 2):
        with pytest.raises(ConnectionError, match="a rank is gone"):
            company.step((0, 0, 8))
        assert len(calls) == step  # the rest of the step asks no more
