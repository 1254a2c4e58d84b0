"""`RoleOrder`: in which order a chat template takes roles, and messages in such an order"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
"""Message of a chat, as in OpenAI's API."""
_BLANK_LINE = "\n\n"
_OPENING, _CLOSING = "<system-reminder>\n", "\n</system-reminder>"
_WORD = "probe-order-{}-{}"
_SYSTEM, _SYSTEM_AND_CALLS = ("SUAU",), ("SUC", "SUCAU")
_SYSTEMS = ("SSSU",)
_LATE_SYSTEMS = ("SUS", "US", "SUSAU", "SUASU", "SUASAU", "SUSSAU")
_LATE_IN_CALLS = ("SUSC", "SUCSAU", "SUSCSAU")
_USERS = ("UU", "SUU", "UUAU", "SUAUU", "UAUUAU")
_ANSWERS = ("UAA", "UAAU", "SUAAAU")
_ANSWERS_AND_CALLS = ("UAC", "UACU")
_ANSWER_FIRST, _ANSWER_BEHIND_SYSTEM = ("A", "AU", "AUAU"), ("SA", "SAU")
_USER_AFTER_RESULTS = ("UCU", "UCUAU", "UCCUAU")


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """What one chat template takes of the orders of messages.

    Agents send several system messages, system messages after the user's, several user messages in
    a row, and user text behind the results of calls. Published templates refuse this (Qwen 3.5,
    Mistral, Gemma), leave a message out without a word (gpt-oss, SmolLM3, MiniMax, Phi 4), or move
    it (DeepSeek). So each order is tried: every word of every message must be in the prompt, once
    and in its place. What a template cannot take becomes something that it can, at its place, so
    that the prompt of a longer chat begins as that of a shorter one: what becomes of a message
    depends on those before it only.
    """

    takes_system: bool
    """Whether it renders a system message at the beginning, and leaves it there in a longer chat:
    older templates of Mistral move it to the last question, or leave it out behind a result."""
    takes_several_systems: bool
    """Whether it renders all of several system messages at the beginning."""
    takes_late_systems: bool
    """Whether it renders system messages after the user's, at their places."""
    takes_users_in_row: bool
    """Whether it renders each of several user messages in a row."""
    takes_answers_in_row: bool
    """Whether it renders each of several messages of the assistant in a row."""
    takes_user_after_results: bool
    """Whether it renders a user message behind the results of calls."""
    takes_answer_first: bool
    """Whether it renders a chat that begins with an answer."""
    takes_system_alone: bool
    """Whether it renders a system message that is the only message."""
    forgets_thoughts: bool
    """Whether a user message takes the reasoning out of the calls before it."""


