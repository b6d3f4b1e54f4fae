"""The chat template and the tokenizer, as the exported folder uses them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from .skills.case import Case

TEMPLATE = Path(__file__).with_name("template.jinja")
END, START = "<|im_end|>", "<|im_start|>"


def to_json(value: Any, **options: Any) -> str:
    """`tojson` as chat templates mean it: keys in order, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


@cache
def compiled(source: str):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = to_json
    return env.from_string(source)


def render(messages: list[dict], tools: list | None = None, *, generate: bool = True, thinking: bool = False,
           source: str | None = None) -> str:  # fmt: skip
    """Messages to the text the model sees, ready for an answer if `generate`."""
    template = compiled(source or TEMPLATE.read_text())
    return template.render(messages=messages, tools=tools, add_generation_prompt=generate, enable_thinking=thinking)


def render_case(case: Case) -> str:
    """The whole conversation, the answer included."""
    return render(case.messages, case.tools, generate=False, thinking=case.thinking)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
