"""What it takes to follow public schemas over a vocabulary.

    python -m benchmarks.schemas.times TOKENIZER_FOLDER --results schemas.json --suite ... --store ... --api

Measured are the schemas that `run` found correct: from the schema to the first mask (*compile*, in the parts that are
Kvasir's and llguidance's), and each *mask* of an answer drawn by chance.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import quantiles

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks.schemas.run import add_collections, collected
from kvasir.errors import KvasirError
from kvasir.guided import sources
from kvasir.guided.guide import make_tokenizer
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.tokenizer import Tokenizer

MOST = 100  # tokens of an answer


def spread(seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f} ms, most {max(seconds) * 1e3:.2f} ms"


def masks(matcher: LLMatcher, ends: np.ndarray, rng: random.Random) -> list[float]:
    found: list[float] = []
    for _ in range(MOST):
        forced = matcher.compute_ff_tokens()
        if forced:
            matcher.consume_tokens(forced)
        if matcher.is_stopped():
            break
        begun = time.perf_counter()
        mask = matcher.compute_bitmask()
        found.append(time.perf_counter() - begun)
        bits = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        wanted = np.intersect1d(bits, ends)
        matcher.consume_token(int(rng.choice(wanted if len(wanted) and rng.random() < 0.3 else bits)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="what run wrote")
    parser.add_argument("--every", type=int, default=1, help="measure one schema of so many")
    add_collections(parser)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_folder(asked.tokenizer)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    library: LLTokenizer = make_tokenizer(vocabulary)
    ends = np.array([i for text in ('"', "}", "]", '"}', '"]', ",") for i in tokenizer.encode(text)[-1:]])
    sound = {r["name"] for r in json.loads(asked.results.read_text()) if r["kvasir"] == "correct"}
    told, compiling, every = [], [], []
    for i, case in enumerate(collected(asked)):
        if i % asked.every:
            continue
        begun = time.perf_counter()
        try:
            grammar = sources.json_schema(case.schema) if case.name in sound else ""
        except KvasirError:  # in these collections a schema may have a name twice
            continue
        if not grammar:
            continue
        told.append(time.perf_counter() - begun)
        matcher = LLMatcher(library, grammar, log_level=0)
        matcher.compute_bitmask()
        compiling.append(time.perf_counter() - begun)
        every += masks(matcher.deep_copy(), ends, random.Random(case.name))
    print(f"{vocabulary.size} ids, {len(told)} schemas, {len(every)} masks")
    for name, seconds in (("in other words", told), ("compile", compiling), ("mask", every)):
        print(f"{name}: {spread(seconds)}")


if __name__ == "__main__":
    main()
