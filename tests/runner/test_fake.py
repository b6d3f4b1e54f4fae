"""Plans written by hand: the seats that the scheduler does not use yet, on the runner whose tokens one can compute."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from kvasir.inputs import Inputs, Span
from kvasir.plan import EncoderWork, Join, SamplingSpec, StepPlan, Work, pack_ids, unpack_ids
from kvasir.runner.fake import FakeRunner, fake_carry, fake_next
from kvasir.runner.fake_content import FakeContent


def run(runner: FakeRunner, **plan):
    return runner.sample(runner.execute(StepPlan(0, **plan))).rows


def join(ids, row=0, **more) -> Join:
    return Join(row, pack_ids(ids), len(ids), SamplingSpec(), **more)


def test_ids_travel_packed():
    assert unpack_ids(pack_ids([0, 1, 2**31 - 1, -1])) == [0, 1, 2**31 - 1, -1]


def test_forced_ids_are_known_without_being_sampled():
    runner = FakeRunner()
    work = Work(0, 0, 4, blocks=((0, (1,)),), appended=pack_ids([8, 9]), sample=True)
    (row,) = run(runner, joined=(join([1, 2]),), work=(work,))
    assert row.tokens == (fake_next([1, 2, 8, 9], 4, 0, 256),)


def test_drafts_are_verified_by_what_the_target_samples():
    right = fake_next([1, 2], 2, 0, 256)
    second = fake_next([1, 2, right], 3, 0, 256)
    for draft, accepted in (([right, second], 2), ([right, second + 1], 1), ([right + 1, second], 0)):
        runner = FakeRunner()
        work = Work(0, 0, 4, blocks=((0, (1,)),), appended=pack_ids(draft), drafted=2, sample=True)
        (row,) = run(runner, joined=(join([1, 2]),), work=(work,))
        assert row.accepted == accepted
        third = fake_next([1, 2, right, second], 4, 0, 256)
        assert list(row.tokens) == [right, second, third][: accepted + 1]
        assert runner.rows[0].ids[: runner.rows[0].known].tolist() == [1, 2, *row.tokens], (
            "rejected drafts are rolled back"
        )


def test_the_carry_is_kept_and_sent_on_joining():
    runner = FakeRunner()
    work = Work(0, 0, 2, blocks=((0, (1,)),), sample=True)
    (row,) = run(runner, joined=(join([1, 2], carry=b"\x05"),), work=(work,))
    assert row.carry == fake_carry(b"\x05", list(row.tokens))


def test_spans_positions_and_named_outputs():
    runner = FakeRunner()
    content = sha256(b"image").digest()
    given = Inputs((Span(1, 2, content),), pack_ids([0, 5, 5, 6]))
    work = Work(0, 0, 4, blocks=((0, (1,)),), sample=True, want_hidden=("layer.3",))
    joined, job = join([1, 0, 0, 2], inputs=given), EncoderWork(content, 2, b"image")
    (row,) = run(runner, joined=(joined,), work=(work,), encodes=(job,))
    numbers = FakeContent(given, (), 8).numbers(np.array([1, 0, 0, 2])).tolist()
    assert numbers[0] == 1 and min(numbers[1:3]) > 256 and numbers[3] == 2
    assert row.tokens == (fake_next(numbers, 7, 0, 256),)
    ((name, data),) = row.hidden
    assert name == "layer.3" and np.frombuffer(data, np.float32).tolist() == np.float32(numbers).tolist()


def test_pending_transfers_and_indivisible_prompts_are_guarded():
    runner = FakeRunner()
    with pytest.raises(AssertionError, match="arrived"):
        run(runner, joined=(join([1, 2]),), work=(Work(0, 0, 2, blocks=((0, (1,)),), pending=(9,)),))
    runner = FakeRunner()
    with pytest.raises(AssertionError, match="indivisible"):
        run(runner, joined=(join([1, 2, 3]),), work=(Work(0, 0, 2, blocks=((0, (1,)),), indivisible=True),))


def test_wrong_blocks_are_noticed():
    runner = FakeRunner()
    run(runner, joined=(join([1, 2]),), work=(Work(0, 0, 2, blocks=((0, (1,)),), sample=True),))
    other = Work(1, 0, 3, blocks=((0, (1,)),))
    run(runner, joined=(join([7, 8, 9], row=1),), work=(other,))
    with pytest.raises(AssertionError, match="never wrote"):
        run(runner, work=(Work(0, 2, 1, sample=True),))
