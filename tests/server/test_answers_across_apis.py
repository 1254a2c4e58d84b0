"""What a model says in any order, in any format, over three APIs

Streams are whole answers, and each answer is the same prompt through whichever API it comes back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from infer.server.anthropic.messages_body import MessagesBody
from infer.server.openai.chat import ChatBody, plain_messages
from infer.server.openai.responses import ResponseBody
from infer.server.openai.schema_base import read
from infer.text.tools.call import BREAK, ToolCall
from infer.text.tools.formats import FORMATS, HARMONY, HARMONY_THOUGHTS, ToolFormat
from tests.server.test_agents_apis import (
    ASK,
    CHAT_TOOLS,
    MESSAGES,
    QWEN,
    READ,
    RESPONSES,
    TOOLS,
    body_for,
    events_of,
    without_ids,
)
from tests.server.test_tool_loops import saying, script_of, tokenizer_of
from tests.support.doubles import core_of
from tests.support.serving import CHAT, App, with_app

QUESTION = {"role": "user", "content": ASK}
HEX = "0123456789abcdef" * 2
Entry = tuple[str, Any]
"""A part of an answer: "thought", "text" or "call", and what it says."""


def answers_of(way: ToolFormat) -> list[str]:
    """Answers whose parts stand in every order that a model has been seen to write."""
    one, two = (way.write([ToolCall("weather", json.dumps({"city": c}))]) for c in ("Ulm", "Bonn"))
    if way is HARMONY:
        said = "<|start|>assistant<|channel|>commentary<|message|>{}<|end|>"
        thought = "<|start|>assistant<|channel|>analysis<|message|>{}<|end|>"
        call = "<|start|>assistant{}"
        first = said.format("I look.").removeprefix("<|start|>assistant")
        return [
            first + call.format(one) + said.format("And again.") + call.format(two),
            first + thought.format("Hm.") + thought.format("So.") + call.format(one),
            first + said.format("Yes.") + call.format(one) + thought.format("Why?") + said,
        ]
    # Without a mark, an answer that begins with text has no calls.
    heads = ["", "<think>\nHm.\n</think>\n\n"] + ([] if way.is_bare else ["I look.\n"])
    answers = [f"{head}{one}\nThat was one." for head in heads]
    if not way.is_bare and not way.prompt_opens:
        answers.append(f"Look.\n{one}\nAnd again.\n{two}\nDone.")
        answers.append(f"<think>\nHm.\n{one}\nWhat else?\n</think>\n\nDone.")
    return answers


def entries_of(path: str, answer: dict[str, Any]) -> list[Entry]:
    """The parts of an answer, in order."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls", ())]
        found: list[Entry] = [("thought", message.get("reasoning_content"))]
        found += [("text", message["content"])]
        found += [("call", (each["name"], each["arguments"])) for each in calls]
        return [(kind, said) for kind, said in found if said] or [("text", "")]
    if path == MESSAGES:
        kinds = {"thinking": "thought", "text": "text"}
        return [
            ("call", (each["name"], json.dumps(each["input"])))
            if each["type"] == "tool_use"
            else (kinds[each["type"]], each[each["type"]])
            for each in answer["content"]
        ] or [("text", "")]
    kinds = {"reasoning": "thought", "message": "text"}
    return [
        ("call", (each["name"], each["arguments"]))
        if each["type"] == "function_call"
        else (kinds[each["type"]], each["content"][0]["text"])
        for each in answer["output"]
    ]


def as_chat(entries: list[Entry]) -> list[dict[str, Any]]:
    texts = {kind: [said for each, said in entries if each == kind] for kind in ("thought", "text")}
    message: dict[str, Any] = {"role": "assistant", "content": BREAK.join(texts["text"])}
    if texts["thought"]:
        message["reasoning_content"] = BREAK.join(texts["thought"])
    calls = [said for kind, said in entries if kind == "call"]
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(calls)
        ]
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": "sun"} for i in range(len(calls))
    ]
    return [QUESTION, message, *results, QUESTION]


