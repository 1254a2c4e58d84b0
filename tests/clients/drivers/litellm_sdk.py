"""LiteLLM: the `openai/` provider with an `api_base`, `hosted_vllm/`, which is its own code,
`anthropic/`, and responses."""

from __future__ import annotations

import asyncio
import gc
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm
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
from pydantic import BaseModel, Field

# It counts a stream's tokens with tokenizers from the network where a model's name has Llama in it.
litellm.disable_hf_tokenizer_download = True
litellm.suppress_debug_info = True  # a price list that does not know the models
CONNECTION = {"api_base": URL, "api_key": KEY}
GREEDY = {"messages": QUESTION, "temperature": 0, "max_tokens": 16, **CONNECTION}
DRAWN = {"messages": QUESTION, "max_tokens": 16, **CONNECTION}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    name: str = Field(pattern="^(Rex|Tom)$")
    age: int = Field(ge=1, le=9)


for provider in ("openai", "hosted_vllm"):
    model, tool_model = f"{provider}/{MODEL}", f"{provider}/{TOOL_MODEL}"

    with check(f"{provider}/ chat"):
        answer = litellm.completion(model, **GREEDY)
        text = answer.choices[0].message.content
        assert text
        assert answer.choices[0].finish_reason == "length"

    with check(f"{provider}/ chat stream"):
        chunks = list(litellm.completion(model, stream=True, **GREEDY))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text

    with check(f"{provider}/ usage"):
        assert answer.usage.completion_tokens == 16
        *_, last = litellm.completion(
            model, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        assert last.usage.completion_tokens == 16
        assert last.usage.prompt_tokens == answer.usage.prompt_tokens

    with check(f"{provider}/ n"):
        several = litellm.completion(model, n=3, seed=1, **DRAWN)
        assert len({choice.message.content for choice in several.choices}) == 3

    with check(f"{provider}/ seed"):
        texts = [
            litellm.completion(model, seed=seed, **DRAWN).choices[0].message.content
            for seed in (5, 5, 6)
        ]
        assert texts[0] == texts[1] != texts[2]

    with check(f"{provider}/ stop"):
        word = text.split()[2]
        cut = litellm.completion(model, stop=[word], **GREEDY)
        assert cut.choices[0].message.content == text[: text.index(word)]
        assert cut.choices[0].finish_reason == "stop"

    with check(f"{provider}/ logprobs"):
        told = litellm.completion(model, logprobs=True, top_logprobs=2, **GREEDY)
        assert "".join(entry.token for entry in told.choices[0].logprobs.content) == text

    with check(f"{provider}/ tool call"):
        how = {**DRAWN, "max_tokens": 400, "tools": TOOLS, "parallel_tool_calls": False}
        forced = {"type": "function", "function": {"name": "weather"}}
        called = litellm.completion(model, tool_choice=forced, **how).choices[0]
        (call,) = called.message.tool_calls
        assert weather_is_valid(json.loads(call.function.arguments))

    with check(f"{provider}/ tool call stream"):
        chunks = list(litellm.completion(tool_model, tool_choice="required", stream=True, **how))
        built = litellm.stream_chunk_builder(chunks).choices[0]
        assert weather_is_valid(json.loads(built.message.tool_calls[0].function.arguments))

    with check(f"{provider}/ tool result"):
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        told = {**GREEDY, "messages": [*QUESTION, called.message, result], "tools": TOOLS}
        assert litellm.completion(tool_model, **told).choices[0].message.content

    with check(f"{provider}/ structured output"):
        how = {**DRAWN, "max_tokens": 400}
        parsed = litellm.completion(model, response_format=Animal, **how)
        Animal.model_validate_json(parsed.choices[0].message.content)

    with check(f"{provider}/ completion"):
        how = {"prompt": STORY, "max_tokens": 8, "temperature": 0, **CONNECTION}
        provided = "text-completion-openai" if provider == "openai" else provider
        done = litellm.text_completion(model=f"{provided}/{MODEL}", **how)
        chunks = litellm.text_completion(model=f"{provided}/{MODEL}", stream=True, **how)
        assert done.choices[0].text
        assert "".join(chunk.choices[0].text or "" for chunk in chunks) == done.choices[0].text

    with check(f"{provider}/ typed errors"):
        with raises(litellm.AuthenticationError):
            litellm.completion(model, **{**DRAWN, "api_key": "wrong"})
        with raises(litellm.ContextWindowExceededError):
            litellm.completion(model, **{**DRAWN, "messages": TOO_LONG})
        with raises(litellm.NotFoundError, MODEL):
            litellm.completion(f"{provider}/nobody", **DRAWN)
        with raises(litellm.BadRequestError, "temperature"):
            litellm.completion(model, temperature=9, **DRAWN)


ROOT = {"api_base": URL.removesuffix("/v1"), "api_key": KEY}

with check("anthropic/ chat and stream"):
    how = {"messages": QUESTION, "temperature": 0, "max_tokens": 16, **ROOT}
    answer = litellm.completion(f"anthropic/{MODEL}", **how)
    assert answer.usage.completion_tokens == 16
    chunks = list(litellm.completion(f"anthropic/{MODEL}", stream=True, **how))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content != ""

with check("responses: create and stream"):
    how = {"input": QUESTION, "temperature": 0, "max_output_tokens": 16, **CONNECTION}
    told = litellm.responses(model=f"openai/{MODEL}", **how)
    assert told.usage.output_tokens == 16
    events = list(litellm.responses(model=f"openai/{MODEL}", stream=True, **how))
    pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(pieces) == told.output[0].content[0].text != ""

with check("responses: previous_response_id"):
    then = {**how, "input": "And then?", "previous_response_id": told.id}
    assert litellm.responses(model=f"openai/{MODEL}", **then).usage.input_tokens > (
        told.usage.input_tokens + 16
    )


def loop(name: str, provider: str, streams: bool) -> None:
    """Three calls and an answer; messages go back as they came."""
    messages: list[object] = [{"role": "user", "content": "Weather?"}]
    asked = []
    url = LOOPS.removesuffix("/v1") if provider == "anthropic" else LOOPS
    where = {"api_base": url, "api_key": "none", "max_tokens": 400, "tools": LOOP_TOOLS}
    for _ in range(4):
        done = litellm.completion(f"{provider}/{name}", messages, stream=streams, **where)
        if streams:
            done = litellm.stream_chunk_builder(list(done), messages=messages)
            # hosted_vllm/ drops its responses unread; httpcore locks itself out when one of them
            # happens to be collected while it opens the next.
            gc.collect()
        message = done.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            asked.append(json.loads(call.function.arguments)["city"])
            content = f"{asked[-1]} is sunny"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert (asked, message.content) == (CITIES, LOOP_ANSWER), (name, asked, message.content)


gc.freeze()  # so that collecting does not look at all of litellm each time
ways = (("openai", False), ("hosted_vllm", True), ("anthropic", False), ("anthropic", True))
for provider, streams in ways:
    with check(f"{provider}/ {loops_name(streams)}"):
        for name in loop_models():
            loop(name, provider, streams)


async def alongside() -> None:
    """The same for asyncio."""
    with check("async chat, 8 at once"):
        model = f"openai/{MODEL}"
        answers = await asyncio.gather(*[litellm.acompletion(model, **GREEDY) for _ in range(8)])
        assert len({answer.choices[0].message.content for answer in answers}) == 1

    with check("async stream"):
        chunks = [c async for c in await litellm.acompletion(model, stream=True, **GREEDY)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answers[0].choices[0].message.content

    with check("cancel"):
        how = {**DRAWN, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        stream = await litellm.acompletion(model, stream=True, **how)
        await anext(aiter(stream))
        await stream.aclose()
        await asyncio.to_thread(wait_until_cancelled)


asyncio.run(alongside())
report("litellm")
