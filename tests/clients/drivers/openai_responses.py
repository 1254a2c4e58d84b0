"""OpenAI's own client over `/v1/responses`: what `openai_py.py` does with chats, done there."""

from __future__ import annotations

import json

import openai
from checks import (
    CITIES,
    LOOP_ANSWER,
    LOOP_TOOLS,
    MODEL,
    QUESTION,
    TOO_LONG,
    TOOL_MODEL,
    WEATHER,
    check,
    loop_models,
    loops_name,
    raises,
    wait_until_cancelled,
    weather_is_valid,
)
from pydantic import BaseModel

TOOLS = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
LOOPED = [{"type": "function", **tool["function"]} for tool in LOOP_TOOLS]
SHORT = {"model": MODEL, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}


def responses(client: openai.OpenAI, animal: type[BaseModel]) -> None:
    """Each of these is a call of its own; `animal` is what structured outputs are."""
    with check("responses: create"):
        done = client.responses.create(**SHORT)
        assert done.output_text
        assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert done.usage.output_tokens == 16
        assert done.usage.total_tokens == done.usage.input_tokens + 16
        text = client.responses.create(**{**SHORT, "input": QUESTION[0]["content"]}).output_text
        assert text == done.output_text

    with check("responses: input tokens"):
        counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
        assert counted.input_tokens == done.usage.input_tokens

    with check("responses: create, stream"):
        events = list(client.responses.create(**SHORT, stream=True))
        pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(pieces) == done.output_text == events[-1].response.output_text
        assert [e.sequence_number for e in events] == sorted(e.sequence_number for e in events)

    with check("responses: stream helper"):
        with client.responses.stream(**SHORT) as stream:
            kinds = [event.type for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
        assert "response.output_item.done" in kinds

    with check("responses: stored"):
        kept = client.responses.retrieve(done.id)
        assert kept.output_text == done.output_text
        (item,) = client.responses.input_items.list(done.id).data
        assert item.content[0].text == QUESTION[0]["content"]
        told = [*QUESTION, *done.output, {"role": "user", "content": "And then?"}]
        whole = client.responses.create(**{**SHORT, "input": told, "store": False})
        follows = client.responses.create(
            **{**SHORT, "input": "And then?"}, previous_response_id=done.id
        )
        assert follows.output_text == whole.output_text
        assert follows.usage.input_tokens == whole.usage.input_tokens
        with raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        client.responses.delete(follows.id)
        with raises(openai.NotFoundError):
            client.responses.retrieve(follows.id)

    with check("responses: structured output"):
        how = {"model": MODEL, "input": QUESTION, "max_output_tokens": 400}
        parsed = client.responses.parse(**how, text_format=animal)
        assert isinstance(parsed.output_parsed, animal)
        with client.responses.stream(**how, text_format=animal) as stream:
            assert isinstance(stream.get_final_response().output_parsed, animal)

    with check("responses: tool call and result"):
        how |= {"model": TOOL_MODEL, "tools": TOOLS, "parallel_tool_calls": False}
        forced = {"type": "function", "name": "weather"}
        called = client.responses.create(**how, tool_choice=forced)
        (call,) = [item for item in called.output if item.type == "function_call"]
        assert weather_is_valid(json.loads(call.arguments))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        told = {"model": TOOL_MODEL, "tools": TOOLS, "max_output_tokens": 16}
        for more in (
            {"input": [result], "previous_response_id": called.id},
            {"input": [*QUESTION, *called.output, result]},
        ):
            assert client.responses.create(**told, **more).output_text

    with check("responses: tool call, stream helper"):
        with client.responses.stream(**how, tool_choice="required") as stream:
            pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        assert "".join(pieces) == final.output[-1].arguments
        assert weather_is_valid(final.output[-1].parsed_arguments or json.loads("".join(pieces)))

    with check("responses: typed errors"):
        with raises(openai.NotFoundError, MODEL):
            client.responses.create(**{**SHORT, "model": "nobody"})
        with raises(openai.BadRequestError, "maximum context length"):
            client.responses.create(**{**SHORT, "input": TOO_LONG})
        with raises(openai.APIStatusError, "temperature"):
            client.responses.create(**{**SHORT, "temperature": 9})
        with raises(openai.BadRequestError, "background"):
            client.responses.create(**SHORT, background=True)
        with raises(openai.NotFoundError):
            client.responses.create(**SHORT, previous_response_id="resp_nobody")

    with check("responses: cancel"):
        stream = client.responses.create(
            **{**SHORT, "max_output_tokens": 1500},
            stream=True,
            store=False,
            extra_body={"ignore_eos": True},
        )
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
        wait_until_cancelled()


def response_loops(client: openai.OpenAI) -> None:
    """The whole history each time; and what is new, to what the server has stored."""
    for how in ("history", "history, streams", "previous_response_id"):
        with check(f"responses: {loops_name()}, {how}"):
            for name in loop_models():
                _loop(client, name, how)


def _loop(client: openai.OpenAI, name: str, how: str) -> None:
    history: list[object] = [{"role": "user", "content": "Weather?"}]
    new, asked, previous = list(history), list[str](), None
    for _ in range(4):
        told = {"model": name, "tools": LOOPED, "max_output_tokens": 400}
        if how == "previous_response_id":
            answer = client.responses.create(**told, input=new, previous_response_id=previous)
            previous = answer.id
        elif how == "history":
            answer = client.responses.create(**told, input=history, store=False)
        else:
            with client.responses.stream(**told, input=history, store=False) as stream:
                answer = stream.get_final_response()
        new = []
        for item in answer.output:
            if item.type == "function_call":
                asked.append(json.loads(item.arguments)["city"])
                output = f"{asked[-1]} is sunny"
                result = {"type": "function_call_output", "call_id": item.call_id, "output": output}
                new.append(result)
        history += [*answer.output, *new]
    assert (asked, answer.output_text) == (CITIES, LOOP_ANSWER), (name, asked, answer.output_text)
