"""What an engine reports about its drafters: to users in its summary, to the front in its ModelInfo."""

from __future__ import annotations

import pytest

from kvasir.engine.checks import check_drafts
from kvasir.errors import InvalidRequest
from kvasir.speculation import Speculation
from tests.engine.cores import core_of


@pytest.mark.parametrize(
    "options, line, names",
    [
        ({}, "ngram, suffix, at most 16 ids a step", ("ngram", "suffix")),
        ({"speculate": "suffix", "draft_max": 3}, "suffix, at most 3 ids a step", ("suffix",)),
        ({"speculate": "off"}, "off", ()),
    ],
)
def test_what_drafts_is_said_at_the_start(options, line, names):
    core = core_of("kvasir-mini", num_blocks=8, **options)
    try:
        info = core.runner.info
        assert [each for each in core.summary if each.startswith("drafts")] == [f"drafts    {line}"]
        assert info.drafters == names
        for methods in (None, (), names):
            check_drafts(info, Speculation(methods), ())
        with pytest.raises(InvalidRequest, match="no drafter mtp"):
            check_drafts(info, Speculation(("mtp",)), ())
        with pytest.raises(InvalidRequest, match="prediction has"):
            check_drafts(info, None, (1,) * (info.max_model_len + 1))
    finally:
        core.close()
