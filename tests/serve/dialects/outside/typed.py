"""python typed.py URL MODEL: answers of a type by instructor and pydantic-ai, whole and streamed. Prints what came."""

from __future__ import annotations

import asyncio
import json
import sys

import instructor
import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

ASK = "What is 23 + 45?"


class Sum(BaseModel):
    left: int
    right: int


def by_instructor(url: str, model: str) -> dict:
    found = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        asked = {"model": model, "messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_tokens": 100}
        answer = client.chat.completions.create(response_model=Sum, max_retries=0, **asked)
        found[f"instructor {mode.name}"] = answer.model_dump()
    return found


async def by_pydantic_ai(url: str, model: str) -> dict:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(chat, output_type=NativeOutput(Sum), model_settings=ModelSettings(temperature=0, max_tokens=100))
    whole = (await agent.run(ASK)).output
    async with agent.run_stream(ASK) as stream:
        streamed = await stream.get_output()
    plain = Agent(chat, model_settings=ModelSettings(temperature=0, max_tokens=30))
    text = (await plain.run(ASK)).output
    return {"pydantic-ai": whole.model_dump(), "pydantic-ai stream": streamed.model_dump(), "text": text}


url, model = sys.argv[1:]
print(json.dumps(by_instructor(url, model) | asyncio.run(by_pydantic_ai(url, model))))
