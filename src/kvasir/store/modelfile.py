"""Modelfiles: the recipe of a model as text. Source: https://docs.ollama.com/modelfile

Instructions may have any case and order. A value ends with its line, unless it begins with quotes: then it ends with
the line that ends with the same quotes (one or three).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvasir.errors import InvalidRequest
from kvasir.store.entry import Value
from kvasir.store.parameters import parse_parameter

MAX_CHARS = 4 << 20
ROLES = ("system", "user", "assistant")
_VERSION = re.compile(r"v?\d+(\.\d+){0,2}([-+][0-9A-Za-z.-]+)?")
_ONCE = ("TEMPLATE", "SYSTEM", "REQUIRES", "DRAFT")
_REFUSED = {
    "RENDERER": "write the format as a Jinja TEMPLATE, or leave it out for the model's own",
    "PARSER": "leave it out; `kvasir serve --tool-format` and `--reasoning-format` select the formats",
}
_KNOWN = ("FROM", "ADAPTER", "PARAMETER", "MESSAGE", "LICENSE", *_ONCE, *_REFUSED)


@dataclass(frozen=True, slots=True)
class Modelfile:
    """The recipe of a model. `from_`: a name, a hub repository, or paths (several: the parts of one model). messages:
    {"role", "content"}. draft: what drafts for it, and adapters: what applies to all its requests, both named as in
    `from_`. quantize and draft_quantize are not in the
    text; they are separate options."""

    from_: tuple[str, ...]
    parameters: dict[str, Value] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    license: tuple[str, ...] = ()
    requires: str = ""
    quantize: str | None = None
    draft: str | None = None
    draft_quantize: str | None = None
    adapters: tuple[str, ...] = ()


def parse_modelfile(text: str) -> Modelfile:
    """Raises InvalidRequest with the line number in its message."""
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"the Modelfile has {len(text)} characters", f"at most {MAX_CHARS}")
    from_: list[str] = []
    adapters: list[str] = []
    parameters: dict[str, Value] = {}
    once: dict[str, str] = {}
    messages: list[dict[str, str]] = []
    license: list[str] = []
    for line, instruction, head, value in _instructions(text):
        match instruction:
            case "FROM":
                from_.append(value)
            case "ADAPTER":
                if not value:
                    raise _wrong(line, "ADAPTER names nothing", "add the adapter's folder or .gguf file")
                adapters.append(value)
            case "PARAMETER":
                _add(parameters, head.lower(), value, line)
            case "MESSAGE":
                if head.lower() not in ROLES:
                    raise _wrong(line, f"MESSAGE of {head[:40]!r}", f"expected one of {', '.join(ROLES)}")
                messages.append({"role": head.lower(), "content": value})
            case "LICENSE":
                license.append(value)
            case _ if instruction in _ONCE:
                once[instruction] = value  # the last occurrence counts
            case _:
                raise _wrong(line, f"{instruction} is not supported", _REFUSED[instruction])
    if not from_ or not all(from_):
        raise InvalidRequest("the Modelfile has no FROM", "add a FROM line with the base model", param="from")
    requires = once.get("REQUIRES", "")
    if requires and not _VERSION.fullmatch(requires):
        raise InvalidRequest(f"REQUIRES {requires[:40]!r}", "expected a version like 0.14.0")
    if once.get("DRAFT") == "":
        raise InvalidRequest("DRAFT names nothing", "add the model that drafts, or leave the line out", param="draft")
    return Modelfile(
        tuple(from_),
        parameters,
        template=once.get("TEMPLATE"),
        system=once.get("SYSTEM"),
        messages=tuple(messages),
        license=tuple(license),
        requires=requires,
        draft=once.get("DRAFT"),
        adapters=tuple(adapters),
    )


def write_modelfile(model: Modelfile) -> str:
    """The text of a Modelfile that parses to the same recipe. Raises InvalidRequest for values that no quotes can
    represent."""
    lines = [f"FROM {_quoted(path)}" for path in model.from_]
    lines += [f"ADAPTER {_quoted(path)}" for path in model.adapters]
    lines += [f"DRAFT {_quoted(model.draft)}"] if model.draft else []
    lines += [f"TEMPLATE {_quoted(model.template)}"] if model.template is not None else []
    lines += [f"SYSTEM {_quoted(model.system)}"] if model.system is not None else []
    for name, value in model.parameters.items():
        lines += [f"PARAMETER {name} {_quoted(_text(v))}" for v in (value if isinstance(value, list) else [value])]
    lines += [f"MESSAGE {message['role']} {_quoted(message['content'])}" for message in model.messages]
    lines += [f"LICENSE {_quoted(text)}" for text in model.license]
    lines += [f"REQUIRES {model.requires}"] if model.requires else []
    return "\n".join(lines) + "\n"


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    """The text, in quotes if necessary. Text that ends with a quote, or has three in a row, can only stand unquoted."""
    plain = text == text.strip() and "\n" not in text and not text.startswith('"') and text
    if plain:
        return text
    if '"""' in text or text.endswith('"'):
        raise InvalidRequest("a Modelfile cannot hold a text with three quotes in a row, or with one at its end")
    return f'"""{text}"""'


def _add(parameters: dict[str, Value], name: str, text: str, line: int) -> None:
    """A repeated parameter replaces the previous value; a repeated `stop` adds a value."""
    try:
        value = parse_parameter(name, text)
    except InvalidRequest as error:
        raise _wrong(line, error.message, error.hint) from None
    before = parameters.get(name)
    parameters[name] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def _instructions(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line number, INSTRUCTION, the word before the value or "", value) of each instruction."""
    lines = iter(enumerate(re.sub("\r+\n", "\n", text.removeprefix("\ufeff")).split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, rest = _word(line)
        instruction = word.upper()
        if instruction not in _KNOWN:
            raise _wrong(number, f"{word[:40]!r} is not an instruction", f"expected one of {', '.join(_KNOWN)}")
        head, rest = _word(rest) if instruction in ("PARAMETER", "MESSAGE") else ("", rest)
        while (value := _unquoted(rest)) is None:
            if (following := next(lines, None)) is None:
                raise _wrong(number, f"the quotes of {instruction} do not end", "close them with one or three quotes")
            rest = f"{rest}\n{following[1]}"
        yield number, instruction, head, value


def _word(text: str) -> tuple[str, str]:
    word, *rest = text.split(maxsplit=1) or [""]
    return word, rest[0].rstrip() if rest else ""


def _unquoted(text: str) -> str | None:
    """The value, or None if its quotes are still open."""
    for quote in ('"""', '"'):
        if text.startswith(quote):
            stripped = text.rstrip()
            closed = len(stripped) >= 2 * len(quote) and stripped.endswith(quote)
            return stripped[len(quote) : -len(quote)] if closed else None
    return text


def _wrong(line: int, message: str, hint: str) -> InvalidRequest:
    return InvalidRequest(f"Modelfile, line {line}: {message}", hint)
