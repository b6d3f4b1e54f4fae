"""Which ids of a vocabulary play a part: what a reader reports beside the tokenizer itself."""

from dataclasses import dataclass, field

HIDDEN = "\U0010fffd"  # of private use: before a token's text, no one writes it by chance


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`eos_ids` all end a generation, the tokenizer's own first. `names` maps the names that chat templates
    use ("bos_token", "eos_token", ...) to the tokens' texts. `fim`: those for filling in the middle, by the names of
    GGUF's keys ("pre", "suf", "mid", "pad", "rep", "sep"), where a file states them."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    names: dict[str, str] = field(default_factory=dict)
    fim: dict[str, int] = field(default_factory=dict)


def is_plain_text(content: str) -> bool:
    """Whether an added token that is not marked as special is white space or a word, which anybody may write."""
    return all(c.isalnum() or c.isspace() or c == "▁" for c in content)
