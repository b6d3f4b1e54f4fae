"""Programs against the eager executor, and against themselves in other pieces."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.ops import native as door  # noqa: E402
from kvasir.ops.graph import CannotTrace  # noqa: E402
from kvasir.ops.registry import Op  # noqa: E402
from kvasir.program.trace import trace  # noqa: E402
from kvasir.runner.load import load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.models import driver  # noqa: E402
from tests.models.driver import logits_of, step  # noqa: E402
from tests.models.state_spaces import ROUNDING  # noqa: E402
from tests.program.made import EACH, SMALL, Driver, loaded, program_of, random_model  # noqa: E402

LENGTH = 90  # beyond the windows of the tiny models
IDS = [(7 * i * i + 3 * i + 1) % 300 for i in range(LENGTH)]
AGREE = 1e-5  # max |a - b| / max |b|: two orders of summation in float32


@pytest.fixture(scope="module", params=EACH)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, loaded(request.param, folder)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.few(24)
@pytest.mark.parametrize("kind", SMALL)
def test_agrees_with_eager_in_float32(kind, tmp_path):
    folder = tmp_path
    model = loaded(kind, folder)
    eager = load_model(find_model(str(folder)), "float32").model
    driven = Driver(program_of(model, fill=np.nan), IDS)
    if kind == "bert":
        cache = driver.make_cache(eager, blocks=8)
        (expected,) = step(eager, cache, [(IDS, 0, np.arange(1, 8, dtype=np.int32))], causal=False)
        found = driven.hidden(0, LENGTH, bidirectional=True)
        assert difference(found, expected.numpy()) < AGREE
        return
    expected = logits_of(eager, IDS).numpy()
    found = driven.logits(0, LENGTH)
    assert difference(found, expected) < ROUNDING.get(kind, 1) * AGREE
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.few(24)
@pytest.mark.parametrize("isa", door.ISAS)
def test_the_same_bits_in_any_pieces_on_any_instruction_set(case, isa):
    kind, _, model = case
    if kind == "bert":
        return  # whole texts are never cut
    best = Driver(program_of(model), IDS).logits(0, LENGTH)
    try:
        door.force_isa(isa)
    except Exception as error:
        pytest.skip(str(error))
    try:
        driven, parts, start = Driver(program_of(model, threads=2, fill=np.nan, block_size=32), IDS), [], 0
        for count in (1, 2, 30, 17, 1, LENGTH - 51):
            parts.append(driven.logits(start, count))
            start += count
    finally:
        door.force_isa(None)
    assert np.array_equal(best.view(np.uint32), np.concatenate(parts).view(np.uint32))


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.02), ("float16", 0.003), ("int8", 0.04)])
def test_narrow_caches_stay_within_their_error(case, kv_dtype, bound):
    kind, _, model = case
    if kind not in ("llama", "gemma2", "qwen3", "gpt2"):
        return  # an expert more or less chosen is no measure of a cache's error
    plain = Driver(program_of(model), IDS).logits(0, LENGTH)
    found = Driver(program_of(model, kv_dtype=kv_dtype), IDS).logits(0, LENGTH)
    error = np.sqrt(np.square(found - plain).mean() / np.square(plain).mean())
    assert 0 < error < bound


def test_an_untraceable_forward_has_a_reason(tmp_path):
    model = loaded("llama", tmp_path).model
    plain = model.forward
    model.forward = lambda tokens, batch: plain(tokens, batch)[0]
    with pytest.raises(CannotTrace, match="indexes"):
        trace(model)
    model.forward = lambda tokens, batch: torch.relu(plain(tokens, batch))
    with pytest.raises(CannotTrace, match="unsupported"):
        trace(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda x: x.relu(), "the forward uses .relu"), (Op("new", lambda x: x * 2.0), "no kernel for new")],
)
def test_a_model_that_cannot_be_traced_runs_on_eager(tmp_path, monkeypatch, change, reason):
    from kvasir.models.llama import Llama
    from tests.engine.cores import core_of

    monkeypatch.setattr(Llama, "logits", lambda self, hidden: self.head(change(hidden)))
    folder = random_model("llama", tmp_path)
    core = core_of(folder, executor="auto")
    assert core.info.executor == "eager"
    assert any(f"eager executor: {reason}" in line for line in core.summary)
    with pytest.raises(Exception, match="cannot run"):
        core_of(folder, executor="program")


def test_a_named_library_of_another_version_is_the_reason_for_eager(tmp_path, monkeypatch):
    from tests.engine.cores import core_of

    folder, named = random_model("llama", tmp_path), tmp_path / "named.so"
    named.symlink_to(door.PATH)
    monkeypatch.setattr(door, "ABI_VERSION", door.ABI_VERSION + 1)
    monkeypatch.setattr(door, "PATH", named)
    monkeypatch.setattr(door, "NAMED", str(named))
    core = core_of(folder, executor="auto")
    assert core.info.executor == "eager"
    [note] = [line for line in core.summary if "eager executor: " in line]
    assert "have ABI" in note and f"KVASIR_LIBRARY names {named}" in note and "unset" in note
    with pytest.raises(Exception, match="have ABI"):
        core_of(folder, executor="program")


def test_work_that_cannot_be_is_refused_before_memory_is_touched(tmp_path):
    program = program_of(loaded("llama", tmp_path), blocks=4)
    driven = Driver(program, IDS)
    for start, count, what in ((0, 600, "rows"), (-1, 2, "not have"), (500, 20, "not have"), (0, 0, "have")):
        with pytest.raises(AssertionError, match=what):
            driven.hidden(start, count)
    driven.table[1] = 4
    with pytest.raises(AssertionError, match="block id"):
        driven.hidden(0, 40)
    driven.table[1] = 0
    with pytest.raises(AssertionError, match="block id"):
        driven.hidden(0, 40)
