"""What the tests of the Messages API share: an engine that repeats its prompt, so a prompt says what the model says."""

from __future__ import annotations

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import EchoEngine, byte_tokenizer

USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL = {
    "name": "f",
    "description": "does it",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é, }"}}\n</tool_call>'
SAID = f"<think>\nI need f.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
FIRST = "{{ messages[0].content }}{# <think> <tool_call> #}"  # the prompt is what the first message says
SPOKEN = (
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.reasoning_content %}|{{ m.reasoning_content }}{% endif %}|{{ m.content }}"
    "{% for c in m.tool_calls or () %}|{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}|{{ m.tool_call_id }}:{{ m.name }}{% endif %}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% if add_generation_prompt %}[assistant|{% endif %}"
)


def front(template: str = FIRST, **options) -> Front:
    return Front(
        EchoEngine(max_model_len=2048, num_blocks=1000),
        byte_tokenizer(),
        ChatTemplate(template),
        **({"trust_special_tokens": True} | options),
    )


def body(reply: str = SAID, *, extra: dict | None = None, **fields) -> dict:
    messages = [{"role": "user", "content": reply + "<eos>"}]
    more = {"extra_body": {"temperature": 0.0, **(extra or {})}}
    return {"model": "fake", "max_tokens": 400, "messages": messages, "tools": [TOOL], **more, **fields}
