"""Pydantic AI: agents with an `OpenAIChatModel`; tools, typed outputs and streams."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOPS,
    MODEL,
    TOOL_MODEL,
    URL,
    check,
    loop_models,
    loops_name,
    raises,
    report,
    wait_until_cancelled,
)
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import (
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelNotFoundError,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = "Tell me a story about a fox."
PROVIDER = OpenAIProvider(base_url=URL, api_key=KEY)
WRONG = OpenAIProvider(base_url=URL, api_key="wrong")


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


class WeatherFirst(AbstractCapability):
    """Asks for the weather before it answers, however small the model is."""

    def get_model_settings(self) -> object:
        return lambda run: {"tool_choice": ["weather"]} if run.run_step == 1 else {}


def agent(name: str = MODEL, output: object = str, **settings: object) -> Agent:
    """With an answer of 16 greedy tokens, if nothing else is said."""
    model = OpenAIChatModel(name, provider=PROVIDER)
    settings = {"temperature": 0, "max_tokens": 16, **settings}
    return Agent(model, output_type=output, model_settings=settings)


with check("chat"):
    first = agent().run_sync(ASKED)
    assert first.output


async def loop(name: str, streams: bool) -> None:
    """Three calls and an answer."""
    asked: list[str] = []
    provider = OpenAIProvider(base_url=LOOPS, api_key="none")
    teller = Agent(OpenAIChatModel(name, provider=provider), model_settings={"max_tokens": 400})

    @teller.tool_plain
    def weather(city: str) -> str:
        """How the weather is."""
        asked.append(city)
        return f"{city} is sunny"

    if streams:
        async with teller.run_stream("Weather?") as stream:
            answer = await stream.get_output()
    else:
        answer = (await teller.run("Weather?")).output
    assert (asked, answer) == (CITIES, LOOP_ANSWER), (name, asked, answer)


async def main() -> None:
    with check("async chat"):
        result = await agent().run(ASKED)
        assert result.output == first.output
        assert result.response.model_name == MODEL

    with check("usage"):
        usage = result.usage
        assert (usage.requests, usage.output_tokens) == (1, 16)
        assert usage.input_tokens > 0

    with check("chat stream"):
        async with agent().run_stream(ASKED) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == result.output
        assert stream.usage.output_tokens == 16

    with check("conversation"):
        again = await agent().run("And then?", message_history=result.all_messages())
        assert again.output
        assert again.usage.input_tokens > usage.input_tokens

    with check("seed and stop"):
        texts = [(await agent(temperature=1, seed=seed).run(ASKED)).output for seed in (5, 5, 6)]
        assert texts[0] == texts[1] != texts[2]
        word = result.output.split()[2]
        cut = (await agent(stop_sequences=[word]).run(ASKED)).output
        assert cut == result.output[: result.output.index(word)]

    with check("logprobs"):
        told = await agent(openai_logprobs=True, openai_top_logprobs=2).run(ASKED)
        assert len(told.response.provider_details["logprobs"]) == 16

    for name, output in (("tool", ToolOutput(Animal)), ("native", NativeOutput(Animal))):
        with check(f"structured output ({name})"):
            found = await agent(output=output, max_tokens=400).run(ASKED)
            assert isinstance(found.output, Animal)

    with check("structured output stream"):
        async with agent(output=ToolOutput(Animal), max_tokens=400).run_stream(ASKED) as stream:
            assert isinstance(await stream.get_output(), Animal)

    with check("tools"):
        told: list[str] = []
        model = OpenAIChatModel(TOOL_MODEL, provider=PROVIDER)
        teller = Agent(model, output_type=ToolOutput(Animal), capabilities=[WeatherFirst()])

        @teller.tool_plain
        def weather(city: Literal["Berlin", "Paris"]) -> str:
            """How the weather is."""
            told.append(city)
            return f"sunny in {city}"

        found = await teller.run(ASKED, model_settings={"temperature": 0, "max_tokens": 400})
        assert isinstance(found.output, Animal)
        assert told
        assert found.usage.requests == 2

    for streams in (False, True):
        with check(loops_name(streams)):
            for name in loop_models():
                await loop(name, streams)

    with check("typed errors"):
        with raises(ModelContextWindowExceededError):
            await agent().run("A fox. " * 3000)
        with raises(ModelNotFoundError, MODEL):
            await agent("nobody").run(ASKED)
        with raises(ModelHTTPError, "422", "temperature"):
            await agent(temperature=9).run(ASKED)
        with raises(ModelAuthenticationError):
            await Agent(OpenAIChatModel(MODEL, provider=WRONG)).run(ASKED)

    with check("cancel"):
        endless = agent(max_tokens=1500, extra_body={"ignore_eos": True})
        async with endless.run_stream(ASKED) as stream:
            async for _ in stream.stream_text(delta=True):
                await stream.cancel()
                break
        await asyncio.to_thread(wait_until_cancelled)
    report("pydantic-ai-slim")


asyncio.run(main())
