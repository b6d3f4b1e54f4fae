"""All features whose compositions are tried; nothing else anywhere knows their names.

To add one, append a Feature to COMPUTED, ASKED, COMPUTING or ADAPTED: what turns it on (`options` of the engine, what
is `ask`ed in requests, or an `act` before each step), and what proves that it was there (`fired`). Pairs with all
others, random sets, the sample of the fast tests and the page follow. If the engine refuses some of its pairs, REFUSES
says so. Then `make composition`.
"""

from __future__ import annotations

from collections.abc import Collection

from tests.composition.adapted import ADAPTED
from tests.composition.asked import ASKED, OPEN
from tests.composition.computed import COMPUTED
from tests.composition.computing import COMPUTING

FEATURES = [*COMPUTED, *ASKED, *COMPUTING, *ADAPTED]
NAMED = {feature.name: feature for feature in FEATURES}

# Where a cell says nothing.
DEFAULTS = ("program executor", "bfloat16", "kvasir-mini")
# All off. What is computed at once, and what may be remembered, is least.
PLAIN = {
    "block_size": 32, "num_blocks": 60, "threads": 1, "overlap": False, "max_num_seqs": 1,
    "max_num_batched_tokens": 256, "prefix_cache": False, "jump_ahead": False, "speculate": "off",
}  # fmt: skip

# The pairs that an engine refuses. Another refusal, or one that is not there, is a failure.
REFUSES = {
    "eager executor": {"KV int8", "q8", "q4", "ranks: 2", "stages: 2", "streamed weights"},
    "min tokens": {f.name for f in ASKED if f.switch == "grammar"} - set(OPEN),
    "bert": {
        "chunks of 1",
        "chunks of 13",
        "steps of 29 tokens",
        *(f.name for f in ASKED),
        *(f.name for f in COMPUTING if f.switch == "drafts"),
    },
}

# Pairs that make no cell: caches of rank processes cannot be filled from outside.
APART = {name: {"NaN in free blocks"} for name in ("ranks: 2", "stages: 2")}


def together(names: Collection[str]) -> bool:
    """Whether a cell can have all of these."""
    return not any(a in names and others & set(names) for a, others in APART.items())
