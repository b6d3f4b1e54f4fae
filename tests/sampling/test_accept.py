from hypothesis import given
from hypothesis import strategies as st

from kvasir.sampling.accept import accept

IDS = st.lists(st.integers(0, 3), max_size=8)


def test_accept():
    assert accept([5, 6, 7, 8], [5, 6, 7]) == 3
    assert accept([5, 6, 7, 8], [5, 9, 7]) == 1
    assert accept([5, 6], [4, 6]) == 0
    assert accept([5], []) == 0
    assert accept([], [5]) == 0
    assert accept([-1, 6], [-1, 6]) == 0


@given(IDS, IDS)
def test_the_accepted_head_is_the_longest_common_one(sampled, draft):
    n = accept(sampled, draft)
    assert sampled[:n] == draft[:n]
    assert n == min(len(sampled), len(draft)) or sampled[n] != draft[n]
