"""The oracle on real and on random models: whatever runs beside a request, its tokens and logprob bits stay.

The eager executor takes ten times as long as a program: of threads and of overlap it has one value a test."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.sched.sequence import Sequence
from tests.engine.cores import ENCODERS, core_of, random_model
from tests.models.families import SWITCHED
from tests.oracle import NANS, Answer, Answers, embed_requests, free_blocks, mixed_requests, plain, same, together
from tests.sched.one_by_one import OneByOne

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MODELS = [
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe", "qwen3-next"),
]
# One for each mechanism.
FEW = [
    "mini",
    "gpt2",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3-next",
    "granite-hybrid",
    "deepseek-v2",
]
FAST = [(model, "bfloat16", "program") for model in FEW]
FAST += [("gemma3", "float32", "program"), ("llama", "bfloat16", "eager")]
SLOW = [(model, "bfloat16", "program") for model in MODELS if model not in FEW]
SLOW += [(model, "float32", "program") for model in ["mini", *MODELS] if model != "gemma3"]
SLOW += [(model, "bfloat16", "eager") for model in ("mini", "mistral", "gpt2", "gemma2", "qwen3-moe", "qwen3-next")]
SLOW += [(model, "float32", "eager") for model in ("llama", "qwen3", "gemma3", "mixtral", "qwen3-next")]
SLOW += [("glm-moe-dsa", "float32", "eager"), ("rwkv7", "float32", "eager")]
SLOW += [
    (model, "bfloat16", "program") for model in ("qwen3-5-tiled", "gpt-bigcode", "rwkv7", *SWITCHED) if model not in FEW
]
CASES = [pytest.param(case, id="-".join(case)) for case in FAST]
CASES += [pytest.param(case, id="-".join(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(folder, options, requests, their plain answers)."""
    model, dtype, executor = request.param
    options = {"dtype": dtype, "executor": executor}
    folder = "kvasir-mini" if model == "mini" else random_model(model, tmp_path_factory.mktemp(model))
    core = core_of(folder, **options, threads=1, max_num_seqs=1, num_blocks=40)
    assert core.info.executor == executor
    count = 6 if executor == "eager" else 10
    requests = mixed_requests(core.info.vocab_size, 256, count=count, longest=150)
    return folder, options, requests, plain(core, requests)


# Of what does not differ on the eager executor, one test for all is slow.
mostly_programs = pytest.mark.parametrize(
    "case",
    [pytest.param(*c.values, id=c.id, marks=[pytest.mark.slow] if "eager" in c.values[0] else c.marks) for c in CASES],
    indirect=True,
)


@pytest.mark.few(5)
def test_batched_answers_equal_single_ones(case):
    folder, options, requests, expected = case
    core = core_of(folder, **options, threads=1)
    same(expected, together(core, requests))
    assert core.stats().steps < sum(len(a.tokens) for a in expected.values()), "nothing was batched"


@mostly_programs
def test_rows_that_only_decode_are_columns(case):
    """Beside rows with log-probabilities, which are not."""
    folder, options, requests, expected = case
    bare = [replace(r, params=replace(r.params, logprobs=None, prompt_logprobs=None)) for r in requests[:-3]]
    expected = {key: Answer(a.tokens, reason=a.reason) for key, a in expected.items()}
    small = {"block_size": 16, "num_blocks": 30, "max_num_batched_tokens": 61, "threads": 2}
    core = core_of(folder, **options, **small, overlap=options["executor"] == "program", speculate="off")
    decoded: list[int] = []
    core.plan_listener = lambda plan: decoded.append(len(plan.decodes))
    got = together(core, [*bare, *requests[-3:]], seed=7, preempt=0.1)
    same(expected, {key: Answer(a.tokens, reason=a.reason) for key, a in got.items()})
    assert sum(decoded) > 20, "no row was a column"


@pytest.mark.few(4)
@mostly_programs
def test_odd_chunks_and_small_blocks(case):
    folder, options, requests, expected = case
    core = core_of(folder, **options, threads=3, block_size=16, max_chunk=13, max_num_batched_tokens=37)
    same(expected, together(core, requests, seed=2))


@pytest.mark.few(4)
@mostly_programs
def test_forced_preemption_and_cancelled_neighbours(case):
    folder, options, requests, expected = case
    core = core_of(folder, **options, threads=2, block_size=32, max_num_batched_tokens=61, overlap=True)
    assert core.runner.overlaps
    same(expected, together(core, requests, seed=3, preempt=0.5, cancel=("r1", "r4")), leave_out=("r1", "r4"))
    assert core.stats().preemptions > 5


def overlaps(folder: str, executor: str) -> tuple[bool, ...]:
    """Both on the real model; then the harder one."""
    return (False, True) if folder == "kvasir-mini" else (executor == "program",)


