"""Batches from generated conversations: packed rows, each conversation sees only itself.

Every batch is a function of (seed, step, part), so a run that resumes continues with the same data.
"""

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .chat import encode, render_case
from .skills import Case, dialogue

SHAPES = [(16, 256), (8, 512), (4, 1024)]  # rows, positions
SHAPE_WEIGHTS = [70, 26, 4]
CONTEXT_SHARE = 0.08  # share of the prompt's tokens that are also learned


@dataclass
class Batch:
    """ids [B, S]; document number [B, S], -1 for padding; `learn` marks positions whose next token counts."""

    ids: Tensor
    docs: Tensor
    learn: Tensor

    def mask(self) -> Tensor:
        """[B, 1, S, S]: a position sees earlier ones of its own conversation, and itself."""
        same = self.docs[:, :, None] == self.docs[:, None, :]
        return same.tril()[:, None]


class Encoder:
    """Conversations to ids and to the positions that are learned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
        self.assistant = encode(tokenizer, "assistant\n")

    def answers(self, ids: list[int]) -> list[tuple[int, int]]:
        """[first, last] of each answer's ids, the end mark included."""
        head = [self.start, *self.assistant]
        starts = [i + len(head) for i, t in enumerate(ids) if t == self.start and ids[i : i + len(head)] == head]
        return [(i, ids.index(self.end, i)) for i in starts]

    def __call__(self, case: Case, rng: Random) -> tuple[list[int], list[bool]]:
        ids = encode(self.tokenizer, render_case(case))[:-1]  # without the last newline
        learn = [rng.random() < CONTEXT_SHARE for _ in ids]
        for first, last in self.answers(ids)[-1 if case.thinking else 0 :]:
            learn[first - 1 : last] = [True] * (last - first + 1)
        learn[-1] = False
        return ids, learn


def batch(encoder: Encoder, seed: int, step: int, part: int) -> Batch:
    """The batch of one step's part: first-fit packing of fresh conversations."""
    rng = Random(f"{seed}/{step}/{part}")
    num_rows, size = rng.choices(SHAPES, SHAPE_WEIGHTS)[0]
    rows: list[list[tuple[list[int], list[bool]]]] = [[] for _ in range(num_rows)]
    room = [size] * num_rows
    misses = 0
    while misses < 6:
        ids, learn = encoder(dialogue(rng, int(size * 0.7)), rng)
        fitting = [r for r in range(num_rows) if room[r] >= len(ids)]
        if fitting:
            row = min(fitting, key=lambda r: room[r])
            rows[row].append((ids, learn))
            room[row] -= len(ids)
        misses += not fitting
    return pack(rows, size)


def pack(rows: list[list[tuple[list[int], list[bool]]]], size: int) -> Batch:
    ids = torch.zeros(len(rows), size, dtype=torch.long)
    docs = torch.full((len(rows), size), -1)
    learn = torch.zeros(len(rows), size, dtype=torch.bool)
    for r, row in enumerate(rows):
        at = 0
        for d, (some_ids, some_learn) in enumerate(row):
            to = at + len(some_ids)
            ids[r, at:to], docs[r, at:to] = torch.tensor(some_ids), d
            learn[r, at:to] = torch.tensor(some_learn)
            at = to
    return Batch(ids, docs, learn)
