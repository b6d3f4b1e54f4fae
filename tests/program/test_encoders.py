"""Encoders as programs: traced, equal to eager, and with the same bits whatever runs beside a text."""

import numpy as np
import pytest

from kvasir.ops import native as door

if not door.available():
    pytest.skip("the native library is not built", allow_module_level=True)

torch = pytest.importorskip("torch")

from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL  # noqa: E402
from kvasir.runner.load import load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine.cores import ENCODERS  # noqa: E402
from tests.models import driver  # noqa: E402
from tests.program.made import Company, Driver, bits, loaded, program_of  # noqa: E402

LENGTH = 90
IDS = [(7 * i * i + 3 * i + 1) % 290 + 5 for i in range(LENGTH)]
AGREE = 1e-5  # max |a - b| / max |b|: two orders of summation in float32


@pytest.fixture(scope="module", params=ENCODERS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, loaded(request.param, folder)


def whole_texts(company: Company, *texts: list[int]) -> list[np.ndarray]:
    """Hidden rows of all texts, each in its own row, in one step."""
    for piece, (row, ids) in zip(company.program.pieces, enumerate(texts), strict=False):
        piece.row, piece.flags, piece.start, piece.count = row, PIECE_BIDIRECTIONAL, 0, len(ids)
    company.program.run(len(texts), max(map(len, texts)))
    ends = np.cumsum([len(ids) for ids in texts])
    return np.split(company.program.hidden(ends[-1]).copy(), ends[:-1])


@pytest.mark.few(6)
def test_agrees_with_eager_in_float32(case):
    folder, model = case
    assert model.trace is not None
    eager = load_model(find_model(str(folder)), "float32").model
    cache = driver.make_cache(eager, blocks=8)
    (expected,) = driver.step(eager, cache, [(IDS, 0, np.arange(1, 8, dtype=np.int32))], causal=False)
    found = Driver(program_of(model, fill=np.nan), IDS).hidden(0, LENGTH, bidirectional=True)
    assert np.abs(found - expected.numpy()).max() < AGREE * np.abs(found).max()


@pytest.mark.few(12)
@pytest.mark.parametrize("isa", door.ISAS)
def test_the_same_bits_alone_and_together_on_any_instruction_set(case, isa):
    _, model = case
    texts = [IDS[:1], IDS[3:43], IDS[10:27]]
    alone = [Driver(program_of(model), ids).hidden(0, len(ids), bidirectional=True) for ids in texts]
    try:
        door.force_isa(isa)
    except Exception as error:
        pytest.skip(str(error))
    try:
        together = whole_texts(Company(program_of(model, threads=2, fill=np.nan, blocks=31), texts), *texts)
    finally:
        door.force_isa(None)
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(bits(a), bits(b))
