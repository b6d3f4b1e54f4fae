"""The special ids of a vocabulary, which a reader returns in addition to the tokenizer itself."""

from dataclasses import dataclass, field

END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"  # RWKV's token 0, which its vocabulary file does not have
HIDDEN = "\U0010fffd"  # private use: no text has it before a token's text by chance


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """All `eos_ids` end a generation, the tokenizer's own first. `names` maps the names that chat templates use
    ("bos_token", "eos_token", ...) to the tokens' texts. `fim`: the fill-in-the-middle ids by the names in GGUF's keys
    ("pre", "suf", "mid", "pad", "rep", "sep"), where the file states them."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    names: dict[str, str] = field(default_factory=dict)
    fim: dict[str, int] = field(default_factory=dict)


def is_plain_text(content: str) -> bool:
    """Whether an added token without the special flag is white space or a word, which any text may contain."""
    return all(c.isalnum() or c.isspace() or c == "▁" for c in content)
