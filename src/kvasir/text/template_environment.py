"""Jinja2 for chat templates, with strings that record their origin. Imported by the template worker.

It is the environment that `transformers` documents: trimmed blocks, `break` and `continue`, `raise_exception`,
`strftime_now`, a `tojson` that keeps key order and does not escape HTML, and `{% generation %}`, which does nothing
here.

Every string operation of a template goes through this module: printing and joining (`finalize`, `concat`, `~`), `%`,
methods (`getattr`, `call`) and filters. The result of an operation that is not known to keep the marks of
`marked_string` counts as outside as a whole. There is no `{% autoescape %}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Joiner
from markupsafe import Markup

from kvasir.text.marked_html import Html, escape, html
from kvasir.text.marked_string import Marked, format_fields, join, lost, marked, text_of
from kvasir.text.template_filters import FILTERS

# Filters that return their input or parts of it, or apply another filter to it.
_HAND_ON = frozenset(
    "attr batch count d default dictsort first groupby items last length list map max min random reject rejectattr "
    "reverse select selectattr slice sort sum unique".split()
)
_CONTAINERS = (dict, list, tuple)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant output for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without underscore names, which would give access to CPython's internals."""

    def __init__(self, /, *args, **kwargs):
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have an attribute named {name!r}")


def make_dict(*args, **kwargs) -> dict:
    """`dict(...)` as a function, so that a template has no access to the type itself."""
    return dict(*args, **kwargs)


def raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


class Form:
    """The `format` or `format_map` method of a string."""

    def __init__(self, form: str, formatter: SandboxedFormatter, by_map: bool):
        self._form, self._formatter, self._by_map = form, formatter, by_map

    def __call__(self, *args: Any, **kwargs: Any) -> Marked:
        if self._by_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            args, kwargs = (), args[0]
        if isinstance(self._form, Html):
            return html(self._formatter.vformat(self._form, args, kwargs), self._form, *args, *kwargs.values())
        return format_fields(self._formatter, self._form, args, kwargs)


_CALLABLES = (Macro, BlockReference, LoopContext, Joiner, Form)


class Generator(CodeGenerator):
    """Compiles `~` to a call of the environment, and rejects `{% autoescape %}`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("chat templates have no autoescape", node.lineno)

    visit_EvalContextModifier = visit_ScopedEvalContextModifier  # type: ignore[assignment]


class Environment(ImmutableSandboxedEnvironment):
    code_generator_class = Generator
    intercepted_binops = frozenset("%")

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=text_of)
        self.concat = join  # type: ignore[assignment]
        self.binop_table["%"] = lambda left, right: (marked(left) if isinstance(left, str) else left) % right
        self.filters = {name: _guarded(name, filter) for name, filter in self.filters.items()} | FILTERS
        self.globals |= {"raise_exception": raise_exception, "dict": make_dict, "namespace": Namespace}

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(marked(obj) if isinstance(obj, str) else obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(marked(obj) if isinstance(obj, str) else obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        form, by_map = value.__self__, value.__name__ == "format_map"
        if isinstance(form, Html):
            return Form(form, SandboxedEscapeFormatter(self, escape=escape), by_map)
        return Form(form, SandboxedFormatter(self), by_map)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        result = super().call(context, obj, *args, **kwargs)
        if _keeps_marks(obj):
            return result
        return _made(result, getattr(obj, "__self__", None), *args, *kwargs.values())


def _keeps_marks(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(function, MethodType):
        return isinstance(owner, Marked | Cycler | LoopContext)
    if isinstance(function, BuiltinMethodType):
        return type(owner) in _CONTAINERS
    return isinstance(function, _CALLABLES) or function in (Namespace, make_dict)


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with marks on its result. Jinja2 passes a context or an environment first to some filters."""
    if name in _HAND_ON:
        return filter
    passed = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _made(filter(*args, **kwargs), *args[passed:], *kwargs.values())

    return run


def _made(result: Any, *operands: object) -> Any:
    return html(result, *operands) if isinstance(result, Markup) else lost(result, *operands)
