"""`AnswerParser`: divides an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from infer.text.tools.bare_calls import bare_calls
from infer.text.tools.call import Block, Gathered, Reading
from infer.text.tools.call import Parts as Parts
from infer.text.tools.call import ToolCall as ToolCall
from infer.text.tools.forced_markup import forced_markup, json_object
from infer.text.tools.forced_markup import takes_nothing as takes_nothing
from infer.text.tools.formats import BARE as BARE
from infer.text.tools.formats import GEMMA as GEMMA
from infer.text.tools.formats import GEMMA4 as GEMMA4
from infer.text.tools.formats import (
    HARMONY,
    HARMONY_THOUGHTS,
    MAX_FORCED_CALLS,
    THOUGHTS,
    Names,
    Thoughts,
)
from infer.text.tools.formats import HERMES as HERMES
from infer.text.tools.formats import ToolFormat as ToolFormat
from infer.text.tools.harmony import START, HarmonyParser
from infer.text.tools.json_calls import BracketEnd, write_json
from infer.types.grammar import Grammar

_MAX_STEP_CHARS = 4096
_MAX_TAIL_CHARS = 128


class ForcedCalls(NamedTuple):
    """An answer that must call a tool."""

    format: ToolFormat
    """Format of its calls."""
    grammar: Grammar
    """Grammar of the answer."""
    heads: Mapping[str, str] | None
    """`ForcedMarkup.heads`; None: the calls are JSON objects."""


def forced_answer(
    way: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    special: Mapping[str, int],
    ends: Iterable[str],
    thinks: bool,
) -> ForcedCalls:
    """The answer of a model, whose own format is `way`, that must call one of the tools.

    It is in the model's own markup, or in plain JSON where that cannot express the parameters. The
    arguments are those of `forced_markup`.
    """
    forced = None
    if way not in (HERMES, BARE):  # both are JSON objects, which `forced_calls` writes
        forced = forced_markup(
            way, tools, parallel=parallel, special=special, ends=ends, thinks=thinks
        )
    if forced is not None:
        return ForcedCalls(way, forced.grammar, forced.heads)
    plain = forced_format(way)
    return ForcedCalls(plain, forced_calls(plain, tools, parallel=parallel), None)


def chosen_calls(
    way: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    special: Mapping[str, int],
    ends: Iterable[str],
) -> Grammar | None:
    """The grammar of an answer of a model, whose own format is `way`, that may call the tools.

    Their schemas hold for the calls, and text before them is free. None: the format has no mark by
    which a call is known, or cannot express the parameters.

    The arguments are those of `forced_markup`.
    """
    forced = forced_markup(way, tools, parallel=parallel, special=special, ends=ends, must=False)
    return forced.grammar if forced else None


def forced_format(way: ToolFormat | None) -> ToolFormat:
    """The format of calls in JSON that a grammar enforces, for a model whose own format is `way`:
    plain objects, if its own are not."""
    return way if way in (HERMES, BARE) else _OBJECTS


_OBJECTS = ToolFormat("objects", {}, lambda calls: "; ".join(write_json(calls)), is_bare=True)


def json_heads(way: ToolFormat, names: Iterable[str]) -> dict[str, str]:
    """The text of a call in JSON up to its arguments, by the name of its tool."""
    return {name: f'{{"name": {json.dumps(name)}, "{way.arguments}": ' for name in names}


def forced_calls(way: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Grammar:
    """The grammar of an answer that must be a call of one of the tools.

    `tools`: tools of the OpenAI API, whose parameters are JSON schemas. `parallel`: up to
    `MAX_FORCED_CALLS` calls are allowed.
    """
    opening, closing = way.forced
    begin, end = (opening and f"{opening}\n"), (closing and f"\n{closing}")
    heads = json_heads(way, (tool["function"]["name"] for tool in tools))
    rules, names = [], []
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(begin + heads[function["name"]])
        names.append(f"call{i}")
        rules.append(f"call{i}: {head} arguments{i} {json.dumps('}' + end)}")
        rules.append(f"arguments{i}: {json_object(function.get('parameters') or {})}")
    between = json.dumps("\n" if begin else "; ")
    more = f"({between} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    lines = [f"start: call {more}", f"call: {' | '.join(names)}", *rules]
    return Grammar.grammar("\n".join(lines))


def cut_calls(text: str, way: ToolFormat, names: Collection[str]) -> list[ToolCall] | None:
    """The calls in a text that follows a grammar of `forced_calls` and was cut off.

    The last call has incomplete arguments, which are not valid JSON. An incomplete name is
    completed if only one of `names` is possible; otherwise the last call is left out. None if the
    text is not the beginning of such calls.
    """
    heads = json_heads(way, names)
    calls = list[ToolCall]()
    while True:
        text = text.lstrip("; \n")
        name = next((name for name, head in heads.items() if text.startswith(head)), None)
        if name is None:
            possible = [name for name, head in heads.items() if head.startswith(text)]
            if len(possible) == 1:
                return [*calls, ToolCall(possible[0], "")]
            return calls if possible or calls else None
        arguments = text.removeprefix(heads[name])
        at = BracketEnd().find(arguments) if arguments.startswith("{") else -1
        if at < 0:
            return [*calls, ToolCall(name, arguments)]
        calls.append(ToolCall(name, arguments[:at]))
        text = arguments[at:].removeprefix("}")
        if not text.strip("; \n"):
            return calls


class AnswerParser:
    """Parses one answer.

    The parser takes the text in pieces and returns the parts that are certain. The result as a
    whole depends on the text alone and not on how it was divided, so a streamed answer and a whole
    answer take the same code. `text.tools.formats` is the table of the formats that it reads. Text
    that does not parse as a call stays content, so no text is lost. A call is returned when its
    name and the beginning of its arguments are there, and its arguments as they come.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        *,
        thinks: bool,
        inside: bool = False,
        thoughts: Thoughts = THOUGHTS[0],
        names: Names = None,
        opened: bool = False,
        forced: bool = False,
    ) -> None:
        """`tools`: the format of tool calls; None: the text has no calls.

        `thinks`: the answer may begin with reasoning. `inside`: the prompt ends inside the
        reasoning. `thoughts`: the marks around the reasoning. `names`: the names of the request's
        tools, to which calls without a mark are limited; None: any name. `opened`: the prompt ends
        with the mark `tools.prompt_opens`. `forced`: a grammar of `forced_calls` made the text; if
        it was cut off, the last call is incomplete.
        """
        self._tools = tools
        self._thoughts = thoughts
        self._names = names
        self._opened = opened
        self._forced = forced
        self._held = ""
        self._before = ""
        """White space and mark before the block of calls that is being read."""
        self._reading: Reading | None = None
        self._in_thought = self._is_in_calls = False
        """Whether the block is inside of reasoning that has not been closed."""
        self._tail = ""
        """The end of the reasoning so far."""
        self._trim = inside
        self._state = "reasoning" if inside else "begin" if thinks else "first"
        self._gathered = Gathered()
        self._has_called = False

    def push(self, text: str, *, end: bool = False) -> Parts:
        """Take a further piece of text; returns what has become certain. `end`: the last piece.

        Texts of one kind are joined: there is a blank line where a call stands between them.
        """
        self._take(text, end)
        return self._gathered.joined()

    def push_in_order(self, text: str, *, end: bool = False) -> list[Parts]:
        """The same, divided where a text goes on behind a call. The order of all parts depends on
        the whole text alone and not on its pieces."""
        self._take(text, end)
        return self._gathered.in_order()

    def _take(self, text: str, end: bool) -> None:
        # What has been read is cut off the held text, which must not be long for that.
        for start in range(0, len(text), _MAX_STEP_CHARS):
            self._held += text[start : start + _MAX_STEP_CHARS]
            while self._advance(False):
                pass
        while end and self._advance(end):
            pass

    def _advance(self, end: bool) -> bool:
        """Make one step in the current state; returns whether held text is left for the next."""
        tools = self._tools
        if self._state == "begin":
            seen, opening = self._held.lstrip(), self._thoughts.opening
            if seen.startswith(opening):
                self._enter("reasoning", seen.removeprefix(opening))
                return True
            if opening.startswith(seen) and not end:
                return False
            self._state = "first"
        if self._state == "reasoning":
            inside = () if tools is None or tools.is_bare or self._forced else tools.openings
            return self._read_until_mark([self._thoughts.closing, *inside], "reasoning", end)
        if self._state == "first":
            self._state = "content"
            if tools is not None and tools.is_bare:
                self._state, self._reading = "block", bare_calls(self._names)
            elif tools is not None and self._opened:
                reading = tools.openings[tools.prompt_opens]
                self._state, self._reading = "block", reading(self._names)
        if self._state == "content":
            if tools is not None and tools.openings:
                return self._read_until_mark(list(tools.openings), "content", end)
            self._output("content", self._held)
            self._held = ""
            return False
        return self._read_block(end)

    def _read_block(self, end: bool) -> bool:
        assert self._reading is not None
        block = self._reading.read(self._held, end=end)
        if self._in_thought and not self._is_in_calls and self._is_no_call(block):
            # What follows the mark is reasoning, and may close it.
            self._output("reasoning", self._before)
            self._state = "reasoning"
            return True
        if block is None:
            return False
        calls, rest = block.calls, self._held[block.size :]
        if calls is None and self._forced and end:
            assert self._tools is not None
            cut = cut_calls(self._held, self._tools, self._names or ())
            if cut or (cut is not None and self._has_called):
                calls, rest = cut, ""
        if calls is None:
            given = "reasoning" if self._in_thought else "content"
            self._output(given, self._before + self._held[: block.size])
            self._state, self._held = "reasoning" if self._in_thought else "content", rest
            return bool(rest)
        self._is_in_calls = True
        self._gathered.go_on(block.more)
        self._gathered.begin(calls)
        self._has_called = True
        after = "reasoning" if self._in_thought else "content"
        self._enter("block" if block.is_open else after, rest)
        return bool(rest)

    def _is_no_call(self, block: Block | None) -> bool:
        """Whether a mark inside of reasoning begins no call, as far as it has been read."""
        if block is None:
            is_long = len(self._held) > _MAX_STEP_CHARS
            return is_long or self._thoughts.closing in self._held
        names = self._names
        calls = block.calls or ()
        return block.calls is None or any(names and call.name not in names for call in calls)

    def _read_until_mark(self, marks: list[str], given: str, end: bool) -> bool:
        """Output the text before the first of the marks, without the white space around it."""
        held = self._held
        first = min(
            ((at, mark) for mark in marks if (at := self._place_of(mark)) >= 0), default=None
        )
        if first is not None:
            at, mark = first
            before = held[:at].rstrip()
            self._output(given, before)
            if self._state == "reasoning" and mark == self._thoughts.closing:
                self._enter("first", held[at + len(mark) :])
            else:
                self._in_thought = self._state == "reasoning"
                self._is_in_calls = False
                assert self._tools is not None
                self._before = held[len(before) : at] + mark
                self._reading = self._tools.openings[mark](self._names)
                self._state, self._held = "block", held[at + len(mark) :]
            return True
        if not end:  # hold back an end that may be the beginning of a mark
            begun = max(map(self._num_possible_mark_chars, marks))
            held = held[: len(held) - begun].rstrip()
        elif (
            self._forced
            and self._state == "content"
            and self._ends_in_cut_call(held.strip(), marks[0])
        ):
            held, self._held = "", ""
        self._output(given, held)
        self._held = self._held[len(held) :]
        return False

    def _place_of(self, mark: str) -> int:
        """The place of a mark in the held text, -1 if there is none.

        Inside of reasoning a call begins at a line's start; elsewhere its mark is only mentioned.
        """
        held, at = self._held, self._held.find(mark)
        if self._state != "reasoning" or mark == self._thoughts.closing or self._tools is None:
            return at
        while at >= 0:
            before = (self._tail + held[:at]).rstrip(" \t")
            is_line = before.endswith("\n") or not before
            # A mark that only was mentioned may be followed by the rest of an example.
            if is_line and not before.rstrip().endswith(tuple(self._tools.openings)):
                return at
            at = held.find(mark, at + 1)
        return -1

    def _ends_in_cut_call(self, held: str, mark: str) -> bool:
        """Whether a forced call was cut off within its opening mark and its tool is known."""
        if not mark.startswith(held):
            return False
        names = list(self._names or ())
        if not self._has_called and len(names) == 1:
            self._gathered.begin([ToolCall(names[0], "")])
        return self._has_called or len(names) == 1

    def _num_possible_mark_chars(self, mark: str) -> int:
        """The number of characters at the end of the held text that may begin a mark."""
        tail = self._held[1 - len(mark) :]
        at = tail.find(mark[0])
        while at >= 0 and not mark.startswith(tail[at:]):
            at = tail.find(mark[0], at + 1)
        return len(tail) - at if at >= 0 else 0

    def _enter(self, state: str, rest: str) -> None:
        self._state, self._held, self._trim, self._before = state, rest, True, ""
        self._tail = ""

    def _output(self, given: str, text: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        self._gathered.add(given, text)
        if given == "reasoning":
            self._tail = (self._tail + text)[-_MAX_TAIL_CHARS:]


class ForcedParser:
    """Parses an answer in a family's markup that a grammar of `forced_markup` has made.

    There is no content beside its calls. So what would be content is the beginning of a call that
    was cut off. If only one tool is possible there, it is a call of that tool, without arguments.
    """

    def __init__(
        self, inner: AnswerParser | HarmonyParser, heads: Mapping[str, str], thoughts_end: str
    ) -> None:
        """`heads`: text of a first call up to its arguments, by the name of its tool.
        `thoughts_end`: mark behind the reasoning."""
        self._inner = inner
        self._is_harmony = isinstance(inner, HarmonyParser)
        self._heads = heads
        self._thoughts_end = thoughts_end
        self._content = list[str]()
        self._text = list[str]()
        """The answer so far, up to its first call."""
        self._has_called = False

    def push(self, text: str, *, end: bool = False) -> Parts:
        """See `AnswerParser.push`."""
        parts = self._inner.push(text, end=end)
        if not self._has_called:
            self._text.append(text)
        self._content.append(parts.content)
        begun = self._begun() if end and not self._has_called else ""
        self._has_called |= bool(parts.calls)
        parts = parts._replace(content="")
        if not end or not begun:
            return parts
        heads = {name: head.lstrip() for name, head in self._heads.items()}
        possible = [name for name, head in heads.items() if head.startswith(begun)]
        if len(possible) == 1:  # a parser may take a name that was cut for a whole one
            return parts._replace(calls=(ToolCall(possible[0], ""),))
        if possible:
            return parts._replace(calls=(), content=begun)
        known = (name for name, head in heads.items() if begun.startswith(head.rstrip()))
        if parts.calls or (name := next(known, None)) is None:
            return parts if parts.calls else parts._replace(content="".join(self._content))
        rest = begun.removeprefix(heads[name].rstrip()).strip()
        return parts._replace(calls=(ToolCall(name, rest if rest == "{" else ""),))

    def push_in_order(self, text: str, *, end: bool = False) -> list[Parts]:
        """See `AnswerParser.push_in_order`. Nothing goes on behind a call here."""
        return [self.push(text, end=end)]

    def _begun(self) -> str:
        """The text behind the reasoning."""
        text = "".join(self._text)
        before, mark, behind = text.partition(self._thoughts_end)
        text = (behind if mark else before).strip()
        return text.removeprefix(f"{START}assistant") if self._is_harmony else text


def parser_for(
    thoughts: Thoughts | None,
    tools: ToolFormat | None,
    *,
    prompt_end: str,
    names: Names = None,
    forced: bool = False,
    heads: Mapping[str, str] | None = None,
) -> AnswerParser | HarmonyParser | ForcedParser:
    """The parser of an answer to a prompt whose chat template has these marks of reasoning.

    `prompt_end`: the last characters of the prompt. `heads`: `ForcedMarkup.heads`, if a grammar of
    the format's own markup has made the answer. The other arguments are `AnswerParser`'s.
    """
    if heads is not None:
        inner = parser_for(thoughts, tools, prompt_end=prompt_end, names=names, forced=forced)
        assert not isinstance(inner, ForcedParser)
        return ForcedParser(inner, heads, (thoughts or THOUGHTS[0]).closing)
    if tools is HARMONY or (tools is None and thoughts == HARMONY_THOUGHTS):
        return HarmonyParser(calls=tools is not None, prompt_end=prompt_end)
    prompt_end = prompt_end.rstrip()
    return AnswerParser(
        tools,
        thinks=thoughts is not None,
        inside=thoughts is not None and thoughts.are_opened_by(prompt_end),
        thoughts=thoughts or THOUGHTS[0],
        names=names,
        opened=bool(tools and tools.prompt_opens and prompt_end.endswith(tools.prompt_opens)),
        forced=forced,
    )
