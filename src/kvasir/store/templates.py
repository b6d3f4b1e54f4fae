"""Templates that a model has in addition to its weights: Jinja, like chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvasir.errors import InvalidRequest, TemplateError
from kvasir.text.chat import ChatTemplate

MAX_CHARS = 1 << 20
# Syntax of Go's text/template that is not Jinja: https://pkg.go.dev/text/template
_GO = re.compile(r"\{\{-?\s*(?:/\*|\.|\$|(?:if|else|end|range|with|define|block|template|break|continue)(?=[\s}-]))")
_WORDS = "the words of a test"
PROBE = ({"role": "user", "content": _WORDS},)


def is_go(template: str) -> bool:
    return _GO.search(template) is not None


def check_template(template: str) -> None:
    """Renders a small conversation. Raises InvalidRequest for a template in Go's syntax, one that fails, or one that
    omits the messages."""
    check_source(template)
    with no_template_errors():
        check_probe(ChatTemplate(template).render(PROBE).text)


def check_source(template: str) -> None:
    if len(template) > MAX_CHARS:
        raise InvalidRequest(f"the template has {len(template)} characters", f"at most {MAX_CHARS}", "template")
    if is_go(template):
        raise InvalidRequest(
            "the template uses Go's syntax, which is not supported",
            "write it in Jinja, as chat templates on the hub are, or leave it out for the model's own",
            param="template",
        )


@contextmanager
def no_template_errors() -> Iterator[None]:
    """Turns rendering errors into InvalidRequest."""
    try:
        yield
    except TemplateError as error:
        raise InvalidRequest(f"the template failed: {error.message}", error.hint, param="template") from error


def check_probe(text: str) -> None:
    """text: the rendering of PROBE. Raises InvalidRequest if it omits the user's message."""
    if _WORDS not in text:
        raise InvalidRequest(
            "the template does not render the user's messages",
            "render `messages` in it, in Jinja",
            param="template",
        )
