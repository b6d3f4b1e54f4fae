"""Sequences that a runner computes with drafts of its own, by hand-written plans: what a scheduler would do, without
one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvasir.config import DeviceFacts, EngineOptions, ModelFacts
from kvasir.memory import Footprint
from kvasir.plan import Capacity, Decodes, Join, SamplingSpec, StepPlan, Work, pack_ids, unpack_ids
from kvasir.resolve import resolve
from kvasir.runner.load import LoadedModel
from kvasir.runner.make import cache_groups_of, make_runner
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo, Task

BLOCK = 16
LONGEST = 256


def runner_of(
    loaded: LoadedModel, *, rows: int = 4, tokens: int = 64, longest: int = LONGEST, device: str = "cpu", **options: Any
) -> Runner:
    """A runner over a cache of one table of `longest` tokens for each row."""
    blocks = 1 + rows * -(-longest // BLOCK)
    given = EngineOptions(
        model="m", kv_dtype="float32", block_size=BLOCK, num_blocks=blocks, max_num_seqs=rows, threads=1,
        max_model_len=longest, max_num_batched_tokens=tokens, **options,
    )  # fmt: skip
    groups, vocab = cache_groups_of(loaded, BLOCK, "float32"), loaded.model.config.vocab_size
    facts = ModelFacts(longest, "float32", False, groups, executor=loaded.executor, footprint=lambda _: Footprint())
    config = resolve(given, facts, DeviceFacts("cpu", 1 << 34, 1, 1, 1 << 34))
    for rope in loaded.ropes():
        rope.serve(longest)
    capacity = Capacity(
        rows, tokens, longest, BLOCK, groups, config.num_blocks, vocab, max_drafted=16,
    )  # fmt: skip
    return make_runner(loaded, config, capacity, ModelInfo("m", "m", (Task.GENERATE,), vocab, longest), device)


@dataclass
class Lane:
    """A sequence in a row. propose: ids asked for after each step. chunk: tokens of its prompt in a step. blocks: its
    table, by default all of the row's own. computed: a prefix that is in the cache."""

    row: int
    ids: list[int]
    spec: SamplingSpec = field(default_factory=SamplingSpec)
    propose: int = 0
    chunk: int = 1000
    blocks: tuple[int, ...] = ()
    computed: int = 0
    prompt_len: int = 0
    draft: tuple[int, ...] = ()
    results: list = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    joined: bool = False
    longest: int = LONGEST

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)
        each = self.longest // BLOCK
        self.blocks = self.blocks or tuple(range(1 + self.row * each, 1 + (self.row + 1) * each))

    @property
    def answer(self) -> list[int]:
        return self.ids[self.prompt_len :]

    def join(self, groups: int) -> Join:
        self.joined = True
        self._fresh: tuple = tuple((0, self.blocks) for _ in range(groups))
        return Join(self.row, pack_ids(self.ids), self.prompt_len, self.spec)

    def work(self) -> Work:
        count = min(self.chunk, len(self.ids) - self.computed)
        last = self.computed + count == len(self.ids)
        room = min(self.longest - 1, len(self.blocks) * BLOCK) - len(self.ids)
        draft = self.draft[: max(0, room)] if last else ()
        self.draft, fresh, self._fresh = draft, self._fresh, ()
        return Work(
            self.row, self.computed, count + len(draft), fresh, pack_ids(draft), len(draft), sample=last,
            propose=self.propose if last else 0,
        )  # fmt: skip

    def take(self, work: Work, result: Any) -> None:
        self.results.append(result)
        assert not result.error, result.error
        self.computed += work.count - work.drafted
        if not work.sample:
            assert result.proposed == ()
            return
        assert len(result.proposed) <= work.propose
        self.drafted, self.accepted = self.drafted + work.drafted, self.accepted + result.accepted
        self.computed += result.accepted
        self.ids += result.tokens
        self.draft = result.proposed


def step(runner: Runner, lanes: Sequence[Lane], left: tuple[int, ...] = ()) -> None:
    joined = tuple(lane.join(len(runner.capacity.groups)) for lane in lanes if not lane.joined)
    works = tuple(lane.work() for lane in lanes)
    result = runner.sample(runner.execute(StepPlan(0, joined=joined, work=works, left=left)))
    for lane, work, row in zip(lanes, works, result.rows, strict=True):
        lane.take(work, row)


def decode(runner: Runner, lanes: Sequence[Lane]) -> None:
    """A step of columns, which ask for nothing."""
    starts = [len(lane.ids) - 1 for lane in lanes]
    assert starts == [lane.computed for lane in lanes]
    plan = StepPlan(0, decodes=Decodes(pack_ids([lane.row for lane in lanes]), pack_ids(starts)))
    for lane, token in zip(lanes, unpack_ids(runner.sample(runner.execute(plan)).decoded), strict=True):
        lane.ids.append(token)
        lane.computed, lane.draft = lane.computed + 1, ()


def watched(runner: Runner, monkeypatch: Any) -> list[list[int]]:
    """Will have the number of positions of each span, for each step of the draft model."""
    seen: list[list[int]] = []
    forward: Any = runner.proposer.forward if runner.proposer else None
    run = forward.run

    def watch(spans: Any, *rest: Any) -> None:
        seen.append([span.count for span in spans])
        run(spans, *rest)

    monkeypatch.setattr(forward, "run", watch)
    return seen


def leave(runner: Runner, *lanes: Lane) -> None:
    runner.sample(runner.execute(StepPlan(0, left=tuple(lane.row for lane in lanes))))


def generate(runner: Runner, lanes: Sequence[Lane], tokens: int) -> None:
    """Until every lane has so many tokens; then the rows are left."""
    while open_ := [lane for lane in lanes if len(lane.answer) < tokens]:
        step(runner, open_)
    leave(runner, *lanes)


def shortened(source: Path, target: Path, layers: int) -> None:
    """A checkpoint of a model's first layers."""
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    tensors = load_file(source / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not (n.startswith("model.layers.") and int(n.split(".")[2]) >= layers)}
    save_file(kept, target / "model.safetensors")


def renumbered(source: Path, target: Path, order: torch.Tensor) -> None:
    """A checkpoint of a model whose id i is the id order[i] of the source."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": len(order)}))
    tensors = load_file(source / "model.safetensors")
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(
        {n: t[order].contiguous() if n in tables else t for n, t in tensors.items()}, target / "model.safetensors"
    )
