"""LangChain's `ChatOpenAI` and `OpenAI`, as a chain uses them."""

from __future__ import annotations

import asyncio
import functools
import operator
from typing import Literal

import openai
from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOP_TOOLS,
    LOOPS,
    MODEL,
    STORY,
    TOOL_MODEL,
    URL,
    check,
    loop_models,
    loops_name,
    raises,
    report,
    wait_until_cancelled,
)
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

CONNECTION = {"base_url": URL, "api_key": KEY}
MESSAGES = [HumanMessage("Tell me a story about a fox.")]


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


@tool
def weather(city: Literal["Berlin", "Paris"]) -> str:
    """How the weather is."""
    return f"sunny in {city}"


def chat(**how: object) -> ChatOpenAI:
    """A model with an answer of 16 greedy tokens, if nothing else is said."""
    return ChatOpenAI(**{"model": MODEL, "temperature": 0, "max_tokens": 16, **CONNECTION, **how})


with check("chat"):
    answer = chat().invoke(MESSAGES)
    assert answer.content
    assert answer.response_metadata["finish_reason"] == "length"

with check("chat stream"):
    pieces = list(chat().stream(MESSAGES))
    assert "".join(piece.content for piece in pieces) == answer.content
    assert len(pieces) > 3

with check("usage"):
    assert answer.usage_metadata["output_tokens"] == 16
    pieces = list(chat(stream_usage=True).stream(MESSAGES))
    streamed = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert sum(usage["output_tokens"] for usage in streamed) == 16
    assert sum(usage["input_tokens"] for usage in streamed) == answer.usage_metadata["input_tokens"]

with check("n"):
    (texts,) = chat(n=3, temperature=1, seed=1).generate([MESSAGES]).generations
    assert len({choice.text for choice in texts}) == 3

with check("seed"):
    texts = [chat(temperature=1, seed=seed).invoke(MESSAGES).content for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]

with check("stop"):
    word = answer.content.split()[2]
    cut = chat(stop_sequences=[word]).invoke(MESSAGES)
    assert cut.content == answer.content[: answer.content.index(word)]
    assert chat().invoke(MESSAGES, stop=[word]).content == cut.content

with check("logprobs"):
    told = chat(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]
    assert "".join(entry["token"] for entry in told["content"]) == answer.content
    assert {len(entry["top_logprobs"]) for entry in told["content"]} == {2}

with check("tool call"):
    model = chat(max_tokens=400).bind_tools([weather], tool_choice="weather")
    called = model.invoke(MESSAGES)
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    assert weather.invoke(call["args"]).startswith("sunny in ")

with check("tool call stream"):
    whole = None
    for piece in model.stream(MESSAGES):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == call["args"]

with check("tool result"):
    result = ToolMessage("sunny", tool_call_id=call["id"])
    model = chat(model=TOOL_MODEL).bind_tools([weather])
    assert model.invoke([*MESSAGES, called, result]).content

with check("structured output"):
    for method in ("json_schema", "function_calling"):
        model = chat(max_tokens=400).with_structured_output(Animal, method=method)
        assert isinstance(model.invoke(MESSAGES), Animal), method
    streamed = chat(max_tokens=400).with_structured_output(Animal).stream(MESSAGES)
    assert isinstance([*streamed][-1], Animal)

with check("batch"):
    answers = chat().batch([MESSAGES] * 8)
    assert {each.content for each in answers} == {answer.content}

with check("completion"):
    model = OpenAI(model=MODEL, temperature=0, max_tokens=16, **CONNECTION)
    text = model.invoke(STORY)
    assert text
    assert "".join(model.stream(STORY)) == text
    assert model.batch([STORY, STORY]) == [text, text]

with check("typed errors"):
    with raises(ContextOverflowError, "maximum context length"):
        chat().invoke("A fox. " * 3000)
    with raises(openai.NotFoundError, MODEL):
        chat(model="nobody").invoke(MESSAGES)
    with raises(openai.UnprocessableEntityError, "temperature"):
        chat(temperature=9).invoke(MESSAGES)
    with raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke(MESSAGES)


def loop(name: str, streams: bool, **how: object) -> None:
    """Three calls and an answer."""
    where = {"base_url": LOOPS, "api_key": "none", "model": name, "max_tokens": 400}
    model = ChatOpenAI(**where, **how).bind_tools(LOOP_TOOLS)
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

RESPONSES = {"use_responses_api": True, "store": False}

with check("responses: chat and stream"):
    told = chat(**RESPONSES).invoke(MESSAGES)
    assert told.text == answer.content
    assert told.usage_metadata["output_tokens"] == 16
    pieces = list(chat(**RESPONSES).stream(MESSAGES))
    assert "".join(piece.text for piece in pieces) == answer.content

with check("responses: previous_response_id"):
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke(MESSAGES)
    then = model.invoke([*MESSAGES, first, HumanMessage("And then?")])
    whole = chat(**RESPONSES).invoke([*MESSAGES, first, HumanMessage("And then?")])
    assert then.text == whole.text

with check("responses: structured output"):
    model = chat(max_tokens=400, **RESPONSES).with_structured_output(Animal)
    assert isinstance(model.invoke(MESSAGES), Animal)

for streams in (False, True):
    with check(f"responses: {loops_name(streams)}"):
        for name in loop_models():
            loop(name, streams, **RESPONSES)


async def alongside() -> None:
    """The same for asyncio."""
    with check("async chat"):
        assert (await chat().ainvoke(MESSAGES)).content == answer.content

    with check("async stream"):
        pieces = [piece.content async for piece in chat().astream(MESSAGES)]
        assert "".join(pieces) == answer.content

    with check("cancel"):
        stream = chat(max_tokens=1500, extra_body={"ignore_eos": True}).astream(MESSAGES)
        await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(wait_until_cancelled)


asyncio.run(alongside())
report("langchain-openai")
