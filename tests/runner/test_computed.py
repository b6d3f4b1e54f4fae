"""Executors that compute low-rank pairs and nothing else refuse everything else by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir.errors import UnsupportedModel
from kvasir.lora import Adapter, LowRank, TokenRows
from kvasir.runner.computed import check_pairs, pack_pairs

ONE = np.ones(4, np.float32)


def change(rank: int = 2, **vectors: Any) -> LowRank:
    return LowRank(np.ones((rank, 4), np.float32), np.ones((4, rank), np.float32), 0.5, **vectors)


def adapter(slot: str = "out", rank: int = 2, vectors: dict[str, Any] = {}, **more: Any) -> Adapter:  # noqa: B006
    fields = {"matrices": {slot: change(rank, **vectors)}, "tables": {}, "saved": {}, "tokens": {}, **more}
    return Adapter("peft", "", **fields)


def test_pairs_are_packed():
    check_pairs(adapter(), {"out"}, 2, "X")
    packed = pack_pairs(adapter())
    assert packed.nbytes == 4 * 16 and packed.pairs["out"][2] == 0.5


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (adapter("in"), "a change of in"),
        (adapter(rank=3), "a rank of 3 for out, more than 2"),
        (adapter(vectors={"magnitude": ONE}), r"DoRA\), as out has"),
        (adapter(vectors={"bias": ONE}), r"lora_bias\), as out has"),
        (adapter(tables={"embed": change()}), "tables, such as of embed"),
        (adapter(saved={"norm.weight": ONE}), r"replace the model's, such as of norm\.weight"),
        (adapter(tokens={"head": TokenRows((0,), ONE[None])}), "of tables, such as of head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused_by_name(given, named):
    with pytest.raises(UnsupportedModel, match=f"{named}.*, which X cannot compute"):
        check_pairs(given, {"out"}, 2, "X")
