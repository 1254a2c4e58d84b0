"""Joining system messages at the beginning of a chat, for templates that take only one

Agents send their rules as several system messages. Published templates refuse the second one
(Qwen 3.5, Mistral, Gemma 3) or leave one out without a word (gpt-oss, SmolLM3, DeepSeek R1); see
`Abilities.takes_several_systems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
"""Message of a chat, as in OpenAI's API."""
_BLANK_LINE = "\n\n"


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which the system messages at the beginning are one: their contents, with a
    blank line between them.

    Parts become text, since templates that take one message may read only its first part. Messages
    are not changed in place.
    """
    leading = list(takewhile(lambda one: one.get("role") == "system", messages))
    if not leading:
        return list(messages)
    contents = [content for one in leading if (content := _plain_text(one.get("content")))]
    first = {name: value for one in reversed(leading) for name, value in one.items()}
    return [{**first, "content": _joined(contents)}, *messages[len(leading) :]]


def _plain_text(content: Any) -> Any:
    """A list of parts as text, if it has text only. Templates cut the white space off a part, so a
    blank line between parts would be lost."""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _joined(contents: Sequence[Any]) -> Any:
    """One content of several: text if all are text, or else a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return _BLANK_LINE.join(contents)
    parts: list[Any] = []
    for content in contents:
        if parts:
            parts.append({"type": "text", "text": _BLANK_LINE})
        own = content if isinstance(content, list) else [{"type": "text", "text": content}]
        parts += own
    return parts
