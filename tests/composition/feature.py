"""What a feature is: how it is turned on, and what proves that it was there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvasir.types import Request, Task
from tests.composition.beside import Alone
from tests.composition.run import Run

if TYPE_CHECKING:
    from kvasir.sched.drafts import Drafter

Values = dict[str, Any]
Ids = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Feature:
    """One position of a switch; positions of the same switch exclude each other.

    proof, fired: what is counted, in words, and the count after a run; 0 means that it was not there.
    options: of the engine; a function where they depend on those of the features before it.
    base: the plain run has the options too (what rounds differently is compared with itself).
    ask: changes the sampling parameters of the requests. fields: further fields of request i. act: is called before
    each step. drafter: proposes ids that may come next. engines: which there are.
    besides: features that come with it, unless the cell has others of their switches.
    """

    name: str
    switch: str
    proof: str
    fired: Callable[[Run], int]
    options: Mapping[str, Any] | Callable[[Values], Values] = field(default_factory=dict)
    base: bool = False
    ask: Callable[[Values], Values] | None = None
    fields: Callable[[int], Values] | None = None
    act: Callable[[Run], None] | None = None
    drafter: Callable[[Run], Drafter] | None = None
    engines: type[Alone] = Alone
    besides: tuple[str, ...] = ()


def drafted(run: Run) -> int:
    return run.total("drafted_tokens") or all_shorter(run, 3)


def all_shorter(run: Run, tokens: int) -> bool:
    """Than so many: then some features have no step to be at work in."""
    return all(len(answer.tokens) < tokens for answer in run.answers.values())


def needs_prompt_rows(request: Request) -> bool:
    """So that it finds nothing of its prompt."""
    return request.task is Task.EMBED or request.params.prompt_logprobs is not None
