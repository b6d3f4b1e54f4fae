"""Fill-in-the-middle: the prompt that makes a model generate the text between two given texts.

    PSM    [bos] PREFIX before SUFFIX after MIDDLE          and the generated text continues here
    SPM    [bos] SUFFIX after PREFIX before [MIDDLE]

Bavarian et al. 2022, https://arxiv.org/abs/2207.14255. A GGUF's metadata names these tokens
(`tokenizer.ggml.fim_pre_token_id`, ...); otherwise they are found by their spelling, which differs between model
families. Other files come first, each after its own separator token if the model has one (Qwen2.5-Coder,
https://arxiv.org/abs/2409.12186).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvasir.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillFamily:
    """How a model family spells its tokens. suffix_first: SPM. ends: tokens that end the generated text, where the
    vocabulary has them."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()


FAMILIES = (
    # Qwen2.5-Coder and later Qwen, Granite 4, CodeGemma (whose file separator ends the generated text)
    InfillFamily(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, StableCode, Granite Code, Refact
    InfillFamily(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        repository="<repo_name>",
        file="<file_sep>",
        ends=("<|endoftext|>", "<fim_pad>"),
    ),
    # SantaCoder
    InfillFamily("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),
    # DeepSeek-Coder, DeepSeek-V2 and V3
    InfillFamily("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Code Llama
    InfillFamily("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # Codestral
    InfillFamily("[PREFIX]", "[SUFFIX]", suffix_first=True),
    # Seed-Coder
    InfillFamily("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # GLM-4.5
    InfillFamily("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The fill-in-the-middle tokens of one model, as ids."""

    prefix: int
    suffix: int
    middle: int | None = None
    suffix_first: bool = False
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """None for a model without such tokens."""
        stated = tokenizer.fim_ids
        if {"pre", "suf", "mid"} <= stated.keys():
            spelling = tokenizer.id_to_token(stated["pre"])
            family = next((f for f in FAMILIES if f.prefix == spelling), None)
            ends = (*_ids(tokenizer, family.ends if family else ()), *(stated[r] for r in ("pad",) if r in stated))
            return cls(
                stated["pre"],
                stated["suf"],
                stated["mid"],
                bool(family and family.suffix_first),
                stated.get("rep"),
                stated.get("sep"),
                tuple(dict.fromkeys(ends)),
            )
        for family in FAMILIES:
            marks = [text for text in (family.prefix, family.suffix, family.middle) if text]
            ids = _ids(tokenizer, marks)
            if len(ids) == len(marks):
                repository, file = (tokenizer.token_to_id(t) if t else None for t in (family.repository, family.file))
                middle = ids[2] if family.middle else None
                ends = tuple(_ids(tokenizer, family.ends))
                return cls(ids[0], ids[1], middle, family.suffix_first, repository, file, ends)
        return None

    def stops(self) -> tuple[int, ...]:
        """The ids that end the middle."""
        marks = (self.prefix, self.suffix, self.middle, self.repository, self.file)
        return tuple(dict.fromkeys((*self.ends, *(i for i in marks if i is not None))))

    def prompt(
        self,
        tokenizer: Tokenizer,
        before: str | Sequence[int],
        after: str,
        *,
        files: Iterable[tuple[str, str]] = (),
        add_bos: bool = True,
    ) -> list[int]:
        """The prompt's ids. files: names and texts of other files.

        Marks in these texts are encoded as ordinary characters. Raises InvalidRequest for text that is not valid
        Unicode.
        """

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

        first = [self.prefix, *(encode(before) if isinstance(before, str) else before)]
        second = [self.suffix, *_without_space(tokenizer, after)]
        head = [*second, *first] if self.suffix_first else [*first, *second]
        middle = [] if self.middle is None else [self.middle]
        bos = [tokenizer.bos_id] if add_bos and tokenizer.add_bos and tokenizer.bos_id is not None else []
        return [*bos, *self._context(files, encode), *head, *middle]

    def _context(self, files: Iterable[tuple[str, str]], encode) -> list[int]:
        files = list(files)
        if not files:
            return []
        if self.file is None:
            return encode("".join(f"{name}\n{text}\n" for name, text in files))
        parts = [[self.file, *encode(f"{name}\n{text}\n")] for name, text in files]
        head = [] if self.repository is None else [self.repository, *encode("repository\n")]
        return [*head, *chain.from_iterable(parts), self.file, *encode("file\n")]


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    return [i for text in texts if (i := tokenizer.token_to_id(text)) is not None]


def _without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that follows another text: without the leading space that some tokenizers add."""
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    if not text or not tokenizer.strips_leading_space:
        return ids
    lead = tokenizer.encode("\n", add_special_tokens=False, parse_special=False)
    whole = tokenizer.encode("\n" + text, add_special_tokens=False, parse_special=False)
    return whole[len(lead) :] if whole[: len(lead)] == lead else ids
