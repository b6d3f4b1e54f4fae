"""The registry of ops. An op's plain torch body is its contract, its fallback and the reference in tests.

    @op                                                     # ops/norm/__init__.py, which does not import torch
    def rms_norm(x, weight, eps): ...

    rms_norm.impl_at("kvasir.ops.norm.native:rms_norm_native", "native", on="cpu", refuses=reason)

    def rms_norm(x, weight, eps):                           # ops/norm/body.py
        return ...

The declaration has the signature and the docstring. The body has the same name, in the module `body` beside the
declaration; an implementation has the body's signature. Both are imported when they are first called, so a program can
record ops without importing torch.

`refuses` gets the facts of the whole run (device, dtype) and returns why the implementation cannot be used, "" if it
can. `choose` selects once at start; the selections can be printed. A device without a selection uses the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from kvasir.errors import ConfigError

if TYPE_CHECKING:
    from kvasir.device import Device

P = ParamSpec("P")
R = TypeVar("R")
BODY = "torch"
TRACE = "trace"  # the device of symbolic values

OPS: dict[str, Op[Any, Any]] = {}
Shapes = Callable[..., tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts known at start. dtype: of the weights, "float32" or "bfloat16"."""

    device: Device
    dtype: str = "float32"


def _never(facts: MachineFacts) -> str:
    return ""


@dataclass(frozen=True)
class Impl:
    """source: the function, or "module:function", which is imported on first use."""

    name: str
    on: str
    source: Callable[..., Any] | str
    refuses: Callable[[MachineFacts], str] = _never

    @cached_property
    def function(self) -> Callable[..., Any]:
        if not isinstance(self.source, str):
            return self.source
        module, _, name = self.source.partition(":")
        return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table: the implementation that an op uses on a device, and why others were rejected."""

    op: str
    device: str
    chosen: str
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.refused)
        return f"{self.op:<18} {self.device:<5} {self.chosen:<8} {why}".rstrip()


@dataclass(eq=False)
class Op(Generic[P, R]):
    """A function that calls the implementation selected for its first argument's device, or records the call if that
    argument is a symbolic value (kvasir.ops.graph).

    declaration: has the signature and the docstring. source: of the body, as in Impl; by default the declaration has
    it. shapes: computes the results' shapes, without the rows, from the arguments; by default there is one result of
    the first argument's shape.
    """

    name: str
    declaration: Callable[P, R]
    source: str = ""
    shapes: Shapes | None = None
    impls: list[Impl] = field(default_factory=list)
    chosen: dict[str, Impl] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plain = Impl(BODY, "any", self.source or self.declaration)

    @property
    def body(self) -> Callable[P, R]:
        """The plain torch body; imports torch."""
        return self.plain.function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        kind = first.device.type
        if kind == TRACE:
            return self._record(first, args, kwargs)
        return self.chosen.get(kind, self.plain).function(*args, **kwargs)

    def _record(self, first: Any, args: Any, kwargs: Any) -> Any:
        bound = signature(self.declaration).bind(*args, **kwargs)
        bound.apply_defaults()
        shapes = self.shapes(*bound.args) if self.shapes else (first.shape,)
        return first.graph.record(self.name, bound.args, shapes, first.domain)

    def impl(
        self, name: str, *, on: str, refuses: Callable[[MachineFacts], str] = _never
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Registers an implementation for the device kind `on`; implementations registered earlier are preferred."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self._add(Impl(name, on, function, refuses))
            return function

        return register

    def impl_at(self, source: str, name: str, *, on: str, refuses: Callable[[MachineFacts], str] = _never) -> None:
        """Registers the implementation at `source`, "module:function"."""
        self._add(Impl(name, on, source, refuses))

    def _add(self, impl: Impl) -> None:
        assert all(other.name != impl.name for other in self.impls), f"{self.name}: {impl.name} is registered twice"
        self.impls.append(impl)

    def choose(self, facts: MachineFacts, wanted: str | None = None) -> Choice:
        """Selects the first implementation that does not refuse, else the body.

        Raises ConfigError if `wanted` is given and refuses or does not exist.
        """
        kind, refused, found = facts.device.kind, [], None
        for impl in (impl for impl in self.impls if impl.on == kind and wanted in (None, impl.name)):
            reason = impl.refuses(facts)
            if not reason:
                found = impl
                break
            refused.append((impl.name, reason))
        if found is None and wanted not in (None, BODY):
            tried = (
                "; ".join(f"{name}: {reason}" for name, reason in refused) or "it has no implementation of that name"
            )
            names = ", ".join([BODY, *(impl.name for impl in self.impls if impl.on == kind)])
            raise ConfigError(f"{self.name} cannot run as {wanted} on {kind} ({tried})", f"available: {names}")
        self.chosen[kind] = found or self.plain
        self.choices[kind] = Choice(self.name, kind, self.chosen[kind].name, tuple(refused))
        return self.choices[kind]


def op(declaration: Callable[P, R]) -> Op[P, R]:
    """Makes an op from its declaration, whose name is the op's name; the body is in the module `body` beside it."""
    name = declaration.__name__
    assert name not in OPS, f"two ops have the name {name}"
    OPS[name] = entry = Op(name, declaration, f"{declaration.__module__}.body:{name}")
    update_wrapper(entry, declaration)
    return entry


def op_with(shapes: Shapes) -> Callable[[Callable[P, R]], Op[P, R]]:
    """`op` for a function whose results differ in shape from its first argument. shapes: gets the function's arguments
    and returns each result's shape without the rows."""

    def make(declaration: Callable[P, R]) -> Op[P, R]:
        entry = op(declaration)
        entry.shapes = shapes
        return entry

    return make


def choose_all(facts: MachineFacts, wanted: Mapping[str, str] | None = None) -> tuple[Choice, ...]:
    """Selects an implementation for every op. wanted: op name -> required implementation ("torch" is the body)."""
    wanted = wanted or {}
    unknown = sorted(set(wanted) - set(OPS))
    if unknown:
        raise ConfigError(f"unknown op {unknown[0]!r}", f"ops: {', '.join(sorted(OPS))}")
    return tuple(entry.choose(facts, wanted.get(name)) for name, entry in sorted(OPS.items()))
