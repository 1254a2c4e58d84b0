"""Anthropic's own client, sync and async, as its users write it."""

from __future__ import annotations

import asyncio
import json

import anthropic
from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOP_TOOLS,
    LOOPS,
    MODEL,
    QUESTION,
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

SHORT = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
THINKING = "llama.cpp.Qwen-QwQ-32B"
"""Its template reads whether a request asks for thoughts."""
TOOLS = [{"name": "weather", "description": "How the weather is.", "input_schema": WEATHER}]
LOOPED = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in LOOP_TOOLS
]


def text_of(message: anthropic.types.Message) -> str:
    """What it says, without its thoughts."""
    return "".join(block.text for block in message.content if block.type == "text")


def sync(client: anthropic.Anthropic) -> None:
    """Each of these is a call of its own."""
    with check("models"):
        assert [model.id for model in client.models.list()] == [MODEL, TOOL_MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

    with check("messages"):
        done = client.messages.create(**SHORT)
        assert (done.role, done.stop_reason) == ("assistant", "max_tokens")
        assert text_of(done)
        assert done.usage.output_tokens == 16
        assert done._request_id
        blocks = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
        assert text_of(client.messages.create(**{**SHORT, "messages": blocks})) == text_of(done)

    with check("count tokens"):
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
        told = client.messages.create(**SHORT, system="Be brief.").usage
        assert counted.input_tokens == (
            told.input_tokens
            + (told.cache_read_input_tokens or 0)
            + (told.cache_creation_input_tokens or 0)
        )

    with check("create, stream"):
        events = list(client.messages.create(**SHORT, stream=True))
        pieces = [
            event.delta.text
            for event in events
            if event.type == "content_block_delta" and event.delta.type == "text_delta"
        ]
        assert "".join(pieces) == text_of(done)
        assert (events[0].type, events[-1].type) == ("message_start", "message_stop")

    with check("stream helper"):
        with client.messages.stream(**SHORT) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == text_of(final) == text_of(done)
        assert final.usage.output_tokens == 16
        assert final.stop_reason == "max_tokens"

    with check("stop"):
        word = text.split()[2]
        cut = client.messages.create(**SHORT, stop_sequences=[word])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
        assert text_of(cut) == text[: text.index(word)]

    with check("tool call and result"):
        how = {"model": TOOL_MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 400}
        forced = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        called = client.messages.create(**how, tool_choice=forced)
        assert called.stop_reason == "tool_use"
        (use,) = [block for block in called.content if block.type == "tool_use"]
        assert weather_is_valid(use.input)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        history = [
            *QUESTION,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        assert text_of(client.messages.create(**{**how, "messages": history, "max_tokens": 16}))

    with check("tool call, stream helper"):
        forced = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(**how, tool_choice=forced) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            (use,) = [b for b in stream.get_final_message().content if b.type == "tool_use"]
        assert pieces
        assert weather_is_valid(use.input)

    with check("structured output"):
        form = {"format": {"type": "json_schema", "schema": WEATHER}}
        made = client.messages.create(
            model=MODEL, messages=QUESTION, max_tokens=400, output_config=form
        )
        assert weather_is_valid(json.loads(text_of(made)))

    with check("typed errors"):
        with raises(anthropic.NotFoundError, MODEL):
            client.messages.create(**{**SHORT, "model": "nobody"})
        with raises(anthropic.BadRequestError, "prompt is too long"):
            client.messages.create(**{**SHORT, "messages": TOO_LONG})
        with raises(anthropic.BadRequestError, "max_tokens"):
            client.messages.create(**{**SHORT, "max_tokens": 0})
        with raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**SHORT)

    with check("cancel"):
        with client.messages.stream(
            model=MODEL, messages=QUESTION, max_tokens=1500, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream.text_stream))
        wait_until_cancelled()


async def alongside(client: anthropic.AsyncAnthropic) -> None:
    """The same client for asyncio."""
    with check("async messages, 8 at once"):
        told = await asyncio.gather(*[client.messages.create(**SHORT) for _ in range(8)])
        assert len({text_of(message) for message in told}) == 1

    with check("async stream helper"):
        async with client.messages.stream(**SHORT) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text == text_of(told[0])


def loop(client: anthropic.Anthropic, name: str, streams: bool) -> None:
    """Three calls and an answer; answers go back as the objects of the client."""
    messages: list[object] = [{"role": "user", "content": "Weather?"}]
    asked = []
    for _ in range(4):
        how = {"model": name, "messages": messages, "tools": LOOPED, "max_tokens": 400}
        if streams:
            with client.messages.stream(**how) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**how)
        messages.append({"role": "assistant", "content": message.content})
        results = []
        for block in message.content:
            if block.type == "tool_use":
                asked.append(block.input["city"])
                content = f"{asked[-1]} is sunny"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": content})
        if results:
            messages.append({"role": "user", "content": results})
    assert (asked, text_of(message)) == (CITIES, LOOP_ANSWER), (name, asked, text_of(message))


def runner(client: anthropic.Anthropic, name: str) -> None:
    """The client's own loop over tools."""
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """How the weather is.

        Args:
            city: Where.
        """
        asked.append(city)
        return f"{city} is sunny"

    question = [{"role": "user", "content": "Weather?"}]
    last = client.beta.messages.tool_runner(
        model=name, messages=question, tools=[weather], max_tokens=400
    ).until_done()
    assert (asked, text_of(last)) == (CITIES, LOOP_ANSWER), (name, asked, text_of(last))


def thinking(client: anthropic.Anthropic) -> None:
    """What a template that reads it does when it is on, and off."""
    question = [{"role": "user", "content": "Weather?"}]
    how = {"model": THINKING, "messages": question, "max_tokens": 2000}
    with client.messages.stream(**how, thinking={"type": "enabled", "budget_tokens": 1024}) as told:
        pieces = "".join(event.thinking for event in told if event.type == "thinking")
        thought, *rest = told.get_final_message().content
    assert (thought.type, thought.thinking, pieces) == ("thinking", "It asks.", "It asks.")
    silent = client.messages.create(**how, thinking={"type": "disabled"}).content
    assert "thinking" not in {block.type for block in [*rest, *silent]}
    assert rest
    assert silent


def loops(client: anthropic.Anthropic) -> None:
    """With each template."""
    with check("thinking"):
        thinking(client)
    for streams in (False, True):
        with check(loops_name(streams)):
            for name in loop_models():
                loop(client, name, streams)
    with check("tool runner, " + loops_name()):
        for name in loop_models():
            runner(client, name)


async def main() -> None:
    root = URL.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=KEY) as client:
        sync(client)
    with anthropic.Anthropic(base_url=LOOPS.removesuffix("/v1"), api_key="none") as client:
        loops(client)
    async with anthropic.AsyncAnthropic(base_url=root, api_key=KEY) as client:
        await alongside(client)
    report("anthropic")


asyncio.run(main())
