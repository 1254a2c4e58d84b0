"""`fitted`: a chat without its oldest turns, where all of it does not fit into the model's context

System messages stay, wherever they are, and so do the user's last message and the turn at the end,
which the answer is about. What goes, goes whole: a question with the answers to it, and after the
last question an answer's calls with their results. So roles still alternate as templates demand,
and no result is without its call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from infer.errors import RequestError
from infer.text.untrusted.workers import Steps

R = TypeVar("R")
Message = dict[str, Any]
"""Message of a chat, as in OpenAI's API; the role is "system" where a client wrote "developer\"."""


class Dropped(NamedTuple):
    """What was left out of a prompt."""

    num_messages: int = 0
    num_tokens: int = 0
    """By how much the prompt is shorter than that of the whole chat."""

    @property
    def usage(self) -> dict[str, int]:
        """Members of an answer's `usage`; none if nothing was left out."""
        if not self.num_messages:
            return {}
        return {"truncated_messages": self.num_messages, "truncated_tokens": self.num_tokens}


class Fitted(NamedTuple, Generic[R]):
    """A rendered chat."""

    prompt: R
    num_tokens: int
    dropped: Dropped = Dropped()


def fitted(
    messages: Sequence[Message],
    render: Callable[[list[Message]], Steps[R]],
    count: Callable[[R], int],
    room: int,
) -> Steps[Fitted[R]]:
    """The prompt of as much of a chat as has at most `room` tokens, by dropping the fewest turns.

    `render` makes the prompt, `count` says how many tokens it has. If no part fits, the result is
    the shortest prompt that can be rendered; if `room` is not positive, the whole one. Renders at
    most 2 + log2(turns) times. What `render` raises for the whole chat is passed on; a shorter chat
    that it refuses counts as one that does not fit.
    """
    prompt = yield from render(list(messages))
    num_whole = count(prompt)
    turns = droppable(messages)
    if num_whole <= room or room < 1 or not turns:
        return Fitted(prompt, num_whole)

    def without(num_turns: int) -> Steps[Fitted[R]]:
        gone = {i for turn in turns[:num_turns] for i in turn}
        prompt = yield from render([message for i, message in enumerate(messages) if i not in gone])
        num_tokens = count(prompt)
        return Fitted(prompt, num_tokens, Dropped(len(gone), num_whole - num_tokens))

    low, high = 1, len(turns)
    fitting: Fitted[R] | None = None
    while low < high:
        middle = (low + high) // 2
        try:
            shorter = yield from without(middle)
        except RequestError:  # such as one about the order of roles
            low = middle + 1
            continue
        if shorter.num_tokens <= room:
            high, fitting = middle, shorter
        else:
            low = middle + 1
    if fitting is not None:
        return fitting
    try:
        shortest = yield from without(high)
        return shortest
    except RequestError:
        return Fitted(prompt, num_whole)


def droppable(messages: Sequence[Message]) -> list[list[int]]:
    """The turns that may be left out, the oldest first, each as the indices of its messages."""
    *turns, _ = _turns(messages) or [[]]
    asked = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    before = [turn for turn in turns if turn[-1] < asked]
    after = [turn for turn in turns if turn[0] > asked]
    return [*_with_questions(messages, before), *after]


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """The messages that are not of the system, as turns: each message of a user, and each of the
    model with the results of its calls."""
    turns: list[list[int]] = []
    callers: dict[str, int] = {}
    """Index of the message that made a call, by the call's id."""
    for i, message in enumerate(messages):
        if message["role"] == "tool" and turns:
            # A result may come after other messages than that of its call; then all are one turn.
            caller = callers.get(message.get("tool_call_id", ""), i)
            first = bisect_right(turns, caller, key=itemgetter(0)) - 1
            turns[first:] = [[*chain.from_iterable(turns[first:]), i]]
        elif message["role"] != "system":
            turns.append([i])
            calls = message.get("tool_calls") or ()
            callers |= {str(call.get("id", "")): i for call in calls}
    return turns


def _with_questions(messages: Sequence[Message], turns: Sequence[list[int]]) -> list[list[int]]:
    """Turns of the model joined with the question before them."""
    joined: list[list[int]] = []
    for turn in turns:
        if joined and messages[turn[0]]["role"] != "user":
            joined[-1] = [*joined[-1], *turn]
        else:
            joined.append(turn)
    return joined
