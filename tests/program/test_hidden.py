"""Hidden states by name: of programs and of eager, alone and in company; and names that are not there."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.errors import ConfigError  # noqa: E402
from kvasir.ops.graph import CannotTrace  # noqa: E402
from kvasir.plan import Capacity, Join, SamplingSpec, StepPlan, Work, pack_ids  # noqa: E402
from kvasir.program.lower import lower  # noqa: E402
from kvasir.program.marshal import prepared  # noqa: E402
from kvasir.program.trace import trace  # noqa: E402
from kvasir.runner.eager_executor import EagerExecutor  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.runner.program_executor import ProgramExecutor  # noqa: E402
from kvasir.runner.runner import Runner  # noqa: E402
from kvasir.types import ModelInfo  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine.cores import random_model  # noqa: E402
from tests.layers.parts import batch_of  # noqa: E402
from tests.models.driver import make_cache, piece  # noqa: E402
from tests.program.made import Company, bits, loaded, only, program_of  # noqa: E402

NAMES = ("layers.0", "layers.1", "last")
IDS = [(11 * i * i + 5 * i + 2) % 300 for i in range(60)]
AGREE = 1e-5  # max |a - b| / max |b|


@pytest.fixture(scope="module", params=only("llama", "gpt2", "gemma3n", "mixtral", "qwen3-next", "deepseek-v2", "bert"))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, loaded(request.param, folder, hidden=NAMES)


def eager_states(model) -> dict[str, np.ndarray]:
    cache = make_cache(model, blocks=8)
    batch = batch_of([piece(cache, IDS, 0, np.arange(1, 8, dtype=np.int32))], cache, wanted=frozenset(NAMES))
    with torch.inference_mode():
        last = model.forward(batch.tokens_T, batch)
    return {name: rows[: len(IDS)].numpy() for name, rows in {**batch.hidden, "last": last}.items()}


@pytest.mark.few(3)
def test_hidden_states_agree_with_eager(case):
    folder, model = case
    program = program_of(model, fill=np.nan)
    company = Company(program, [IDS])
    (last,) = company.step((0, 0, len(IDS)))
    for name, expected in eager_states(load_model(find_model(str(folder)), "float32").model).items():
        found = program.export(name, len(IDS))
        agree = 200 * AGREE if model.architecture == "Zamba2" else AGREE  # see ROUNDING of the families
        assert np.abs(found - expected).max() / np.abs(expected).max() < agree
        assert (name == "last") == np.array_equal(found, last) or model.architecture == "Bert"


def test_hidden_states_have_the_same_bits_batched_and_in_chunks(case):
    _, model = case
    for name in NAMES:
        (whole,) = Company(program_of(model), [IDS]).step((0, 0, len(IDS)), export=name)
        company, parts, start = Company(program_of(model, threads=2, fill=np.nan), [IDS[::-1], IDS]), [], 0
        for count in (17, 1, 30, len(IDS) - 48):
            parts.append(company.step((0, 0, 3), (1, start, count), export=name)[1])
            start += count
        assert np.array_equal(bits(whole), bits(np.concatenate(parts)))


def test_unwanted_hidden_states_cost_nothing(case):
    _, model = case
    plain = lower(trace(model.model), 48, 8, prepared)
    wanted = lower(trace(model.model, ["layers.0"]), 48, 8, prepared)
    assert not plain.exports and set(wanted.exports) == {"layers.0"}
    assert plain.arena <= lower(model.trace, 48, 8, prepared).arena
    assert len(plain.instructions) == len(wanted.instructions)


def test_logits_do_not_change_hidden_states(case):
    _, model = case
    program = program_of(model)
    if not program.vocab:
        return
    Company(program, [IDS]).step((0, 0, len(IDS)))
    before = {name: program.export(name, len(IDS)).copy() for name in NAMES}
    program.logits_of(range(32))
    assert all(np.array_equal(rows, program.export(name, len(IDS))) for name, rows in before.items())


@pytest.mark.parametrize("executor", ["program", "eager", "auto"])
@pytest.mark.parametrize("name", ["layers.2", "layers.-1", "layers", "first", "attention.2"])
def test_an_unknown_output_name_is_refused_at_load(tmp_path, executor, name):
    files = find_model(random_model("llama", tmp_path))
    with pytest.raises(ConfigError, match=rf"{name!r}.*layers\.0 .*layers\.1\b.*last.*attention"):
        load_model(files, "float32", options=LoadOptions(executor, hidden=("last", name)))


def test_a_forward_that_names_no_layers_cannot_be_traced_for_them(tmp_path):
    model = loaded("llama", tmp_path).model
    plain = model.forward

    def forward(tokens, batch):
        batch.after_layer = lambda layer, x: None
        return plain(tokens, batch)

    model.forward = forward
    trace(model, ["last"])
    with pytest.raises(CannotTrace, match=r"layers\.0"):
        trace(model, ["layers.0"])


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_runners_give_what_work_wants(tmp_path, executor):
    files = find_model(random_model("llama", tmp_path))
    model = load_model(files, "float32", options=LoadOptions(executor, hidden=("layers.0", "last")))
    groups = program_of(load_model(files, "float32", options=LoadOptions("program"))).cache.groups
    capacity = Capacity(4, 64, 128, 16, groups, (20,), 300)
    info = ModelInfo("", "", (), 300, 128)
    if executor == "program":
        made = ProgramExecutor(model.model, program_of(model))
    else:
        made = EagerExecutor(model.model, make_cache(model.model, blocks=20), 64, hidden=model.hidden)
    runner = Runner(made, capacity, info)
    joined = tuple(Join(i, pack_ids(IDS[:20]), 20, SamplingSpec()) for i in range(3))
    tables = tuple(((0, (2 * i + 1, 2 * i + 2)),) for i in range(3))
    works = (
        Work(0, 0, 20, tables[0], sample=True, want_hidden=("last", "layers.0")),
        Work(1, 0, 20, tables[1]),
        Work(2, 0, 12, tables[2], want_hidden=("layers.0",)),
    )
    first, none, part = runner.sample(runner.execute(StepPlan(0, joined, works))).rows
    rest = Work(2, 12, 8, sample=True, read=(12, 19), want_hidden=("layers.0",))
    (tail,) = runner.sample(runner.execute(StepPlan(1, (), (rest,)))).rows
    assert first.tokens == tail.tokens and not first.error
    assert none.hidden == () and [name for name, _ in first.hidden] == ["last", "layers.0"]
    whole = dict(first.hidden)["layers.0"]
    assert len(whole) == 20 * 64 * 4 and dict(part.hidden)["layers.0"] + dict(tail.hidden)["layers.0"] == whole
    expected = eager_states(load_model(files, "float32").model)
    for name, data in first.hidden:
        found = np.frombuffer(data, np.float32).reshape(20, 64)
        assert np.abs(found - expected[name][:20]).max() / np.abs(expected[name]).max() < AGREE
    unwished = Work(0, 20, 1, want_hidden=("layers.1",)), Work(2, 20, 1, sample=True)
    refused, sound = runner.sample(runner.execute(StepPlan(2, (), unwished))).rows
    assert "layers.1 (Work.want_hidden)" in refused.error and sound.tokens
    runner.close()
