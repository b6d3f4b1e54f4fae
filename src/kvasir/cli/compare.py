"""`kvasir embed` and `kvasir rerank`: embeddings of texts, and the texts that fit a query best."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

from kvasir.adapters import for_all_requests
from kvasir.cli.resolve import resolve
from kvasir.cli.waiting import print_decided, spinner
from kvasir.config import EngineOptions
from kvasir.engine.llm import LLM
from kvasir.errors import ConfigError


def embed(
    engine: EngineOptions, texts: list[str], dimensions: int | None, prompt_name: str | None, quiet: bool, verbose: bool
) -> None:
    """Prints a line of JSON for each text. Raises KvasirError."""
    given = _texts(texts)
    with _engine(engine, quiet, verbose) as llm:
        with spinner(f"Computing {len(given)} embeddings"):
            found = llm.embed(given, dimensions=dimensions, prompt_name=prompt_name)
        for output in found:
            print(json.dumps({"text": output.prompt, "embedding": output.embedding}, ensure_ascii=False))


def rerank(
    engine: EngineOptions,
    query: str,
    documents: list[str],
    top_n: int | None,
    instruction: str,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Prints the documents with their scores, best first. Raises KvasirError."""
    given = _texts(documents)
    with _engine(engine, quiet, verbose) as llm:
        with spinner(f"Comparing {len(given)} documents"):
            best = llm.rerank(query, given, top_n=top_n, instruction=instruction)
        for index, score in best:
            if as_json:
                found = {"index": index, "score": score, "text": given[index]}
                print(json.dumps(found, ensure_ascii=False))
            else:
                print(f"{score:9.6f}  {given[index]}")


def _engine(engine: EngineOptions, quiet: bool, verbose: bool) -> LLM:
    engine = replace(engine, lora=for_all_requests(engine.lora))
    llm = LLM(**asdict(resolve(engine)[0]), progress=not quiet and sys.stderr.isatty())
    if not quiet:
        print_decided(llm.summary, verbose)
    return llm


def _texts(given: list[str]) -> list[str]:
    """The texts; the lines of standard input if none is given, or a hyphen. Raises ConfigError if there is none."""
    if given not in ([], ["-"]):
        return given
    try:
        lines = sys.stdin.buffer.read().decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error.reason}", "give one text per line") from None
    if not lines:
        raise ConfigError("standard input is empty", "give texts as arguments, or one per line of standard input")
    return lines
