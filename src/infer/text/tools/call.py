"""`ToolCall`: a call in an answer; `Block` and `Reading`: the protocol of parsers of calls.

The modules `json_calls`, `python_calls`, `gemma_calls` and `named_calls` each know one syntax of
calls, and `streamed_calls` returns their arguments while they are written. `formats` is the table
of complete formats. `text.answer_parser` applies one of them to an
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments as the text of a JSON object."""


class Parts(NamedTuple):
    """The parts of an answer that a piece of text has added."""

    reasoning: str = ""
    """Further text of the reasoning."""
    content: str = ""
    """Further text of the content."""
    calls: tuple[ToolCall, ...] = ()
    """Calls that have begun, with their arguments so far."""
    more: str = ""
    """Further arguments of the call that was the last one before these."""


BREAK = "\n\n"
"""Between two texts of one kind with something else between them, where they become one text."""
_ORDER = ("more", "reasoning", "content", "calls")
"""The order in which the members of one `Parts` were written."""


class Gathered:
    """Gathers the parts of an answer in the order in which a model writes them.

    A model may go on with a text behind a call. Who has one place for all texts takes them joined;
    who shows each where it stands takes them in order.
    """

    def __init__(self) -> None:
        self.last = ""
        """Kind of what was added last: "reasoning", "content", "calls", or "" before all."""
        self._runs: list[tuple[str, list[Any]]] = []
        self._resumed = set[int]()
        """Indices of the runs that go on with a text behind something else."""
        self._known = set[str]()

    def add(self, kind: str, text: str) -> None:
        """Add text to the reasoning or the content, as `kind` says."""
        if not text:
            return
        if self.last == kind and self._runs and self._runs[-1][0] == kind:
            self._runs[-1][1].append(text)
        else:
            if kind in self._known and self.last != kind:
                self._resumed.add(len(self._runs))
            self._runs.append((kind, [text]))
        self.last = kind
        self._known.add(kind)

    def begin(self, calls: Sequence[ToolCall]) -> None:
        """Add calls that have begun."""
        if calls:
            self._runs.append(("calls", [(name, [arguments]) for name, arguments in calls]))
            self.last = "calls"

    def go_on(self, more: str) -> None:
        """Add arguments to the last call."""
        if not more:
            return
        if self._runs and self._runs[-1][0] == "calls":
            self._runs[-1][1][-1][1].append(more)
        elif self._runs and self._runs[-1][0] == "more":
            self._runs[-1][1].append(more)
        else:
            self._runs.append(("more", [more]))

    def joined(self) -> Parts:
        """What has gathered, with all texts of a kind as one; nothing has gathered afterwards."""
        values_of: dict[str, list[Any]] = {kind: [] for kind in _ORDER}
        for i, (kind, values) in enumerate(self._runs):
            values_of[kind] += [BREAK, *values] if i in self._resumed else values
        self._forget()
        return _parts(values_of)

    def in_order(self) -> list[Parts]:
        """What has gathered, divided wherever the order of `_ORDER` would not be that of the
        answer; nothing has gathered afterwards."""
        made, values_of, place = list[Parts](), dict[str, list[Any]](), -1
        for kind, values in self._runs:
            if _ORDER.index(kind) < place:
                made.append(_parts(values_of))
                values_of = {}
            place = _ORDER.index(kind)
            values_of.setdefault(kind, []).extend(values)
        self._forget()
        return [*made, _parts(values_of)] if values_of else made

    def _forget(self) -> None:
        self._runs.clear()
        self._resumed.clear()


def _parts(values_of: Mapping[str, list[Any]]) -> Parts:
    more, reasoning, content = ("".join(values_of.get(kind, ())) for kind in _ORDER[:3])
    calls = (ToolCall(name, "".join(pieces)) for name, pieces in values_of.get("calls", ()))
    return Parts(reasoning, content, tuple(calls), more)


class Block(NamedTuple):
    """A decision about the beginning of a text."""

    size: int
    """Number of characters to which the decision applies."""
    calls: Sequence[ToolCall] | None
    """Calls that begin in these characters; None: they are content."""
    more: str = ""
    """Further arguments of the last call before these."""
    is_open: bool = False
    """Whether the calls go on behind these characters, from where the next text begins."""


class Reading(Protocol):
    """Parses the text after an opening mark. Each block has its own, which may keep its place."""

    def read(self, text: str, *, end: bool) -> Block | None:
        """The decision about `text`; None while further text could change it.

        `text` is the text so far after the mark or the last open `Block`; it begins with the text
        that was not decided about.
        With `end` there is always a decision. It depends on the text alone and not on the pieces in
        which the text came.
        """


Parse = Callable[[str], list[ToolCall] | None]
"""Function from a whole text to its calls; None: the text is not calls."""


def made_call(name: Any, arguments: Any) -> ToolCall | None:
    """A call made of decoded values; None if they are not valid.

    `arguments`: an object or its JSON text.
    """
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if _SURROGATE.search(text):  # no text: it stays the escape that it was
            text = json.dumps(arguments, allow_nan=False)
        return ToolCall(name, text)
    except (TypeError, ValueError, RecursionError):  # for example, JSON has no infinities
        return None


def arguments_of(call: ToolCall) -> Any:
    """The arguments of a call as Python objects."""
    return json.loads(call.arguments)
