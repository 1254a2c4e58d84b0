"""`AnswerParser`: an answer's text told apart into reasoning, content and tool calls.

It is fed with pieces and gives what is certain; all it gives together depends on the text alone,
never on how it was cut, so a stream and a plain answer go through the same code. Which format a
model's calls have is read off its chat template. What does not parse as a call stays content:
nothing is lost. A call is given when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infer.grammar import Grammar
from infer.text.grammar import JSON_OPTIONS

MAX_FORCED_CALLS = 8
_THINK, _THOUGHT = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"


class ToolCall(NamedTuple):
    """A function and its arguments, the text of a JSON object."""

    name: str
    arguments: str


class Parts(NamedTuple):
    """A piece of an answer, told apart."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


Reader = Callable[[str], list[ToolCall] | None]
"""The calls that a text spells; None if it is something else."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    read: Reader
    opening: str = ""
    """before each call; "" = a text that begins like one is nothing but calls"""
    closing: str = ""
    arguments: str = "arguments"
    """what a forced call names them"""


def _read_json(text: str) -> list[ToolCall] | None:
    """JSON objects with a name and arguments, one after the other or with semicolons between."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some write the text of the object
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)))
        while at < len(text) and text[at] in "; \n\t":
            at += 1
    return calls or None


_GEMMA_CALL = re.compile(r"\s*call:([^\s{}]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r'([{,]\s*)([A-Za-z_][^\s:{}\[\],"]*)\s*:')


def _gemma_reader(quote: str) -> Reader:
    def read(text: str) -> list[ToolCall] | None:
        """`call:name{key:value}`; text stands between `quote`s, keys are bare."""
        match = _GEMMA_CALL.fullmatch(text)
        if match is None:
            return None
        plain, *rest = match[2].split(quote)
        if len(rest) % 2:
            return None
        pieces = [_GEMMA_KEY.sub(r'\1"\2":', plain)]
        for string, between in zip(rest[::2], rest[1::2], strict=True):
            pieces += [json.dumps(string), _GEMMA_KEY.sub(r'\1"\2":', between)]
        return _read_json(f'{{"name": {json.dumps(match[1])}, "arguments": {"".join(pieces)}}}')

    return read


BARE = ToolFormat(_read_json, arguments="parameters")
HERMES = ToolFormat(_read_json, "<tool_call>", "</tool_call>")
GEMMA = ToolFormat(_gemma_reader("<escape>"), "<start_function_call>", "<end_function_call>")
GEMMA4 = ToolFormat(_gemma_reader('<|"|>'), "<|tool_call>", "<tool_call|>")


def format_of(template: str, *, forced: bool = False) -> ToolFormat | None:
    """How calls are written by a model with this chat template; None: it shows no tools.

    `forced`: the calls are made by a grammar, which can be done with any model.
    """
    marked = (one for one in (GEMMA4, GEMMA, HERMES) if one.opening in template)
    shown = next(marked, BARE) if re.search(r"\btools\b", template) else None
    if forced:  # Gemma's own is no JSON, which is what schemas are about
        return HERMES if shown is HERMES else BARE
    return shown


def forced_calls(way: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Grammar:
    """What an answer that must call some of the tools looks like."""
    begin, end = (way.opening and f"{way.opening}\n"), (way.closing and f"\n{way.closing}")
    rules, names = [], []
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = f'{begin}{{"name": {json.dumps(function["name"])}, "{way.arguments}": '
        schema = {"type": "object", **(function.get("parameters") or {})}
        options = json.dumps({**schema, "x-guidance": JSON_OPTIONS})
        names.append(f"call{i}")
        rules.append(f"call{i}: {json.dumps(head)} arguments{i} {json.dumps('}' + end)}")
        rules.append(f"arguments{i}: %json {options}")
    between = json.dumps("\n" if begin else "; ")
    more = f"({between} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    lines = [f"start: call {more}", f"call: {' | '.join(names)}", *rules]
    return Grammar.grammar("\n".join(lines))


class AnswerParser:
    """For one answer."""

    def __init__(self, tools: ToolFormat | None, *, thinks: bool, inside: bool = False) -> None:
        """`thinks`: a text may begin with `<think>`; `inside`: the prompt has begun it."""
        self._tools = tools
        self._held = ""
        self._num_searched = 0
        self._trim = inside
        self._state = "reasoning" if inside else "begin" if thinks else "first"
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str, *, end: bool = False) -> Parts:
        """What is certain with this further piece; `end`: it is the last one."""
        self._held += text
        while self._advance(end):
            pass
        parts = Parts("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        for given in (self._reasoning, self._content, self._calls):
            given.clear()
        return parts

    def _advance(self, end: bool) -> bool:
        """Do what the state can do; whether another one goes on with what is held."""
        seen, tools = self._held.lstrip(), self._tools
        if self._state == "begin":
            if seen.startswith(_THINK):
                self._go("reasoning", seen.removeprefix(_THINK))
                return True
            if _THINK.startswith(seen) and not end:
                return False
            self._state = "first"
        if self._state == "reasoning":
            return self._until(_THOUGHT, self._reasoning, "first", end)
        if self._state == "first":
            if tools is not None and not tools.opening:
                if not end and _PYTHON_TAG.startswith(seen):
                    return False
                if seen.startswith(("{", _PYTHON_TAG)):
                    self._state = "call"
            if self._state == "first":
                self._state = "content"
        if self._state == "content":
            if tools is not None and tools.opening:
                return self._until(tools.opening, self._content, "call", end)
            self._give(self._content, self._held)
            self._held = ""
            return False
        return self._call(end)

    def _call(self, end: bool) -> bool:
        assert self._tools is not None
        closing = self._tools.closing
        at = self._held.find(closing, self._num_searched) if closing else -1
        if at < 0:
            self._num_searched = max(0, len(self._held) - len(closing) + 1)
            if not end:
                return False
            at = len(self._held)  # some models end here and leave the mark out
        after = at + len(closing)
        calls = self._tools.read(self._held[:at])
        if calls is None:
            self._give(self._content, self._tools.opening + self._held[:after])
        else:
            self._calls += calls
        self._go("content", self._held[after:])
        return bool(self._held)

    def _until(self, mark: str, given: list[str], following: str, end: bool) -> bool:
        """Give what stands before the mark, without the white space around it."""
        held = self._held
        at = held.find(mark)
        if at >= 0:
            self._give(given, held[:at].rstrip())
            self._go(following, held[at + len(mark) :])
            return True
        if not end:  # hold back what may be its beginning
            begun = (size for size in range(len(mark) - 1, 0, -1) if held.endswith(mark[:size]))
            held = held[: len(held) - next(begun, 0)].rstrip()
        self._give(given, held)
        self._held = self._held[len(held) :]
        return False

    def _go(self, state: str, rest: str) -> None:
        self._state, self._held, self._num_searched, self._trim = state, rest, 0, True

    def _give(self, given: list[str], text: str) -> None:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        given.append(text)


def parser_for(template: str, tools: ToolFormat | None, *, prompt_end: str) -> AnswerParser:
    """The parser of an answer to a prompt that this chat template has made."""
    thinks = _THOUGHT in template
    inside = thinks and prompt_end.rstrip().endswith(_THINK)
    return AnswerParser(tools, thinks=thinks, inside=inside)
