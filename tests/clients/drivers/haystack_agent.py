"""Haystack: the chat generator, its streams and typed output, agents and loops."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

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
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from openai import AuthenticationError, BadRequestError
from pydantic import BaseModel, Field

ASKED = [ChatMessage.from_user("Tell me a story about a fox.")]


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


def generator(
    name: str = MODEL, url: str = URL, key: str = KEY, streams: object = None, **settings: object
) -> OpenAIChatGenerator:
    """With an answer of 16 greedy tokens, if nothing else is said."""
    return OpenAIChatGenerator(
        Secret.from_token(key),
        name,
        streaming_callback=streams,
        api_base_url=url,
        max_retries=0,
        generation_kwargs={"temperature": 0, "max_tokens": 16, **settings},
    )


def main() -> None:
    with check("chat"):
        [first] = generator().run(ASKED)["replies"]
        assert first.text
        assert first.meta["finish_reason"] == "length"
        assert first.meta["usage"]["completion_tokens"] == 16

    with check("n"):
        assert len(generator(n=3, temperature=1).run(ASKED)["replies"]) == 3

    with check("conversation"):
        told = [*ASKED, first, ChatMessage.from_user("And then?")]
        assert generator().run(told)["replies"][0].text

    with check("chat stream"):
        chunks: list[StreamingChunk] = []
        [reply] = generator(streams=chunks.append).run(ASKED)["replies"]
        assert reply.text == first.text == "".join(chunk.content for chunk in chunks)

    with check("async"):
        [reply] = asyncio.run(generator().run_async(ASKED))["replies"]
        assert reply.text == first.text

    with check("structured output"):
        [reply] = generator(response_format=Animal, max_tokens=200).run(ASKED)["replies"]
        assert Animal.model_validate_json(reply.text)

    with check("forced tool"):
        asked: list[str] = []

        @tool
        def weather(city: Annotated[Literal["Berlin", "Paris"], "A city"]) -> str:
            """How the weather is."""
            asked.append(city)
            return f"sunny in {city}"

        forced = generator(TOOL_MODEL, tool_choice="required", max_tokens=60)
        [reply] = forced.run(ASKED, tools=[weather])["replies"]
        [call] = reply.tool_calls
        assert call.tool_name == "weather"
        assert json.dumps(call.arguments)
        told = [*ASKED, reply, ChatMessage.from_tool("sunny", origin=call)]
        assert generator(TOOL_MODEL).run(told, tools=[weather])["replies"][0].text

    for streams in (False, True):
        with check(loops_name(streams)):
            for name in loop_models():
                loop(name, streams)

    with check("typed errors"):
        with raises(BadRequestError, "maximum context length"):
            generator().run([ChatMessage.from_user("A fox. " * 3000)])
        with raises(AuthenticationError):
            generator(key="wrong").run(ASKED)
    report("haystack-ai")


def loop(name: str, streams: bool) -> None:
    """Three calls and an answer."""
    asked: list[str] = []

    @tool
    def weather(city: Annotated[str, "A city"]) -> str:
        """How the weather is."""
        asked.append(city)
        return f"{city} is sunny"

    callback = (lambda chunk: None) if streams else None
    own = generator(name, LOOPS, "none", callback, max_tokens=400)
    agent = Agent(chat_generator=own, tools=[weather], max_agent_steps=6)
    result = agent.run([ChatMessage.from_user("Weather?")])
    text = result["last_message"].text
    assert (asked, text) == (CITIES, LOOP_ANSWER), (name, asked, text)


main()
