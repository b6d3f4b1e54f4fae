"""Prompts that are too long, by the clients of others: too_long.py URL. Prints the classes of each one's error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

URL = sys.argv[1]
TEXTS = {"counted": "x" * 600, "huge": "x" * 100_000}  # the second is refused before it is tokenized


def litellm_calls(text: str) -> Iterable[tuple[str, Callable[[], object]]]:
    import litellm

    messages = [{"role": "user", "content": text}]
    for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
        for stream in (False, True):

            def call(provider=provider, base=base, stream=stream) -> object:
                answer = litellm.completion(
                    f"{provider}/fake",
                    messages,
                    api_base=base,
                    api_key="none",
                    max_tokens=5,
                    stream=stream,
                    num_retries=0,
                )
                return list(answer) if stream else answer

            yield f"litellm {provider}{' stream' * stream}", call
    yield "litellm embedding", lambda: litellm.embedding("openai/fake", [text], api_base=f"{URL}/v1", api_key="none")


def langchain_calls(text: str) -> Iterable[tuple[str, Callable[[], object]]]:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    openai = {"model": "fake", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 5}
    chat, responses = ChatOpenAI(**openai), ChatOpenAI(**openai, use_responses_api=True)
    claude = ChatAnthropic(model="fake", base_url=URL, api_key="none", max_retries=0, max_tokens=5)
    for name, model in (("chat", chat), ("responses", responses), ("anthropic", claude)):
        yield f"langchain {name}", lambda model=model: model.invoke(text)
        yield f"langchain {name} stream", lambda model=model: list(model.stream(text))


def kind(call: Callable[[], object]) -> list[str]:
    """The classes of what it raises, the most special one first."""
    try:
        call()
    except Exception as error:
        return [cls.__name__ for cls in type(error).__mro__]
    return []


if __name__ == "__main__":
    found = {
        f"{name}, {size}": kind(call)
        for size, text in TEXTS.items()
        for calls in (litellm_calls, langchain_calls)
        for name, call in calls(text)
    }
    print(json.dumps(found))
