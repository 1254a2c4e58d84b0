"""Histories in which calls and results do not belong together: clients cut them, lose messages, and
make ids anew."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

USER: Message = {"role": "user", "content": "bad-user-1"}
MORE: Message = {"role": "user", "content": "bad-user-2"}


def result(number: int, call_id: str | None = None) -> Message:
    found: Message = {"role": "tool", "content": f"bad-result-{number}"}
    return found if call_id is None else {**found, "tool_call_id": call_id}


def calls(*ids: str) -> Message:
    """A message of calls, in which no text is."""
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    made = [{"id": name, "type": "function", "function": function} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


BAD_HISTORIES: dict[str, list[Message]] = {
    "no call, at the end": [USER, result(1, "x")],
    "no call, at the beginning": [result(1, "x"), USER],
    "no call, without an id": [USER, result(1)],
    "no call, two of them": [USER, result(1, "x"), result(2, "y"), MORE],
    "behind an answer": [USER, {"role": "assistant", "content": "bad-said"}, result(1, "x"), MORE],
    "no result": [USER, calls("c1"), MORE],
    "no result, twice": [USER, calls("c1"), MORE, calls("c2"), USER | {"content": "bad-user-3"}],
    "one of two results": [USER, calls("c1", "c2"), result(1, "c2"), MORE],
    "another id": [USER, calls("c1"), result(1, "zz"), MORE],
    "other ids": [USER, calls("c1", "c2"), result(1, "y"), result(2, "z"), MORE],
    "one other id": [USER, calls("c1", "c2"), result(1, "z"), result(2, "c1"), MORE],
    "no ids": [USER, calls("c1", "c2"), result(1), result(2), MORE],
    "twice": [USER, calls("c1"), result(1, "c1"), result(2, "c1"), MORE],
    "one too many": [USER, calls("c1"), result(1, "c1"), result(2, "z"), MORE],
    "late": [USER, calls("c1"), MORE, result(1, "c1")],
    "results in another order": [USER, calls("c1", "c2"), result(1, "c2"), result(2, "c1"), MORE],
}


def problem(prompt: str, history: list[Message]) -> str | None:
    """What is lost of a history, or said twice."""
    for message in history:
        word = message["content"]
        if word is not None and prompt.count(word) != 1:
            return f"{word} is {prompt.count(word)} times in the prompt"
    num_calls = sum(len(message.get("tool_calls", ())) for message in history)
    if prompt.count("Ulm") < num_calls:
        return "a call is lost"
    return None
