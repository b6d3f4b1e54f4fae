"""Weights of attention as an output: right, the same in company, and without a trace in what others get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvasir.engine.core import EngineCore  # noqa: E402 - they need torch
from kvasir.errors import ConfigError  # noqa: E402
from kvasir.plan import Join, SamplingSpec, StepPlan, Work, pack_ids  # noqa: E402
from kvasir.runner.eager_executor import EagerExecutor  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.runner.runner import Runner  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine.cores import CONFIGS, core_of, random_model  # noqa: E402
from tests.oracle import mixed_requests, plain, same, together  # noqa: E402

NAMES = ("attention.0", "attention.1")
IDS = [(11 * i * i + 5 * i + 2) % 300 for i in range(150)]
FAST = ("llama", "gemma2")  # grouped heads; a window and soft-capped scores
MORE = ("gpt2", "qwen3", "gemma3", "phi3", "mixtral", "glm-moe-dsa")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE]


def eager_core(folder: str, **options) -> EngineCore:
    """A core whose works may want weights of attention."""
    core = core_of(folder, executor="eager", dtype="float32", threads=1, **options)
    old = core.runner.executor
    made = EagerExecutor(old.model, old.cache, core.runner.capacity.max_tokens_per_step, hidden=NAMES)
    core.runner = Runner(made, core.runner.capacity, core.runner.info)
    old.close()
    return core


@pytest.mark.parametrize("kind", [*FAST, *SLOW])
def test_attention_weights_are_those_of_transformers(kind, tmp_path):
    folder = random_model(kind, tmp_path)
    runner = eager_core(folder, block_size=16).runner
    groups, blocks = len(runner.capacity.groups), tuple(range(1, 11))
    runner.execute(StepPlan(0, (Join(0, pack_ids(IDS), len(IDS), SamplingSpec()),)))
    found: dict[str, list] = {name: [] for name in NAMES}
    for step, (start, end) in enumerate([(0, 90), (90, 91), (91, len(IDS))]):
        added = ((0, blocks),) * groups if not start else ()
        work = Work(0, start, end - start, added, want_hidden=NAMES)
        (row,) = runner.sample(runner.execute(StepPlan(step, (), (work,)))).rows
        for name, data in row.hidden:
            found[name] += [np.pad(w, ((0, 0), (0, len(IDS) - end))) for w in weights(data, kind, end)]
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        expected = model(torch.tensor([IDS]), output_attentions=True).attentions
    for name, one in zip(NAMES, expected[: len(NAMES)], strict=True):
        assert np.abs(np.stack(found[name]).swapaxes(0, 1) - one[0].numpy()).max() < 1e-4


def weights(data: bytes, kind: str, end: int) -> np.ndarray:
    heads = CONFIGS[kind].get("num_attention_heads") or CONFIGS[kind]["n_head"]
    return np.frombuffer(data, np.float32).reshape(-1, heads, end)


def watched(core: EngineCore, wants: Callable[[str], bool]) -> dict[tuple[str, int, int, str], bytes]:
    """Works of requests that want it ask for weights. What they got, by request, answer, position and name."""
    seen, rows = {}, {}
    plan_, sample_ = core.scheduler.plan, core.runner.sample

    def plan() -> StepPlan | None:
        made = plan_()
        if made is None:
            return None
        by_row = {s.row: (s.request.id, s.index) for s in core.scheduler.running}
        works = [replace(w, want_hidden=NAMES) if wants(by_row[w.row][0]) else w for w in made.work]
        rows[made.step] = {work.row: (*by_row[work.row], work) for work in works}
        return replace(made, work=tuple(works))

    def sample(pending, masks, ahead):
        result = sample_(pending, masks, ahead)
        for row in result.rows:
            for name, data in row.hidden:
                request, index, work = rows[result.step][row.row]
                for i, of_row in enumerate(weights(data, "llama", work.end)):
                    seen[request, index, work.start + i, name] = of_row[:, : work.start + i + 1].tobytes()
        return result

    core.scheduler.plan, core.runner.sample = plan, sample
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_wanted_weights_change_no_row_and_are_the_same_batched(kind, tmp_path):
    folder = random_model(kind, tmp_path)
    core = eager_core(folder, max_num_seqs=1, num_blocks=40)
    requests = mixed_requests(core.info.vocab_size, 256, count=6, longest=100)
    expected = plain(core, requests)
    core = eager_core(folder, max_num_seqs=1, num_blocks=40)  # without the prefixes of the first
    alone = watched(core, lambda request: True)
    same(expected, plain(core, requests))
    core = eager_core(folder, block_size=16, num_blocks=24, max_num_seqs=5, max_chunk=48)
    company = watched(core, lambda request: request in ("r1", "r2", "r4"))
    same(expected, together(core, requests, seed=3, preempt=0.1))
    assert core.stats().preemptions > 0 and {key[0] for key in company} == {"r1", "r2", "r4"}
    assert company.items() <= alone.items()


def test_a_program_refuses_attention_weights_by_name(tmp_path):
    files = find_model(random_model("llama", tmp_path))
    with pytest.raises(ConfigError, match=r"attention\.0"):
        load_model(files, "float32", options=LoadOptions("program", hidden=("attention.0",)))
    found = load_model(files, "float32", options=LoadOptions("auto", hidden=("attention.0",)))
    assert found.trace is None and any("attention.0" in note for note in found.notes)