class Drafts(OneByOne):
    """The plain answers, with a wrong id here and there."""

    def __init__(self, expected: Answers, seed: int):
        self.expected, self.chance = expected, random.Random(seed)

    def waits(self, sequences) -> bool:
        return self.chance.random() < 0.5

    def guess(self, seq: Sequence, most: int) -> list[int]:
        answer = self.expected[seq.request.id, seq.index].tokens[len(seq.tokens) - seq.prompt_len :]
        wrong = self.chance.choice([0.0, 0.3, 1.0])
        return [(t + 1) % 300 if self.chance.random() < wrong else t for t in answer[: self.chance.randrange(7)]]


@pytest.mark.few(4)
@mostly_programs
def test_drafts_change_no_answer(case):
    folder, options, requests, expected = case
    small = {"block_size": 16, "num_blocks": 30, "max_num_seqs": 5, "max_num_batched_tokens": 61}
    for overlap in overlaps(folder, options["executor"]):
        core = core_of(folder, Drafts(expected, 6), **options, **small, threads=2, overlap=overlap)
        same(expected, together(core, requests, seed=6, preempt=0.1))
        scheduler = core.scheduler
        assert 0 < scheduler.accepted_tokens < scheduler.drafted_tokens


@pytest.mark.few(4)
@mostly_programs
def test_a_tiny_pool_changes_no_answer(case):
    folder, options, requests, expected = case
    small = {"block_size": 16, "max_num_seqs": 6, "max_chunk": 48, "speculate": "off"}
    preemptions = 0
    for overlap in overlaps(folder, options["executor"]):
        for blocks in (12, 13):  # windows and chance decide which is tiny enough
            core = core_of(folder, **options, **small, num_blocks=blocks, threads=1, overlap=overlap)
            same(expected, together(core, requests, seed=4))
            preemptions += core.stats().preemptions
    if not all(group.kind.keeps_starts for group in core.runner.cache.groups):  # two blocks of each are enough
        assert preemptions > 0, "no pool was tiny enough"


@pytest.mark.few(4)
def test_nan_in_foreign_blocks_stays_there(case):
    """Blocks that were never written, and released blocks, are full of NaN."""
    folder, options, requests, expected = case
    core = core_of(folder, **options, threads=1, block_size=16, num_blocks=40, max_num_seqs=8)
    cache = core.runner.cache
    cache.fill_(float("nan"))

    def poison(core) -> None:
        for group, free in enumerate(free_blocks(core)):
            for tensor in (tensor for _, own in cache.of_group(group) for tensor in own):
                tensor[:, :, sorted(free)] = NANS.get(str(tensor.dtype), float("nan"))

    same(expected, together(core, requests, seed=5, each_step=poison))


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", ["bert", *ENCODERS])
def test_embeddings_do_not_depend_on_the_batch(tmp_path, kind):
    folder = random_model(kind, tmp_path)
    requests = embed_requests(300)
    expected = plain(core_of(folder, threads=1, max_num_seqs=1), requests)
    core = core_of(folder, threads=2, block_size=16)
    same(expected, together(core, requests))
    assert all(a.embedding for a in expected.values())


# Models that transformers has no code for: those of the tests, or another kind's weights under the published names.
APART = {
    "nomic-bert": "nomic",
    "jina-bert": "jina",
    "new": ("gte", {"model_type": "new", "architectures": ["NewModel"]}),
    "llama-bidirec": (
        "llama",
        {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "avg"},
    ),
}


def model_apart(name: str, folder: Path) -> str:
    from tests.models import test_published_encoders as apart

    made = APART[name]
    if isinstance(made, str):
        config, make, _ = apart.MODELS[made]
        return str(apart.saved(config, make(), folder))
    base, published = made
    random_model(base, folder)
    config = json.loads((folder / "config.json").read_text()) | published
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_embeddings_of_models_without_transformers_code(tmp_path, name):
    folder = model_apart(name, tmp_path)
    requests = embed_requests(97, longest=100)
    expected = plain(core_of(folder, threads=1, max_num_seqs=1), requests)
    same(expected, together(core_of(folder, threads=2, block_size=16), requests))
    assert all(a.embedding for a in expected.values())


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-1b"])
def test_two_layers_of_real_shapes(shape, tmp_path):
    """Real widths and the full vocabulary, so that tails and long sums are seen."""
    folder = random_model(shape, tmp_path)
    core = core_of(folder, dtype="bfloat16", threads=1, max_num_seqs=1, max_model_len=512)
    requests = mixed_requests(core.info.vocab_size, 256, count=4, longest=70)
    expected = plain(core, requests)
    core.runner.close()
    core = core_of(folder, dtype="bfloat16", threads=2, max_model_len=512, max_chunk=29, block_size=16)
    same(expected, together(core, requests, preempt=0.1))
