"""Which ids of a vocabulary play a part: what a reader reports beside the tokenizer itself."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`eos_ids` all end a generation, the tokenizer's own first. `names` maps the names that chat templates
    use ("bos_token", "eos_token", ...) to the tokens' texts."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    names: dict[str, str] = field(default_factory=dict)
