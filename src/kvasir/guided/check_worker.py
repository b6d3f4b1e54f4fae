"""The process that compiles grammars and follows them for the first time, started as a script (see text/sandbox.py for
the frames).

    first   {"tokens", "special_ids", "eos_ids"}        {} or {"error", "kind"}
    then    {"grammar", "convert", "seconds"}           {"grammar"} or {"error", "kind"}

tokens: the bytes of each id, as text in Latin-1. convert: the grammar may be in llama.cpp's GBNF and is translated.
kind: "grammar", or "limit", after which the worker ends itself.
"""

import json
import struct
import sys
from pathlib import Path

if __name__ == "__main__":
    # This file's folder would shadow nothing here, but the package may only be found through an import hook.
    sys.path[:] = [*json.loads(sys.argv[1])["path"], str(Path(__file__).parents[2])]

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from kvasir.guided.explore import Explorer
from kvasir.guided.grammar import CompiledGrammar, GuideError
from kvasir.guided.spelling import Pieces
from kvasir.text.worker_limits import limit_resources, limited_time

MAX_MESSAGE_CHARS = 1000
_LENGTH = struct.Struct("<I")


class Vocabulary:
    """A vocabulary in the form that llguidance takes (its TokenizerWrapper). Texts are tokenized greedily if possible:
    whether a grammar is sound does not depend on the tokens of a text, only on whether there are any."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, job: dict):
        self.tokens = [text.encode("latin-1") for text in job["tokens"]]
        self.special_token_ids = job["special_ids"]
        self.eos_token_id = next(iter(job["eos_ids"]), None)
        self.library = LLTokenizer(self, eos_token=job["eos_ids"] or None)  # type: ignore[arg-type]
        self.pieces = Pieces(self.tokens, self.special_token_ids)
        self.explorer = Explorer(self.tokens, job["eos_ids"])
        self.unspelt = ""  # a text that no tokens spell

    def __call__(self, text: str) -> list[int]:
        ids = self.library.greedy_tokenize(text)
        if b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        found = self.pieces.spell(text.encode())
        if found is None:
            self.unspelt = text
            raise ValueError("no tokens encode it")
        return found


class Worker:
    """Checks grammars over the vocabulary of the first job."""

    vocabulary: Vocabulary | None = None

    def answer(self, job: dict) -> dict:
        """Does one job; every failure becomes a reply."""
        try:
            with limited_time(job.get("seconds", 60)):
                return self._load(job) if "tokens" in job else self._check(job)
        except GbnfToLarkError as error:
            return _failure("grammar", f"the grammar is neither Lark nor GBNF: {error}")
        except (MemoryError, RecursionError, OverflowError) as error:
            return _failure("limit", f"the grammar exceeds the limits: {type(error).__name__}")
        except Exception as error:
            return _failure("grammar", f"{type(error).__name__}: {error}")

    def _load(self, job: dict) -> dict:
        try:
            self.vocabulary = Vocabulary(job)
        except (ValueError, RuntimeError) as error:
            return _failure("grammar", f"this model's tokenizer does not support grammars: {error}")
        return {}

    def _check(self, job: dict) -> dict:
        assert self.vocabulary is not None, "the first job sends the tokenizer"
        grammar = any_to_lark(job["grammar"]) if job["convert"] else job["grammar"]
        self.vocabulary.unspelt = ""
        try:
            found = CompiledGrammar(self.vocabulary.library, grammar)
            if found.begin().done:
                return _failure("grammar", "it allows no text")
            self.vocabulary.explorer.walk(found)
        except GuideError as error:
            unspelt = self.vocabulary.unspelt
            return _failure("grammar", f"this model has no tokens for {unspelt[:80]!r}" if unspelt else error.message)
        return {"grammar": grammar}


def _failure(kind: str, message: str) -> dict:
    return {"kind": kind, "error": message[:MAX_MESSAGE_CHARS]}


def main(memory: int) -> None:
    limit_resources(memory)
    worker, jobs, replies = Worker(), sys.stdin.buffer, sys.stdout.buffer

    def write(message: dict) -> None:
        data = json.dumps(message).encode()
        replies.write(_LENGTH.pack(len(data)) + data)
        replies.flush()

    write({"ready": True})
    while len(head := jobs.read(_LENGTH.size)) == _LENGTH.size:
        reply = worker.answer(json.loads(jobs.read(_LENGTH.unpack(head)[0])))
        write(reply)
        if reply.get("kind") == "limit":
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["memory"])