class OrderProbes:
    """Tries orders of messages with one template."""

    def __init__(
        self,
        render: Callable[[Sequence[Message], dict[str, Any]], str],
        tools: tuple[Mapping[str, Any], Mapping[str, Any]],
        loop: Callable[[str], Sequence[Message]] | None,
        *,
        in_parts: bool,
    ) -> None:
        """`render`: the prompt of messages with variables, "" if it cannot be rendered. `tools`:
        the variables without tools and with them. `loop`: a call and its result that has the given
        text; None: the template renders no results. `in_parts`: contents are lists of parts."""
        self._render = render
        self._no_tools, self._tools = map(dict, tools)
        self._loop = loop
        self._in_parts = in_parts

    def find(self) -> RoleOrder:
        """The result of all probes."""
        several = late = False
        takes_system = self._shows("SU", is_strict=False) and all(
            map(self._shows, _SYSTEM + self._with_calls(_SYSTEM_AND_CALLS))
        )
        if takes_system:
            several = all(map(self._shows, _SYSTEMS))
            late = all(map(self._keeps_what_was, _LATE_SYSTEMS[:2])) and all(
                map(self._shows, _LATE_SYSTEMS + self._with_calls(_LATE_IN_CALLS))
            )
        usual = _USERS if takes_system else tuple(order for order in _USERS if "S" not in order)
        answers = _ANSWERS if takes_system else _ANSWERS[:2]
        return RoleOrder(
            takes_system=takes_system,
            takes_several_systems=several,
            takes_late_systems=late,
            takes_users_in_row=all(map(self._shows, usual)),
            takes_answers_in_row=all(
                map(self._shows, answers + self._with_calls(_ANSWERS_AND_CALLS))
            ),
            takes_user_after_results=self._loop is not None
            and all(map(self._shows, _USER_AFTER_RESULTS)),
            takes_answer_first=all(
                map(self._shows, _ANSWER_FIRST + (_ANSWER_BEHIND_SYSTEM if takes_system else ()))
            ),
            takes_system_alone=takes_system and self._shows("S"),
            forgets_thoughts=self._forgets_thoughts(),
        )

    def _with_calls(self, orders: tuple[str, ...]) -> tuple[str, ...]:
        return () if self._loop is None else orders

    def _shows(self, order: str, *, is_strict: bool = True) -> bool:
        """Whether the words of all messages are in the prompt, each once and in order, with tools
        and without. `order`: a letter for each message, S(ystem), U(ser), A(ssistant), or
        C(all) for a call and its result. Unless `is_strict` the first word only has to occur,
        without tools.
        """
        chat, words = self._chat(order)
        if not is_strict:
            return words[0] in self._render(chat, self._no_tools)
        for variables in self._variables(order):
            text = self._render(chat, variables)
            places = [text.find(word) for word in words]
            if places != sorted(places) or any(text.count(word) != 1 for word in words):
                return False
        return True

    def _keeps_what_was(self, order: str) -> bool:
        """Whether the prompt begins as without the first system message behind another message, and
        what follows it. Some templates leave a text of their own out where they find one."""
        start = order.index("S", 1)
        (chat, words), (before, _) = self._chat(order), self._chat(order[:start])
        for variables in self._variables(order):
            text, kept = self._render(chat, variables), self._render(before, variables)
            size = text.find(words[start - 1])
            if text[:size] != kept[:size]:
                return False
        return True

    def _variables(self, order: str) -> Sequence[dict[str, Any]]:
        both = (self._no_tools, self._tools)
        return both[1:] if "C" in order and self._tools else both

    def _chat(self, order: str) -> tuple[list[Message], list[str]]:
        """The messages of an order, and the word in each of them."""
        words = [_WORD.format(i, letter) for i, letter in enumerate(order)]
        pairs = zip(order, words, strict=True)
        return [
            message for letter, word in pairs for message in self._messages(letter, word)
        ], words

    def _messages(self, letter: str, word: str) -> Sequence[Message]:
        if letter == "C":
            assert self._loop is not None
            return [self._with_content(message) for message in self._loop(word)]
        role = {"S": "system", "U": "user", "A": "assistant"}[letter]
        return [self._with_content({"role": role, "content": word})]

    def _with_content(self, message: Message) -> Message:
        content = message.get("content")
        if not self._in_parts or not isinstance(content, str):
            return message
        return {**message, "content": [{"type": "text", "text": content}]}

    def _forgets_thoughts(self) -> bool:
        if self._loop is None:
            return False
        thought, [call, *rest] = _WORD.format(0, "thought"), self._messages("C", "probe-result")
        call = {**call, "reasoning_content": thought, "thinking": thought}
        chat = [*self._messages("U", "probe-question"), call, *rest]
        more = [*chat, *self._messages("U", "probe-more")]
        return thought in self._render(chat, self._tools) and thought not in self._render(
            more, self._tools
        )


