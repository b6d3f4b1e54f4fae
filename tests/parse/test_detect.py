"""Formats found out from what a template writes: whatever format that is, it is recognised, and no other is."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.engine.reading import sample_of
from kvasir.parse.detect import Sample, detect
from kvasir.parse.format import Style
from kvasir.parse.table import CALLS, NO_CALLS
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateRenderer
from tests.parse.writing import CALLING, format_of, written

ARGUMENTS: list[dict[str, Any]] = [{"word": "yggdrasil", "count": 4217}, {"count": 5903, "word": "ratatoskr"}]
TOOLS = {"look_up": {"properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}}
SAME = {("llama4", 1): "llama3", ("llama4", 2): "llama3"}  # without a mark they write the same
SAME |= {("glm4", 1): "functionary_v3.2"}


def sample(name: str, count: int = 2, before: str = "", behind: str = "") -> Sample:
    calls = [("look_up", arguments) for arguments in ARGUMENTS[:count]]
    reply = before + written(format_of(name), calls) + behind
    return Sample("", reply, "<|im_end|>\n", tuple(calls), TOOLS)


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CALLING)
def test_every_format_is_recognised_by_samples_of_it(name, count):
    found = detect("", samples=[sample(name, count, behind="<|im_end|>\n")])
    assert (found.format.calls.name, found.fault) == (SAME.get((name, count), name), "")


@pytest.mark.parametrize("name", [name for name in CALLING if name != "harmony"])
def test_marks_around_a_known_format_make_it_unknown(name):
    """Marks around a known format make it an unknown format: they would be emitted as content."""
    found = detect("", samples=[sample(name, before="<calls>", behind="</calls>")])
    assert found.format.calls is NO_CALLS
    assert "<calls>" in found.fault


def test_samples_override_the_signs_of_a_template():
    """A format is not forced upon a model that writes another one in a way that looks like it."""
    signs = "'<tool_call>' and '<function=' '<parameter='"
    assert detect(signs).format.calls.name == "qwen3_coder"
    assert detect(signs, samples=[sample("hermes")]).format.calls.name == "hermes"
    unknown = detect(
        signs, samples=[Sample("", "<tool_call>look_up word yggdrasil", "", sample("hermes").calls, TOOLS)]
    )
    assert unknown.format.calls is NO_CALLS and "unknown format" in unknown.fault


def test_samples_are_asked_for_until_one_is_understood():
    odd = Sample("", "look_up yggdrasil 4217", "", sample("hermes", 1).calls, TOOLS)
    asked = []
    shown = (asked.append(i) or each for i, each in enumerate([odd, sample("hermes", 1), sample("hermes")]))
    assert detect("", samples=shown).format.calls.name == "hermes" and asked == [0, 1]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages }}", ""),
        ("{{ tools }}", "the chat template accepts tools and renders no calls"),
        ("<tool_call>", ""),
    ],
)
def test_templates_that_show_no_calls_have_a_fault(template, fault):
    assert detect(template).fault == fault


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}CALLS<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}EACH{% endfor %}"
JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
ITEMS = "{% for k, v in c.function.arguments.items() %}EACH{% endfor %}"


def template(calls: str, opened: str = "") -> str:
    return CHAT.replace("CALLS", calls).replace("OPENED", opened)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (template(EACH.replace("EACH", f"<tool_call>\n{JSON}\n</tool_call>")), "hermes"),
        # LFM2.5: a mark of its own prompt was looked for that this template does not have
        (
            template(
                "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
                "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
                "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
                "<|tool_call_end|>{% endif %}"
            ),
            "lfm2",
        ),
        # Apriel: its results of tools are between marks that look like another format's calls
        (
            template(
                "{% if m.tool_calls %}<tool_calls>[{% for c in m.tool_calls %}" + JSON + "{{ ', ' if not loop.last }}"
                "{% endfor %}]</tool_calls>{% endif %}{# <tool_call> #}"
            ),
            "tool_calls",
        ),
        # the mark is put together
        (
            "{% set n = ']<]minimax[>[' %}"
            + template(
                "{% if m.tool_calls %}{{ n }}<tool_call>\n{% for c in m.tool_calls %}{{ n }}<invoke name=\""
                "{{ c.function.name }}\">" + ITEMS.replace("EACH", "{{ n }}<{{ k }}>{{ v }}{{ n }}</{{ k }}>")
                + "{{ n }}</invoke>\n{% endfor %}{{ n }}</tool_call>{% endif %}"
            ),
            "minimax_m3",
        ),
        # the prompt has begun to think, and what is past is rendered without
        (template(EACH.replace("EACH", f"<tool_call>\n{JSON}\n</tool_call>"), "<think>\n"), "hermes"),
        # one call in a message at most
        (
            template(
                "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
                "{% set c = m.tool_calls[0] %}" + JSON.replace("arguments", "parameters", 1) + "{% endif %}"
            ),
            "llama3",
        ),
        # calls are shown beside null alone, their arguments pasted as text
        (
            template("")
            .replace("{{ m.content or '' }}", "{{ m.content if m.content is not none }}{% if m.content is none %}"
                     "{% for c in m.tool_calls %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": "
                     "{{ '' + c.function.arguments }}}</tool_call>{% endfor %}{% endif %}"),
            "hermes",
        ),
        # each message names its recipient, and the prompt has written the mark before the first
        (
            template(EACH.replace("EACH", ">>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"))
            .replace("{{ m.content or '' }}", "{% if m.content %}>>>all\n{{ m.content }}{% endif %}")
            .replace("<|im_start|>assistant\n", "<|im_start|>assistant\n>>>"),
            "functionary_v3.2",
        ),
        (template(EACH.replace("EACH", "<call {{ c.function }}>")), "none"),
        # text of a conversation is not the template's
        (template("{# <tool_call> #}{{ m.tool_calls or '' }}"), "none"),
    ],
)  # fmt: skip
def test_a_template_s_calls_are_understood(source, name, renderer):
    shown = map(sample_of, ChatTemplate(source, renderer=renderer).samples(source))
    found = detect(source, samples=shown)
    assert found.format.calls.name == name
    assert bool(found.fault) is (name == "none")


def test_a_template_without_calls_is_judged_by_its_words(renderer):
    source = template("{# <tool_call> #}")
    assert list(ChatTemplate(source, renderer=renderer).samples(source)) == []
    assert detect(source).format.calls.name == "hermes"


def test_names_are_unique():
    names = [row.name for row in CALLS]
    assert len(set(names)) == len(names) and [row for row in CALLS if row.style is Style.NONE] == [NO_CALLS]
