"""An agent of OpenAI's library with an output type and a tool that must be called: agents_pair.py URL MODEL. Each of
its requests has `response_format` beside `tool_choice`. Prints what came of it over both APIs, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


class Weather(BaseModel):
    sky: Literal["clear", "grey"]
    windy: bool


async def ask(kind: type, streams: bool) -> dict:
    asked: list[str] = []

    @function_tool
    def look(city: Literal["Oslo", "Rome"]) -> str:
        """How the weather is in a city."""
        asked.append(city)
        return "clear"

    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        model = kind(model=MODEL, openai_client=client)
        settings = ModelSettings(tool_choice="required", temperature=0.0, max_tokens=200, parallel_tool_calls=False)
        agent = Agent(
            "Weather", instructions="Look.", model=model, model_settings=settings, tools=[look], output_type=Weather
        )
        if streams:
            result = Runner.run_streamed(agent, "How is it in Oslo?", max_turns=3)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "How is it in Oslo?", max_turns=3)
    return {"asked": asked, "output": result.final_output.model_dump()}


async def main() -> None:
    set_tracing_disabled(True)
    found = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for streams in (False, True):
            name = f"{kind.__name__}{' stream' * streams}"
            try:
                found[name] = await ask(kind, streams)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


asyncio.run(main())