def in_order(messages: Sequence[Message], order: RoleOrder) -> list[Message]:
    """The messages, in which system messages and answers stand where the template takes them.

    Several system messages at the beginning become one, with a blank line between their texts, or
    text of the user. A later one becomes a user message in `<system-reminder>` marks, or the end of
    the result before it, where a user message would take reasoning out of the prompt. Answers in a
    row become one. A chat without a message of the user at its beginning, as clients that cut it
    send, gets one without text where the template wants one. Messages are not changed in place.
    """
    leading = list(takewhile(lambda message: message.get("role") == "system", messages))
    made = list[Message]()
    if leading and not order.takes_system:
        content = _joined([_plain_text(message.get("content")) for message in leading])
        made = [{"role": "user", "content": content}] if content else []
    elif len(leading) > 1 and order.takes_several_systems:
        made = leading
    elif leading:
        # Parts become text, since templates that take one message may read its first part only.
        contents = [_plain_text(message.get("content")) for message in leading]
        first = {name: value for message in reversed(leading) for name, value in message.items()}
        is_one = len(leading) == 1 and order.takes_several_systems
        made = leading if is_one else [{**first, "content": _joined(contents)}]
    rest = messages[len(leading) :]
    lacks_user = (not rest or rest[0].get("role") == "assistant") and (
        not made or made[-1].get("role") == "system"
    )
    takes_alone = order.takes_system_alone and (made or not messages)
    takes = order.takes_answer_first if rest else takes_alone
    if lacks_user and not takes:
        rest = [{"role": "user", "content": ""}, *rest]
    for turn in rest:
        role, before = turn.get("role"), made[-1].get("role") if made else None
        if role == "system" and not order.takes_late_systems:
            reminder = _reminder(turn.get("content"))
            if before == "tool" and order.forgets_thoughts and reminder:
                made[-1] = _with_more(made[-1], reminder)
            elif reminder:
                made.append({"role": "user", "content": reminder})
        elif (role, before) == ("user", "user") and len(made) == 1 and not order.takes_system:
            made[-1] = _with_more({**turn, "content": made[-1].get("content")}, turn.get("content"))
        elif (role, before) == ("assistant", "assistant") and not order.takes_answers_in_row:
            made[-1] = _one_answer(made[-1], turn)
        else:
            made.append(turn)
    return made


def rows_joined(messages: Sequence[Message], order: RoleOrder) -> list[Message]:
    """The messages, in which those of the user are joined with what the template does not take
    before them: another one of the user, or a result. There is a blank line between them."""
    made = list[Message]()
    for turn in messages:
        before = made[-1].get("role") if made and turn.get("role") == "user" else None
        joins = (before == "user" and not order.takes_users_in_row) or (
            before == "tool" and not order.takes_user_after_results
        )
        if joins:
            made[-1] = _with_more(made[-1], turn.get("content"))
        else:
            made.append(turn)
    return made


def _reminder(content: Any) -> Any:
    """A later system message as text of the user; nothing if it has none."""
    content = _plain_text(content)
    if isinstance(content, str):
        marked = not content.strip() or content.startswith(_OPENING.strip())
        return content.strip() if marked else f"{_OPENING}{content}{_CLOSING}"
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": _OPENING}, *content, {"type": "text", "text": _CLOSING}]


def _with_more(turn: Message, more: Any) -> Message:
    """The message with a further content; a result that is no text is written as JSON."""
    content, more = _plain_text(turn.get("content")), _plain_text(more)
    if turn.get("role") == "tool" and content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return {**turn, "content": _joined([content, more])}


def _one_answer(first: Message, other: Message) -> Message:
    """Two answers in a row as one: their texts, thoughts and calls."""
    made = {**first, **other}
    for name in ("content", "thinking", "reasoning_content", "reasoning"):
        if name in first and name in other:
            made[name] = _joined([_plain_text(first[name]), _plain_text(other[name])])
    calls = [first.get("tool_calls"), other.get("tool_calls")]
    lists = [calls_of_message for calls_of_message in calls if isinstance(calls_of_message, list)]
    if len(lists) == len(calls):
        made["tool_calls"] = [call for calls_of_message in lists for call in calls_of_message]
    return made


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
    contents = [content for content in contents if content]
    if all(isinstance(content, str) for content in contents):
        return _BLANK_LINE.join(contents)
    parts: list[Any] = []
    for content in contents:
        if parts:
            parts.append({"type": "text", "text": _BLANK_LINE})
        content_parts = (
            content if isinstance(content, list) else [{"type": "text", "text": content}]
        )
        parts += content_parts
    return parts
