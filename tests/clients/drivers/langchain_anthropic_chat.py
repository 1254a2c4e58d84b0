"""LangChain's `ChatAnthropic`, as a chain uses it."""

from __future__ import annotations

import asyncio
import functools
import operator
from typing import Literal

import anthropic
from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOP_TOOLS,
    LOOPS,
    MODEL,
    TOO_LONG,
    TOOL_MODEL,
    URL,
    check,
    loop_models,
    loops_name,
    raises,
    report,
    wait_until_cancelled,
)
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

MESSAGES = [HumanMessage("Tell me a story about a fox.")]


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


class Kind(BaseModel, extra="forbid"):
    """Which animal."""

    kind: Literal["fox", "owl", "hen"]


@tool
def weather(city: Literal["Berlin", "Paris"]) -> str:
    """How the weather is."""
    return f"sunny in {city}"


def chat(**how: object) -> ChatAnthropic:
    """A model with an answer of 16 greedy tokens, if nothing else is said."""
    where = {"base_url": URL.removesuffix("/v1"), "api_key": KEY}
    return ChatAnthropic(
        **{"model": MODEL, "temperature": 0, "max_tokens": 16, "max_retries": 0, **where, **how}
    )


with check("chat"):
    answer = chat().invoke(MESSAGES)
    assert answer.text
    assert answer.response_metadata["stop_reason"] == "max_tokens"
    assert chat().invoke([SystemMessage("You tell stories."), *MESSAGES]).text

with check("chat stream"):
    pieces = list(chat().stream(MESSAGES))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert len(pieces) > 3

with check("usage"):
    assert answer.usage_metadata["output_tokens"] == 16
    whole = functools.reduce(operator.add, pieces[1:], pieces[0])
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]

with check("stop"):
    word = answer.text.split()[2]
    cut = chat().invoke(MESSAGES, stop=[word])
    assert cut.text == answer.text[: answer.text.index(word)]

with check("tool call"):
    model = chat(max_tokens=400).bind_tools(
        [weather], tool_choice="weather", parallel_tool_calls=False
    )
    called = model.invoke(MESSAGES)
    (call,) = called.tool_calls
    assert weather.invoke(call["args"]).startswith("sunny in ")

with check("tool call stream"):
    pieces = list(model.stream(MESSAGES))
    whole = functools.reduce(operator.add, pieces[1:], pieces[0])
    assert whole.tool_calls[0]["args"] == call["args"]

with check("tool result"):
    result = ToolMessage("sunny", tool_call_id=call["id"])
    model = chat(model=TOOL_MODEL).bind_tools([weather])
    assert model.invoke([*MESSAGES, called, result]).text

with check("structured output"):
    model = chat(max_tokens=400).with_structured_output(Animal)
    assert isinstance(model.invoke(MESSAGES), Animal)
    # Its `json_schema` tells the server nothing of the limits of numbers.
    model = chat(max_tokens=400).with_structured_output(Kind, method="json_schema")
    assert isinstance(model.invoke(MESSAGES), Kind)

with check("typed errors"):
    with raises(Exception, "prompt is too long"):
        chat().invoke(TOO_LONG[0]["content"])
    with raises(anthropic.NotFoundError, MODEL):
        chat(model="nobody").invoke(MESSAGES)
    with raises(anthropic.AuthenticationError):
        chat(api_key="wrong").invoke(MESSAGES)


def loop(name: str, streams: bool) -> None:
    """Three calls and an answer."""
    where = {"base_url": LOOPS.removesuffix("/v1"), "api_key": "none"}
    model = chat(model=name, max_tokens=400, **where).bind_tools(LOOP_TOOLS)
    messages: list[object] = [("user", "Weather?")]
    asked = []
    for _ in range(4):
        if streams:
            first, *rest = model.stream(messages)
            message = functools.reduce(operator.add, rest, first)
        else:
            message = model.invoke(messages)
        messages.append(message)
        for call in message.tool_calls:
            asked.append(call["args"]["city"])
            messages.append(ToolMessage(f"{asked[-1]} is sunny", tool_call_id=call["id"]))
    assert (asked, message.text) == (CITIES, LOOP_ANSWER), (name, asked, message.text)


for streams in (False, True):
    with check(loops_name(streams)):
        for name in loop_models():
            loop(name, streams)


async def alongside() -> None:
    """The same for asyncio."""
    with check("async chat"):
        assert (await chat().ainvoke(MESSAGES)).text == answer.text

    with check("async stream"):
        pieces = [piece.text async for piece in chat().astream(MESSAGES)]
        assert "".join(pieces) == answer.text

    with check("cancel"):
        stream = chat(max_tokens=1500, model_kwargs={"extra_body": {"ignore_eos": True}}).astream(
            MESSAGES
        )
        async for piece in stream:
            if piece.text:
                break
        await stream.aclose()
        await asyncio.to_thread(wait_until_cancelled)


asyncio.run(alongside())
report("langchain-anthropic")
