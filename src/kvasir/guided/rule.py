"""Rule: everything that a choice must follow, as one text that a Request carries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

_MARK = "%kvasir "  # no grammar begins like this


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around a model's reasoning. opened: the prompt has opened it. anywhere: it may also begin after other
    text, and not only at the start of a choice."""

    start: str
    end: str
    opened: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Text that is unconstrained until a trigger appears; after the call that the trigger begins, it is free again.

    triggers: the beginnings of calls. inside: the same within reasoning, where a mark may also merely be mentioned.
    first: a call without a mark begins with one of these characters, as the first content.
    """

    triggers: tuple[str, ...]
    inside: tuple[str, ...] = ()
    first: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """grammar: in a form that llguidance reads; "" for none. free: the text around calls, if the grammar is only for
    calls; None if it is for the whole choice. budget: tokens of reasoning after which its end is forced; None: no
    limit."""

    grammar: str = ""
    free: Free | None = None
    reasoning: ReasoningMarks | None = None
    budget: int | None = None

    def text(self) -> str:
        """The rule as text; a rule that is only a grammar is the grammar itself."""
        return self.grammar if self == Rule(self.grammar) else _MARK + json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Rule:
        if not text.startswith(_MARK):
            return cls(text)
        fields = json.loads(text[len(_MARK) :])
        free, reasoning = fields.pop("free"), fields.pop("reasoning")
        rule = cls(**fields, reasoning=ReasoningMarks(**reasoning) if reasoning else None)
        if free is None:
            return rule
        return replace(rule, free=Free(tuple(free["triggers"]), tuple(free["inside"]), free["first"]))
