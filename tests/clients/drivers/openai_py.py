"""OpenAI's own client, sync and async, as its users write it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Literal

import openai
from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOP_TOOLS,
    LOOPS,
    MODEL,
    QUESTION,
    STORY,
    TOO_LONG,
    TOOL_MODEL,
    URL,
    WEATHER,
    check,
    loop_models,
    loops_name,
    raises,
    report,
    wait_until_cancelled,
    weather_is_valid,
)
from openai_responses import response_loops, responses
from pydantic import BaseModel, Field

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
FORCED = {"type": "function", "function": {"name": "weather"}}


class Animal(BaseModel, extra="forbid"):
    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


def sync(client: openai.OpenAI) -> None:
    """Each of these is a call of its own."""
    with check("models"):
        assert [model.id for model in client.models.list()] == [MODEL, TOOL_MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

    with check("completion"):
        done = client.completions.create(model=MODEL, prompt=STORY, max_tokens=12, temperature=0)
        trace = done.choices[0].text
        assert trace.strip()
        assert done.choices[0].finish_reason == "length"
        assert done._request_id

    with check("completion stream"):
        pieces = client.completions.create(
            model=MODEL, prompt=STORY, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == trace

    with check("prompts and n"):
        done = client.completions.create(
            model=MODEL, prompt=[STORY, "One day"], n=2, max_tokens=4, seed=1
        )
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]

    with check("chat"):
        chat = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=20, temperature=0
        )
        answer = chat.choices[0].message
        assert (answer.role, chat.choices[0].finish_reason) == ("assistant", "length")
        assert answer.content

    with check("chat stream"):
        chunks = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=20, temperature=0, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.content

    with check("usage"):
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 20
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 20
        *_, last = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 20
        assert last.usage.prompt_tokens == chat.usage.prompt_tokens

    with check("n"):
        chat = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, max_tokens=12, seed=7
        )
        assert len({choice.message.content for choice in chat.choices}) == 3

    with check("seed"):
        texts = [
            client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, seed=seed)
            .choices[0]
            .message.content
            for seed in (5, 5, 6)
        ]
        assert texts[0] == texts[1] != texts[2]

    with check("stop"):
        word = trace.split()[2]
        done = client.completions.create(
            model=MODEL, prompt=STORY, max_tokens=12, temperature=0, stop=[word]
        )
        assert done.choices[0].text == trace[: trace.index(word)]
        assert done.choices[0].finish_reason == "stop"

    with check("logprobs"):
        chat = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        entries = chat.choices[0].logprobs.content
        assert len(entries) == 6
        assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)
        assert "".join(e.token for e in entries) == chat.choices[0].message.content
        done = client.completions.create(
            model=MODEL, prompt=STORY, max_tokens=1, logprobs=2, echo=True, temperature=0
        )
        logprobs = done.choices[0].logprobs
        assert logprobs.token_logprobs[0] is None
        assert all(-math.inf < number <= 0 for number in logprobs.token_logprobs[1:])
        assert "".join(logprobs.tokens[1:-1]) == STORY  # the first is the begin of text

    with check("extension fields"):
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=4,
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        )

    with check("tool call"):
        chat = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=FORCED, max_tokens=400
        )
        (call,) = chat.choices[0].message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert weather_is_valid(json.loads(call.function.arguments))
        assert chat.choices[0].finish_reason in ("tool_calls", "stop")

    with check("tool result"):
        answered = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        chat = client.chat.completions.create(
            model=TOOL_MODEL,
            messages=[*QUESTION, chat.choices[0].message, answered],
            tools=TOOLS,
            max_tokens=8,
        )
        assert chat.choices[0].message.content

    with check("tool call stream"):
        with client.chat.completions.stream(
            model=TOOL_MODEL,
            messages=QUESTION,
            tools=[openai.pydantic_function_tool(Animal, name="animal")],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=400,
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Animal)

    with check("structured output"):
        parsed = client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Animal, max_tokens=400
        )
        assert isinstance(parsed.choices[0].message.parsed, Animal)
        chat = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=400,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
            },
        )
        assert weather_is_valid(json.loads(chat.choices[0].message.content))

    with check("typed errors"):
        with raises(openai.NotFoundError, MODEL):
            client.chat.completions.create(model="nobody", messages=QUESTION)
        with raises(openai.BadRequestError, "maximum context length"):
            client.chat.completions.create(model=MODEL, messages=TOO_LONG)
        with raises(openai.NotFoundError):
            client.models.retrieve("nobody")
        with raises(openai.UnprocessableEntityError, "temperature"):
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
        with raises(openai.BadRequestError, "max_tokens"):
            client.completions.create(model=MODEL, prompt=STORY, max_tokens="many")
        with raises(openai.NotFoundError, "embeddings"):
            client.embeddings.create(model=MODEL, input="x")
        with raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()

    with check("cancel"):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
        wait_until_cancelled()


async def alongside(client: openai.AsyncOpenAI) -> None:
    """The same client for asyncio."""
    with check("async models"):
        assert [model.id async for model in client.models.list()] == [MODEL, TOOL_MODEL]

    with check("async chat, 16 at once"):
        asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        alone = (await client.chat.completions.create(**asked)).choices[0].message.content
        chats = await asyncio.gather(*[client.chat.completions.create(**asked) for _ in range(16)])
        assert {chat.choices[0].message.content for chat in chats} == {alone}

    with check("async stream"):
        chunks = await client.chat.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert text == alone

    with check("async structured output"):
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Animal, max_tokens=400
        )
        assert isinstance(parsed.choices[0].message.parsed, Animal)

    with check("async typed errors"), raises(openai.NotFoundError, MODEL):
        await client.completions.create(model="nobody", prompt=STORY)

    with check("async cancel"):
        stream = await client.completions.create(
            model=MODEL,
            prompt=STORY,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await stream.close()
        wait_until_cancelled()
        task = asyncio.create_task(
            client.completions.create(
                model=MODEL, prompt=STORY, max_tokens=1500, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        wait_until_cancelled()


def loops(client: openai.OpenAI) -> None:
    """Answers go back as they came: as the objects of the client."""
    for streams in (False, True):
        with check(loops_name(streams)):
            for name in loop_models():
                loop(client, name, streams)


def loop(client: openai.OpenAI, name: str, streams: bool) -> None:
    messages: list[object] = [{"role": "user", "content": "Weather?"}]
    asked = []
    for _ in range(4):
        how = {"model": name, "messages": messages, "tools": LOOP_TOOLS, "max_tokens": 400}
        if streams:
            with client.chat.completions.stream(**how) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**how).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            asked.append(json.loads(call.function.arguments)["city"])
            content = f"{asked[-1]} is sunny"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert (asked, message.content) == (CITIES, LOOP_ANSWER), (name, asked, message.content)


async def main() -> None:
    with openai.OpenAI(base_url=URL, api_key=KEY) as client:
        sync(client)
        responses(client, Animal)
    with openai.OpenAI(base_url=LOOPS, api_key="none") as client:
        loops(client)
        response_loops(client)
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        await alongside(client)
    report("openai")


asyncio.run(main())
