"""Trains the tokenizer: byte-level BPE, every digit a token of its own.

Run as `python -m recipes.mini.tokenizer`; writes `work/tokenizer.json`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import render_case
from .skills import dialogue

WORK = Path(__file__).with_name("work")
VOCAB = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2; hidden when decoding
VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # ids 3 to 6; part of the decoded text
# The pattern of the Qwen family: words with one leading space, single digits, runs of signs, white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(num: int, seed: int = 1) -> Iterator[str]:
    """Rendered training conversations."""
    rng = Random(seed)
    for _ in range(num):
        yield render_case(dialogue(rng, 150))


def train(texts: Iterator[str], vocab: int = VOCAB) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL + VISIBLE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return visible(tokenizer)


def visible(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the tags no longer special (the trainer knows no others), so that decoding shows them."""
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(document, ensure_ascii=False))


def main() -> None:
    WORK.mkdir(exist_ok=True)
    tokenizer = train(corpus(30_000))
    tokenizer.save(str(WORK / "tokenizer.json"))
    ids = tokenizer.encode("What is 23 + 45? My name is Alice.").ids
    print(f"{tokenizer.get_vocab_size()} tokens; a sample: {[tokenizer.decode([i]) for i in ids]}")


if __name__ == "__main__":
    main()
