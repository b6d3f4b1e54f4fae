"""Rule: all that an answer has to follow, in one text that a Request carries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

_MARK = "%kvasir "  # no grammar begins like this


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a model's reasoning. opened: the prompt has opened it. anywhere: it may begin after other text,
    and not only at the beginning of an answer."""

    start: str
    end: str
    opened: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Text that follows nothing until a trigger comes; what the trigger begins is free text again at its end.

    triggers: the beginnings of calls. inside: the same within the reasoning, where a mark may also be spoken of.
    first: a call without a mark begins with one of these characters, as the first thing that is said.
    """

    triggers: tuple[str, ...]
    inside: tuple[str, ...] = ()
    first: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """grammar: as llguidance reads it; "" for none. free: what the grammar leaves alone; None: nothing.
    budget: tokens of reasoning after which its end is forced; None: as many as there come."""

    grammar: str = ""
    free: Free | None = None
    reasoning: Reasoning | None = None
    budget: int | None = None

    def text(self) -> str:
        """A grammar that is all of its rule stands for itself."""
        return self.grammar if self == Rule(self.grammar) else _MARK + json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Rule:
        if not text.startswith(_MARK):
            return cls(text)
        fields = json.loads(text[len(_MARK) :])
        free, reasoning = fields.pop("free"), fields.pop("reasoning")
        rule = cls(**fields, reasoning=Reasoning(**reasoning) if reasoning else None)
        if free is None:
            return rule
        return replace(rule, free=Free(tuple(free["triggers"]), tuple(free["inside"]), free["first"]))
