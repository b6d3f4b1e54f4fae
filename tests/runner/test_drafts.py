"""Sampling along a draft gives the ids that single steps would give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import PagedKV
from kvasir.plan import CacheGroup, Capacity, Join, SamplingSpec, StepPlan, Work, pack_ids
from kvasir.runner.drafts import along
from kvasir.runner.executor import Taken
from kvasir.runner.rows import Row, Rows

PROMPT = [3, 1, 4]
CAPACITY = Capacity(1, 64, 64, 16, (CacheGroup(PagedKV(1, 4), (0,), 512),), (8,), vocab_size=100)


def drafting(draft: list[int], carry: bytes = b"") -> tuple[Work, Row]:
    rows = Rows(CAPACITY, frozenset(("drafted",)))
    work = Work(0, 0, len(PROMPT) + len(draft), appended=pack_ids(draft), drafted=len(draft), sample=True)
    rows.apply(StepPlan(0, joined=(Join(0, pack_ids(PROMPT), len(PROMPT), SamplingSpec(), carry=carry),), work=(work,)))
    return work, rows[0]


class Sampler:
    """Draws a function of the ids before, and counts in its carry. fails: the position at which it errs."""

    def __init__(self, row: Row, fails: int | None = None):
        self.row, self.fails, self.masks = row, fails, []

    def __call__(self, i: int, known: int, mask: bytes | None, carry: bytes) -> Taken:
        assert i == known - len(PROMPT), "logits of the position"
        self.masks.append(mask)
        if known == self.fails:
            return Taken(error="NaN")
        token = next_of(self.row.ids[:known].tolist())
        return Taken((token,), ((token, -1.0, 0, ()),), carry + b"+")


def next_of(ids: list[int]) -> int:
    return (sum(ids) * 7 + len(ids)) % 100


def truth(count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(next_of(ids))
    return ids[len(PROMPT) :]


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_draft_is_accepted_up_to_its_first_mismatch(length, wrong):
    draft = truth(length)
    if wrong < length:
        draft[wrong] = (draft[wrong] + 1) % 100
    work, row = drafting(draft, b"c")
    found = along(work, row, None, Sampler(row))
    accepted = min(wrong, length)
    assert list(found.tokens) == truth(accepted + 1)
    assert [entry[0] for entry in found.logprobs] == list(found.tokens)
    assert found.carry == b"c" + b"+" * (accepted + 1)


def test_each_position_has_its_own_mask():
    work, row = drafting(truth(2))
    sampler = Sampler(row)
    along(work, row, b"aaaabbbbcccc", sampler)
    assert sampler.masks == [b"aaaa", b"bbbb", b"cccc"]
    along(work, row, None, sampler)
    assert sampler.masks[3:] == [None] * 3


def test_an_error_at_the_first_position_is_the_result():
    work, row = drafting(truth(2))
    assert along(work, row, None, Sampler(row, fails=len(PROMPT))) == Taken(error="NaN")


def test_an_error_at_a_drafted_id_ends_the_draft_before_it():
    work, row = drafting(truth(2))
    found = along(work, row, None, Sampler(row, fails=len(PROMPT) + 1))
    assert list(found.tokens) == truth(1) and not found.error and found.carry == b"+"
