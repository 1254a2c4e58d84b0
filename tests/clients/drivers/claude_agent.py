"""Anthropic's Agent SDK, as its users write it: Claude Code's tools, and one of the user's own.

A driver of `agents.py`: `python claude_agent.py --model NAME QUESTION` in the folder to work in.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ResultMessage,
    StreamEvent,
    create_sdk_mcp_server,
    query,
    tool,
)

sums: list[int] = []


@tool("add", "Adds two numbers.", {"a": int, "b": int})
async def add(numbers: dict[str, Any]) -> dict[str, Any]:
    """A tool that runs in this process."""
    sums.append(numbers["a"] + numbers["b"])
    return {"content": [{"type": "text", "text": f"The sum is {sums[-1]}"}]}


async def main(model: str, question: str) -> None:
    """Print the answer. Its pieces must make it, and the tool must have been called once."""
    options = ClaudeAgentOptions(
        model=model,
        permission_mode="bypassPermissions",
        mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
        include_partial_messages=True,
    )
    pieces: list[str] = []
    async for message in query(prompt=question, options=options):
        if isinstance(message, StreamEvent):
            if message.event["type"] == "message_start":
                pieces.clear()
            pieces.append(message.event.get("delta", {}).get("text", ""))
        elif isinstance(message, ResultMessage):
            assert not message.is_error, message
            assert "".join(pieces).strip() == message.result.strip(), (pieces, message)
            assert sums == [43] or "now it is 43" not in message.result, sums
            print(message.result)


asyncio.run(main(*sys.argv[2:]))
