"""Orders of roles in chats, as letters: S(ystem), U(ser), A(ssistant), C(all with its result)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tests.support.tool_conversations import made_call

AGENTS = {
    "a question": "SU",
    "Codex, first turn": "SSUU",
    "Codex, later": "SSUUCCAU",
    "Claude Code, first turn": "SUS",
    "Claude Code, later": "SUSC",
    "Claude Code, with a reminder behind a result": "SUSCSAU",
    "two questions in a row": "SUU",
    "a question behind a result": "SUCU",
}
"""What agents send, by who sends it."""


def all_orders(longest: int) -> Iterator[str]:
    """All orders up to a length."""
    for size in range(1, longest + 1):
        yield from map("".join, itertools.product("SUAC", repeat=size))


def chat_of(order: str, *, thinks: bool = False) -> list[dict[str, Any]]:
    """The messages of an order. `thinks`: calls have reasoning."""
    chat = list[dict[str, Any]]()
    for i, letter in enumerate(order):
        if letter != "C":
            role = {"S": "system", "U": "user", "A": "assistant"}[letter]
            chat.append({"role": role, "content": f"{i}-{letter}"})
            continue
        call = made_call(i, f"{i}-C")
        thought = {"reasoning_content": f"why-{i}"} if thinks else {}
        chat += [
            {"role": "assistant", "content": None, "tool_calls": [call], **thought},
            {"role": "tool", "tool_call_id": call["id"], "content": f"{i}-R"},
        ]
    return chat


def words_of(order: str) -> list[str]:
    """The words that the prompt of an order must have, each once and in this order."""
    pairs = enumerate(order)
    return [w for i, x in pairs for w in ([f"{i}-C", f"{i}-R"] if x == "C" else [f"{i}-{x}"])]