def as_items(entries: list[Entry]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    calls: list[str] = []
    for i, (kind, said) in enumerate(entries):
        name = f"x_{HEX}_{i}"
        if kind == "call":
            calls.append(f"c{len(calls)}")
            call = {"type": "function_call", "call_id": calls[-1], "name": said[0]}
            items.append({**call, "arguments": said[1], "id": name})
        elif kind == "text":
            items.append({"type": "message", "role": "assistant", "content": said, "id": name})
        else:
            content = [{"type": "reasoning_text", "text": said}]
            items.append({"type": "reasoning", "id": name, "summary": [], "content": content})
    output = {"type": "function_call_output", "output": "sun"}
    results = [{**output, "call_id": name} for name in calls]
    return [QUESTION, *items, *results, QUESTION]


def as_messages(entries: list[Entry]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    used: list[str] = []
    for kind, said in entries:
        if kind == "call":
            used.append(f"c{len(used)}")
            call = {"type": "tool_use", "id": used[-1], "name": said[0]}
            blocks.append({**call, "input": json.loads(said[1])})
        elif kind == "text":
            blocks.append({"type": "text", "text": said})
        else:
            blocks.append({"type": "thinking", "thinking": said, "signature": "x"})
    results = [{"type": "tool_result", "tool_use_id": name, "content": "sun"} for name in used]
    if not results:
        return [QUESTION, {"role": "assistant", "content": blocks}, QUESTION]
    user = {"role": "user", "content": [*results, {"type": "text", "text": ASK}]}
    return [QUESTION, {"role": "assistant", "content": blocks}, user]


BACK: dict[str, Callable[[list[Entry]], list[dict[str, Any]]]] = {
    CHAT: lambda entries: plain_messages(
        read(ChatBody, {"messages": as_chat(entries), "tools": CHAT_TOOLS}, [])
    ),
    RESPONSES: lambda entries: plain_messages(
        read(ResponseBody, {"input": as_items(entries), "tools": TOOLS[RESPONSES]}, []).chat
    ),
    MESSAGES: lambda entries: plain_messages(
        read(MessagesBody, {"messages": as_messages(entries), "tools": TOOLS[MESSAGES]}, []).chat
    ),
}


def without_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without what is no part of a prompt: ids, and whether an answer has no text."""
    made = []
    for message in messages:
        message = {name: value for name, value in message.items() if value not in ("", None)}
        message.pop("tool_call_id", None)
        calls = [call["function"] for call in message.pop("tool_calls", ())]
        made.append({**message, "calls": calls})
    return made


def is_whole(entries: list[Entry]) -> bool:
    """Whether the arguments of all calls are JSON, which Anthropic's form needs."""
    try:
        return all(json.loads(said[1]) is not None for kind, said in entries if kind == "call")
    except ValueError:
        return False


def limit_of(path: str, size: int) -> dict[str, int]:
    """An answer's longest, as each API calls it."""
    return {"max_tokens" if path == MESSAGES else "max_output_tokens": size}


@pytest.mark.parametrize(
    ("cuts", "every", "least"),
    [((), 3, 2), pytest.param(range(9, 9999, 47), 1, 12, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_streams_are_whole_answers_and_each_is_taken_back_by_each(
    way: ToolFormat, cuts: Iterable[int], every: int, least: int
) -> None:
    tokenizer = tokenizer_of(QWEN)
    assert tokenizer.tool_use is not None
    tokenizer.tool_use = dataclasses.replace(tokenizer.tool_use, format=way)
    if way is HARMONY:
        tokenizer.thoughts = HARMONY_THOUGHTS
    engine = saying([], tokenizer)
    runner: Any = core_of(engine).runner

    async def use(app: App) -> None:
        num_orders = 0
        texts = answers_of(way)
        step = 1 if way is HARMONY else min(every, len(texts))  # Harmony's are its own
        for text in texts[FORMATS.index(way) % step :: step]:
            runner.script = script_of(tokenizer, text)
            whole_size = len(text.encode())
            for size in (whole_size + 1, *(cut for cut in cuts if cut < whole_size)):
                posts = [
                    (path, body_for(path, stream=stream, **limit_of(path, size)))
                    for path in READ
                    for stream in (False, True)
                ]
                chat = {"messages": [QUESTION], "tools": CHAT_TOOLS, "max_tokens": size}
                answers = await asyncio.gather(
                    *(app.post(path, body) for path, body in [*posts, (CHAT, chat)])
                )
                found = []
                for i, path in enumerate(READ):
                    whole = answers[2 * i].json()
                    streamed = READ[path](events_of(answers[2 * i + 1]))
                    assert without_ids(streamed) == without_ids(whole), (text, size)
                    found.append(entries_of(path, whole))
                found.append(entries_of(CHAT, answers[-1].json()))
                whole_ones = [entries for entries in found if is_whole(entries)]
                num_orders += len(whole_ones)
                backs = [without_names(BACK[api](each)) for each in whole_ones for api in BACK]
                for back in backs:
                    assert back == backs[0], (text, size)
        assert num_orders > least

    with_app(engine, use)
