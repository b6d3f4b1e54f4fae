"""A graph executor over a model with random weights, its steps filled in directly: no scheduler, no host in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.measure import Place, Run
from kvasir.graph.draws import slots_of
from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.graph.triton import NO_TOKEN
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.tensors import torch_dtype
from kvasir.ops.compiling import compile_all
from kvasir.ops.launch import Launch, recording
from kvasir.plan import SamplingSpec
from kvasir.program.trace import trace
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_memory import MAX_CHOSEN
from kvasir.runner.graph_replays import bucket_of

BLOCK = 64
SEED = 5
Piece = tuple[int, int, int]  # row, start, count
SPECS = {
    "greedy": SamplingSpec(),
    "sampled": SamplingSpec(temperature=0.8, top_k=50, top_p=0.9, seed=SEED),
}


class Engine:
    """rows: sequences. length: most ids of one. tokens: of the largest step.

    Every sequence has random ids and blocks of its own, whose keys and values are random.
    """

    def __init__(self, model: Any, place: Place, *, rows: int, length: int, tokens: int, dtype: str = "bfloat16"):
        self.model, self.place, self.rows, self.length = model, place, rows, length
        device = torch.device(place.device)
        per_row = -(-length // BLOCK)
        self.cache = KVCache(model.cache_spec(), [1 + rows * per_row], BLOCK, torch_dtype(dtype), device)
        for tensor in self.cache.tensors:
            tensor.normal_()
        self.chosen = min(MAX_CHOSEN, 1 << (rows - 1).bit_length())
        traced = trace(model)
        step = StepBuffers.empty(
            rows=rows, ids=length + 1, blocks=[1 + per_row], pieces=1 << (rows - 1).bit_length(), tokens=tokens,
            chosen=self.chosen, device=device,
        )  # fmt: skip
        self.forward = Forward(
            traced, fold(traced), self.cache, step,
            max_tokens=tokens, max_chosen=self.chosen, positions=length + 1, dtype=dtype,
        )  # fmt: skip
        self.executor = GraphExecutor(
            model, self.forward, max_tokens=tokens, max_chosen=self.chosen, record=place.record()
        )
        step.ids.random_(0, model.config.vocab_size)
        blocks = torch.arange(1, 1 + rows * per_row, dtype=torch.int32, device=device)
        for table in step.tables:
            table[:rows, :per_row] = blocks.view(rows, per_row)

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers."""
        return sum(tensor[:, :, :1].nbytes for tensor in self.cache.tensors) // BLOCK

    @torch.inference_mode()
    def write(self, pieces: Sequence[Piece]) -> int:
        """Writes the pieces of a step; its token rows."""
        rows, first = [(0, 0, 0, NO_TOKEN, 0)] * len(self.forward.step.pieces), 0
        for at, (row, start, count) in enumerate(pieces):
            rows[at] = row, start, count, first, 0
            first += count
        self.forward.step.pieces.copy_(torch.tensor(rows, dtype=torch.int32))
        return first

    def step(self, pieces: Sequence[Piece], spec: str = "greedy") -> tuple[Run, Run, int]:
        """The launches of a step that samples each piece's last token: of the token rows, and of the logits and
        samples. Compiles and records them; also returns the number of replays."""
        executor, draws, count = self.executor, self.executor.draws, self.write(pieces)
        assert draws is not None
        lasts, known, end = [], [], 0
        for row, start, length in pieces:
            end += length
            lasts.append(end - 1)
            known.append(start + length)
            draws.state.enter(row, SPECS[spec], 1)
        level = draws.level([row for row, _, _ in pieces], masked=False)
        groups = [range(at, min(at + self.chosen, len(pieces))) for at in range(0, len(pieces), self.chosen)]
        device, bucket = self.place.device, bucket_of(count, executor.replays.max_tokens)
        writes = []
        for group in groups:
            width = bucket_of(len(group), self.chosen)
            slots = slots_of([pieces[i][0] for i in group], [known[i] for i in group], [-1] * len(group), width)
            chosen = torch.tensor([lasts[i] for i in group], dtype=torch.int32, device=device)
            writes.append((width, chosen, torch.from_numpy(slots).to(device)))
        compile_all(self.launches(bucket, writes[0][0], level))
        parts = len(writes)

        @torch.inference_mode()
        def compute() -> None:
            executor.replays("rows", bucket)

        @torch.inference_mode()
        def sample() -> None:
            for width, chosen, slots in writes:
                self.forward.step.chosen[: len(chosen)].copy_(chosen)
                for target, values in zip((draws.rows, draws.known, draws.mask_of), slots, strict=True):
                    target[:width].copy_(values)
                executor.replays("chosen", width)
                executor.replays(f"sample {level}", width)

        return compute, sample, 1 + 2 * parts

    def launches(self, bucket: int, chosen: int, level: int) -> list[Launch]:
        """The launches of a step, without running them."""
        assert self.executor.draws is not None and self.forward.logits is not None
        with torch.inference_mode(), recording(dry=True) as found:
            self.forward.run_rows(bucket)
            self.forward.run_chosen(chosen)
            self.executor.draws.run(self.forward.value(self.forward.logits, chosen), level)
        return found

    def hidden(self, count: int) -> torch.Tensor:
        """Hidden states of the last step's first token rows, float32."""
        return self.forward.value(self.forward.hidden, count).float()

    def close(self) -> None:
        self.executor.close()
