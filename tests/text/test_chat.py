"""Chat templates: byte for byte what transformers renders, for every real template."""

import json
from datetime import datetime

import pytest

from kvasir.errors import InvalidRequest, TemplateError
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateLimit, TemplateLimits, TemplateRenderer
from tests._shared import SHARED, need

NOW = datetime(2025, 7, 4, 12, 30)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = sorted(path.name for path in (SHARED / "chat_templates").glob("*.jinja")) or ["absent"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather <now> & "here".',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Näme"},
                    "days": {"type": "integer", "description": "How many"},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call12345", "type": "function"}
CALL["function"] = {"name": "get_weather", "arguments": {"city": "Malmö", "days": 2}}
SYSTEM = {"role": "system", "content": "Be <brief>."}
HELLO = {"role": "user", "content": "Hello, wörld!\n"}
ANSWER = {"role": "assistant", "content": "Hi there. "}
CONVERSATIONS = {
    "one message": {"messages": [HELLO]},
    "several turns": {"messages": [SYSTEM, HELLO, ANSWER, {"role": "user", "content": "And now?"}]},
    "no generation prompt": {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    "reasoning": {
        "messages": [HELLO, {**ANSWER, "reasoning_content": "Let me see."}, HELLO],
        "template_kwargs": {"enable_thinking": False},
    },
    "tools": {"messages": [HELLO], "tools": TOOLS},
    "tool calls": {
        "messages": [
            HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "call12345",
                "name": "get_weather",
                "content": '{"sky": "blue"}',
            },
        ],
        "tools": TOOLS,
    },
    "documents": {"messages": [HELLO], "documents": [{"title": "T", "text": "Some text."}], "tools": TOOLS},
    "to be continued": {"messages": [HELLO, ANSWER], "continue_final_message": True},
}


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


@pytest.fixture
def oracle(monkeypatch):
    """transformers' own renderer, at the fixed time."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    monkeypatch.setattr(utils, "datetime", Clock)

    def render(
        source,
        messages,
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs=None,
        **more,
    ):
        return utils.render_jinja_template(
            [messages],
            chat_template=source,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **TOKENS,
            **(template_kwargs or {}),
            **more,
        )[0][0]

    return render


def chat(source, renderer, **more) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, renderer, clock=lambda: NOW, **more)


@pytest.mark.few(60)
@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_real_template_renders_as_transformers_does(name, case, renderer, oracle):
    source = need("chat_templates", name).read_text(encoding="utf-8")
    try:
        expected = oracle(source, **CONVERSATIONS[case])
    except Exception:
        with pytest.raises(TemplateError):
            chat(source, renderer).render(**CONVERSATIONS[case])
        return
    assert chat(source, renderer).render(**CONVERSATIONS[case]).text == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_real_template_renders_a_conversation(name, renderer):
    source = need("chat_templates", name).read_text(encoding="utf-8")
    text = chat(source, renderer).render([HELLO], tools=TOOLS).text
    assert "Hello, wörld!" in text


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}|{{ x }}",
        "{% for i in [1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}",
        "  {% if true %}\n   x\n  {% endif %}\n y\n",
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': '<é>'} | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
        "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(x=1)['x'] }}",
        "{{ strftime_now('%d %B %Y') }}{{ bos_token }}{{ missing }}{{ tools is none }}",
        "{{ messages[0]['content'].strip().split(',') }}{{ messages[0].items() | list }}",
    ],
)
def test_the_environment_is_transformers(source, renderer, oracle):
    assert chat(source, renderer).render([HELLO]).text == oracle(source, [HELLO])


# --- the choice of a template --------------------------------------------------------------------------

NAMED = {"default": "D", "tool_use": "T", "rag": "R"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "D"),
        ({"tools": TOOLS}, "T"),
        ({"documents": [{"text": "x"}]}, "R"),
        ({"tools": []}, "D"),
        ({"tools": TOOLS, "chat_template": "default"}, "D"),
        ({"chat_template": "{{ messages[0].content }}!"}, "Hello, wörld!\n!"),
    ],
)
def test_named_templates_are_chosen(arguments, text, renderer):
    assert chat(NAMED, renderer).render([HELLO], **arguments).text == text


def test_a_model_without_a_template_refuses_chat(renderer):
    for nothing in (None, {}):
        with pytest.raises(InvalidRequest, match="--chat-template"):
            chat(nothing, renderer).render([HELLO])


def test_a_model_without_a_default_template_lists_its_templates(renderer):
    with pytest.raises(InvalidRequest, match="only rag"):
        chat({"rag": "R"}, renderer).render([HELLO])


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "raise_exception", "_private", "self", "two words"])
def test_switches_may_not_take_the_names_of_inputs(name, renderer):
    with pytest.raises(InvalidRequest) as caught:
        chat("x", renderer).render([HELLO], template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_hanging_template_is_given_its_time_once(monkeypatch):
    hanging = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = TemplateRenderer(TemplateLimits(seconds=0.3))
    calls = []
    render = renderer.render
    monkeypatch.setattr(renderer, "render", lambda *args: (calls.append(1), render(*args))[1])
    with pytest.raises(TemplateLimit, match=r"0\.3 seconds"):
        chat(hanging, renderer).render([HELLO, {"role": "user", "content": []}])
    assert len(calls) == 1
    renderer.close()


# --- contents and tool calls ---------------------------------------------------------------------------

STRINGS = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
EITHER = "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}" + (
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PRINTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
TWO = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
ONE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("source", "message", "text"),
    [
        (STRINGS, ONE, "<a>"),
        (STRINGS, TWO, "<a\nb>"),
        (PARTS, ONE, "[a]"),
        (PARTS, TWO, "[a][b]"),
        (EITHER, ONE, "<a>"),
        (EITHER, TWO, "[a][b]"),
        (PRINTS, TWO, "a\nb"),
        ("{{ messages | tojson }}", TWO, '[{"role": "user", "content": "a\\nb"}]'),
    ],
)
def test_contents_come_in_the_form_the_template_takes(source, message, text, renderer):
    template = chat(source, renderer)
    assert template.render([message]).text == text
    assert template.render([message]).text == text, "what was learnt once stays"


def test_a_picture_for_a_template_of_text_is_refused(renderer):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(InvalidRequest, match="image_url"):
        chat(STRINGS, renderer).render([message])


def called(arguments) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CALLS = (
    "{%% for m in messages %%}{%% for c in m.tool_calls or [] %%}{{ %s }}{%% endfor %%}{%% endfor %%}"
    "{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("c.function.arguments | tojson", '{"a": "é"}'),
        ("c.function.arguments.a", "é"),
        ("'json' + c.function.arguments", 'json{"a": "é"}'),
        ("c.function.arguments", '{"a": "é"}'),
    ],
)
@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'])
def test_arguments_of_tool_calls_come_in_the_form_the_template_takes(expression, text, arguments, renderer):
    if expression == "c.function.arguments.a":
        # No key of this template is among those that the question about it uses.
        expression = "(c.function.arguments.values() | list)[0]"
    assert chat(CALLS % expression, renderer).render([HELLO, called(arguments)]).text == text + HELLO["content"]


# DeepSeek-R1-Distill-Llama pastes text, and shows calls only beside null; gpt-oss fails on null.
NULL_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}{{ '<call>' + c['function']['name'] + c['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
)
NO_NULL = (
    "{% for m in messages %}{% if '<|' in m.content %}{{ raise_exception('!') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ 'null' if m.content is none else m.content }}{% endfor %}"
)
PRINTS_NONE = BOTH.replace("'null' if m.content is none else m.content", "m.content")


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (NULL_ONLY, None, '<user>a<call>f{"a": 1}'),
        (NULL_ONLY, "", '<user>a<call>f{"a": 1}'),
        (NULL_ONLY, "Wait.", '<user>a<assistant>Wait.<call>f{"a": 1}'),
        (NO_NULL, None, 'a<call>f{"a": 1}'),
        (NO_NULL, "", 'a<call>f{"a": 1}'),
        (BOTH, None, 'a<call>f{"a": 1}null'),
        (BOTH, "", 'a<call>f{"a": 1}'),
        (BOTH, "Wait.", 'a<call>f{"a": 1}Wait.'),
        (PRINTS_NONE, None, 'a<call>f{"a": 1}'),
    ],
)
def test_calls_are_shown_whatever_content_the_template_wants_beside_them(source, content, text, renderer):
    message = {**called('{"a": 1}'), "content": content}
    assert chat(source, renderer).render([ONE, message]).text == text


def test_a_message_without_a_content_shows_its_calls(renderer):
    message = called('{"a": 1}')
    del message["content"]
    assert chat(NULL_ONLY, renderer).render([ONE, message]).text == '<user>a<call>f{"a": 1}'


def test_null_without_calls_is_empty(renderer):
    message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert chat(NULL_ONLY, renderer).render([ONE, message]).text == "<user>a<assistant>"


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments, renderer):
    with pytest.raises(InvalidRequest, match="arguments"):
        chat(CALLS % "c.function.arguments | tojson", renderer).render([HELLO, called(arguments)])


@pytest.mark.parametrize("message", ["hi", None, {}, {"role": 3}, {"role": "assistant", "tool_calls": 3}])
def test_malformed_conversations_are_refused(message, renderer):
    with pytest.raises(InvalidRequest) as caught:
        chat("x", renderer).render([message])
    assert caught.value.param == "messages"


def test_the_callers_messages_are_not_modified(renderer):
    messages = [HELLO, {**called('{"a": 1}'), "content": ""}, {**TWO, "reasoning": "r"}]
    before = json.dumps(messages)
    chat(EITHER, renderer).render(messages, continue_final_message=True)
    assert json.dumps(messages) == before


# --- going on with the final message -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("{{ messages[-1].content }}<end>", "to be ", "to be "),
        ("{{ messages[-1].content | trim }}<end>", "to be ", "to be"),
        (EITHER, [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], "[a][b "),
    ],
)
def test_the_final_message_is_left_open(source, content, text, renderer):
    message = {"role": "assistant", "content": content}
    assert chat(source, renderer).render([message], continue_final_message=True).text == text


def test_a_dropped_final_message_cannot_be_continued(renderer):
    with pytest.raises(TemplateError, match="final message"):
        chat("x", renderer).render([ANSWER], continue_final_message=True)


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}], [{"role": "user", "content": []}]])
def test_an_empty_conversation_cannot_be_continued(messages, renderer):
    with pytest.raises(InvalidRequest):
        chat(EITHER, renderer).render(messages, continue_final_message=True)
