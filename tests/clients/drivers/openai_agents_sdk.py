"""OpenAI's Agents SDK over chats and responses: runs, streams, tools, typed output, loops."""

from __future__ import annotations

import asyncio
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
from agents.exceptions import MaxTurnsExceeded
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
)
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

set_tracing_disabled(True)
ASKED = "Tell me a story about a fox."


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


def agent(
    name: str = MODEL, url: str = URL, key: str = KEY, tools: object = (), **settings: object
) -> Agent:
    """With an answer of 16 greedy tokens, if nothing else is said."""
    output = settings.pop("output", None)
    kind = settings.pop("api", OpenAIChatCompletionsModel)
    model = kind(name, AsyncOpenAI(base_url=url, api_key=key))
    known = ModelSettings(**{"temperature": 0, "max_tokens": 16, **settings})
    return Agent("teller", model=model, model_settings=known, tools=[*tools], output_type=output)


async def main() -> None:
    with check("chat"):
        result = await Runner.run(agent(), ASKED)
        assert result.final_output

    with check("instructions and conversation"):
        told = [*result.to_input_list(), {"role": "user", "content": "And then?"}]
        again = agent()
        again.instructions = "You tell stories."
        assert (await Runner.run(again, told)).final_output

    with check("usage"):
        [response] = result.raw_responses
        assert response.usage.output_tokens == 16
        assert response.usage.output_tokens_details.reasoning_tokens == 0

    with check("chat stream"):
        stream = Runner.run_streamed(agent(include_usage=True), ASKED)
        pieces = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        assert "".join(pieces) == stream.final_output == result.final_output
        assert stream.raw_responses[0].usage.output_tokens == 16

    with check("structured output"):
        found = await Runner.run(agent(output=Animal, max_tokens=400), ASKED)
        assert isinstance(found.final_output, Animal)

    with check("forced tool"):
        asked: list[str] = []

        @function_tool
        def weather(city: Literal["Berlin", "Paris"]) -> str:
            """How the weather is."""
            asked.append(city)
            return f"sunny in {city}"

        found = await Runner.run(
            agent(TOOL_MODEL, tools=[weather], tool_choice="required", max_tokens=60), ASKED
        )
        assert asked
        assert found.final_output is not None

    with check("reasoning effort"):
        result = await Runner.run(agent(reasoning={"effort": "low"}), ASKED)
        assert result.final_output

    with check("responses: chat, stream, structured output"):
        # It takes an answer that was cut off for a failure, so the story goes to its end.
        whole_story = {"api": OpenAIResponsesModel, "max_tokens": 1500}
        responses = {**whole_story, "store": False}
        told = await Runner.run(agent(**responses), ASKED)
        assert told.raw_responses[0].usage.output_tokens > 16
        stream = Runner.run_streamed(agent(**responses), ASKED)
        pieces = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        assert "".join(pieces) == stream.final_output == told.final_output
        found = await Runner.run(agent(output=Animal, **responses), ASKED)
        assert isinstance(found.final_output, Animal)

    with check("responses: previous_response_id"):
        first = await Runner.run(agent(**whole_story), ASKED)
        then = await Runner.run(
            agent(**whole_story),
            "And then?",
            previous_response_id=first.last_response_id,
        )
        history = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
        whole = await Runner.run(agent(**responses), history)
        assert then.final_output == whole.final_output

    for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for streams in (False, True):
            with check(("responses: " * (api is OpenAIResponsesModel)) + loops_name(streams)):
                for name in loop_models():
                    await loop(name, streams, api)

    with check("typed errors"):
        with raises(BadRequestError, "maximum context length"):
            await Runner.run(agent(), "A fox. " * 3000)
        with raises(NotFoundError):
            await Runner.run(agent("nobody"), ASKED)
        with raises(AuthenticationError):
            await Runner.run(agent(key="wrong"), ASKED)
    report("openai-agents")


async def loop(name: str, streams: bool, api: type) -> None:
    """Three calls and an answer; the same agent then goes on with the conversation."""
    asked: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """How the weather is."""
        asked.append(city)
        return f"{city} is sunny"

    teller = agent(name, LOOPS, "none", [weather], max_tokens=400, api=api)
    try:
        if streams:
            result = Runner.run_streamed(teller, "Weather?", max_turns=5)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(teller, "Weather?", max_turns=5)
    except MaxTurnsExceeded:
        raise AssertionError(f"{name}: it never answers, after {asked}") from None
    assert (asked, result.final_output) == (CITIES, LOOP_ANSWER), (name, asked, result.final_output)
    told = [*result.to_input_list(), {"role": "user", "content": "Sure?"}]
    assert (await Runner.run(teller, told)).final_output == LOOP_ANSWER, name


asyncio.run(main())
