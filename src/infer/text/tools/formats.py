"""The table of formats in which models write tool calls, and finding the format of a model.

The formats have these marks:

    <tool_call> … </tool_call>         Hermes, Qwen 2.5 and 3, QwQ: around each call, a JSON object
    <|python_tag|>                     Llama 3: before calls in JSON or Python, up to the end
    (none)                             Llama 3, xLAM: the whole answer is JSON; Llama 3.2, Gemma 3
                                       and ToolACE also: a list of Python calls
    [TOOL_CALLS]                       Mistral: before a JSON list of calls; in newer models before
                                       each single call, whose arguments follow [ARGS]
    [CALL_ID]                          Mistral: before an id between name and [ARGS]; it is ignored
    <｜tool▁calls▁begin｜> … ▁end｜>      DeepSeek R1 and its distilled models: around all calls;
    <｜tool▁call▁begin｜> … ▁end｜>       around each, with <｜tool▁sep｜> before the name
    <TOOLCALL> … </TOOLCALL>           Nemotron: around a JSON list of calls
    <tool_calls> … </tool_calls>       Apriel: around a JSON list of calls
    <function=NAME> … </function>      functionary of Llama 3.1's generation: around the arguments
    >>>NAME                            functionary of Llama 3's: before arguments; >>>all is text
    functools[ … ]                     Firefunction, Phi 4 mini: a JSON list of calls
    <start_function_call> … <end_…>    FunctionGemma: around each call, call:NAME{…}
    <|tool_call> … <tool_call|>        Gemma 4: the same with other marks
    <think> … </think>                 around reasoning, which comes before all other text
    [THINK] … [/THINK]                 the same in Mistral's reasoning models

To find a model's format, its chat template renders a call; the format that reads this call back is
the model's. A template that renders no calls is searched for marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.text.tools import gemma_calls, harmony, named_calls
from infer.text.tools.bare_calls import bare_calls, python_until, read_bare
from infer.text.tools.call import Block, Parse, Reading, ToolCall, made_call
from infer.text.tools.json_calls import (
    BracketEnd,
    JsonList,
    in_json_string,
    read_json,
    write_actions,
    write_json,
)
from infer.text.tools.python_calls import read_python, write_python
from infer.text.tools.streamed_calls import (
    JSON_LIST,
    JSON_VALUE,
    StreamedCalls,
    Syntax,
    Tail,
    json_until,
    read_block,
)
from infer.text.tools.tagged_calls import FAMILIES, Family, NoCall, tagged_text, write_tagged

Names = Collection[str] | None
"""Names of the request's tools; None: any name is accepted. A mapping from names also has the
schemas of the tools' parameters, by which values without a type get one."""
MAX_FORCED_CALLS = 8
"""Maximum number of calls in an answer that a grammar enforces."""
_MAX_CLOSINGS = 64
"""Maximum number of closing marks inside strings of a call; a text with more is not a call."""


class Thoughts(NamedTuple):
    """The marks around a model's reasoning."""

    opening: str
    """Mark before the reasoning."""
    closing: str
    """Mark after the reasoning."""
    special: tuple[str, ...] = ()
    """Special tokens of which the marks consist, where they are none themselves."""
    name: str = ""
    """Name of the marks, for `--reasoning-parser`."""
    begins_answer: str = ""
    """Text with which the answer begins behind the closing mark."""
    begins: bool = False
    """Whether each answer begins with reasoning, although neither it nor its prompt opens it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which a detokenizer must not leave out."""
        return (self.opening, self.closing, *self.special)

    def are_opened_by(self, prompt_end: str) -> bool:
        """Whether a prompt with this end has begun the reasoning."""
        end = prompt_end.rstrip()
        if self.begins and not end.endswith(self.closing.rstrip()):
            return True
        return end.endswith(self.opening.rstrip())

    def are_around(self, word: str, text: str) -> bool:
        """Whether a word in a text stands between the marks."""
        before, mark, after = text.partition(word)
        return bool(mark) and self.are_opened_by(before) and after.lstrip().startswith(self.closing)


HARMONY_THOUGHTS = Thoughts(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    harmony.MARKS,
    name="harmony",
    begins_answer=f"{harmony.START}assistant{harmony.CHANNEL}final{harmony.MESSAGE}",
)
"""The marks of harmony, whose answers have a parser of their own."""
THOUGHTS = (
    Thoughts("<think>", "</think>", name="think"),
    Thoughts("[THINK]", "[/THINK]", name="mistral"),
    Thoughts("<seed:think>", "</seed:think>", name="seed-oss"),
    Thoughts("<mm:think>", "</mm:think>", name="minimax-m3"),
    Thoughts("<think:opensource>", "</think:opensource>", name="hunyuan-v3"),
    Thoughts("◁think▷", "◁/think▷", name="kimi-vl"),
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>", name="command-a"),
    Thoughts("<|inner_prefix|>", "<|inner_suffix|>", name="apertus"),
    Thoughts("<|channel>thought\n", "<channel|>", ("<|channel>",), name="gemma4"),
    Thoughts(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>", "<|close|>", "<|sep|>"),
        name="kimi-k3",
    ),
    HARMONY_THOUGHTS,
)  # fmt: skip
"""All known pairs of marks around reasoning."""
UNOPENED_THOUGHTS = Thoughts("<think>", "</think>", name="deepseek-r1", begins=True)
"""Marks of models that begin with their reasoning without a mark; only the operator knows that."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models writes calls."""

    name: str
    """Name of the format, for `--tool-parser`."""
    openings: Mapping[str, Callable[[Names], Reading]]
    """Parser of the text after each opening mark; such a mark may be anywhere in an answer."""
    write: Callable[[Sequence[ToolCall]], str]
    """Function that writes calls as the model would."""
    marks: tuple[str, ...] = ()
    """Marks besides the openings that the text must have even if they are special tokens."""
    is_bare: bool = False
    """Whether a whole answer without any mark may be calls."""
    forced: tuple[str, str] = ("", "")
    """Text before and after each call in a grammar that enforces calls."""
    arguments: str = "arguments"
    """Name of the arguments in a grammar that enforces calls."""
    prompt_opens: str = ""
    """Opening mark with which the prompt may end, so that the answer begins after it."""
    reads: Parse | None = None
    """Parser of whole answers by which the format of a template is found, where it has no marks of
    calls."""
    reader: Parse | None = None
    """Parser of calls without marks by which the format of a template is found."""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks, which a detokenizer must not leave out."""
        return (*self.openings, *self.marks)


class Enclosed:
    """Parses the text before a closing mark, which may be missing at the end of an answer."""

    def __init__(self, opening: str, closing: str, parse: Parse, *, is_json: bool = True) -> None:
        """`parse`: parser of the text between the marks.

        `is_json`: a closing mark inside a JSON string is a part of the string.
        """
        self._opening = opening
        self._closing = closing
        self._parse = parse
        self._is_json = is_json
        self._searched = 0
        self._num_closings = 0
        self._first = -1

    def read(self, text: str, *, end: bool) -> Block | None:
        closing = self._closing
        while (at := text.find(closing, self._searched)) >= 0:
            after = at + len(closing)
            calls = self._parse(text[:at])
            if calls is not None:
                return Block(after, calls)
            if self._first < 0:
                # This text is not a call. An opening mark inside it may begin one.
                opened = text.rfind(self._opening, 0, at)
                self._first = opened if opened >= 0 else after
            self._num_closings += 1
            in_string = self._is_json and in_json_string(text[:at])
            if not in_string or self._num_closings == _MAX_CLOSINGS:
                return Block(self._first, None)
            self._searched = after
        self._searched = max(self._searched, len(text) - len(closing) + 1)
        if not end:
            return None
        calls = self._parse(text) if self._first < 0 else None
        size = len(text) if self._first < 0 else self._first
        return Block(size, calls)


def _enclosed(
    opening: str,
    closing: str,
    parse: Parse,
    *syntaxes: Syntax,
    is_json: bool = True,
) -> Mapping[str, Callable[[Names], Reading]]:
    """The parser of calls between marks. `syntaxes`: of the calls; without any: JSON."""
    known = syntaxes or (json_until(closing),)

    def reading(names: Names) -> Reading:
        return StreamedCalls(known, Enclosed(opening, closing, parse, is_json=is_json), names)

    return {opening: reading}


def _gemma(quote: str, closing: str) -> Syntax:
    tail = Tail(closing=closing)
    return Syntax(
        gemma_calls.HEAD, lambda head: tail, lambda schema: gemma_calls.GemmaText(quote, closing)
    )


def _around(opening: str, closing: str) -> Callable[[Sequence[ToolCall]], str]:
    return lambda calls: "\n".join(f"{opening}\n{call}\n{closing}" for call in write_json(calls))


def _list_in(opening: str, closing: str = "") -> Callable[[Sequence[ToolCall]], str]:
    return lambda calls: f"{opening}[{', '.join(write_json(calls))}]{closing}"


_TAGGED: Mapping[str, Callable[[Names], Reading]] = {
    "<|python_tag|>": lambda names: bare_calls(names, marked=True)
}

HERMES = ToolFormat(
    "hermes",
    _enclosed("<tool_call>", "</tool_call>", read_json),
    _around("<tool_call>", "</tool_call>"),
    marks=("</tool_call>",),
    forced=("<tool_call>", "</tool_call>"),
)
BARE = ToolFormat(
    "json",
    _TAGGED,
    lambda calls: "; ".join(write_json(calls, "parameters")),
    is_bare=True,
    arguments="parameters",
    reader=lambda text: read_json(text, strict=True),
)
PYTHONIC = ToolFormat("pythonic", _TAGGED, write_python, is_bare=True, reader=read_python)
MISTRAL = ToolFormat(
    "mistral",
    {
        "[TOOL_CALLS]": lambda names: StreamedCalls(
            [JSON_VALUE, named_calls.MISTRAL], named_calls.MistralCalls(), names
        )
    },
    named_calls.write_mistral,
    marks=("[ARGS]", "[CALL_ID]"),
)
DEEPSEEK = ToolFormat(
    "deepseek",
    _enclosed(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        named_calls.parse_deepseek,
        named_calls.DEEPSEEK,
    ),
    named_calls.write_deepseek,
    marks=(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
NEMOTRON = ToolFormat(
    "nemotron",
    _enclosed("<TOOLCALL>", "</TOOLCALL>", read_json),
    _list_in("<TOOLCALL>", "</TOOLCALL>"),
    marks=("</TOOLCALL>",),
)
APRIEL = ToolFormat(
    "apriel",
    _enclosed("<tool_calls>", "</tool_calls>", read_json),
    _list_in("<tool_calls>", "</tool_calls>"),
    marks=("</tool_calls>",),
)
FUNCTIONARY_31 = ToolFormat(
    "functionary-v3.1",
    _enclosed("<function=", "</function>", named_calls.parse_function, named_calls.FUNCTION),
    named_calls.write_functions,
    marks=("</function>",),
)
FUNCTIONARY_32 = ToolFormat(
    "functionary-v3.2",
    {">>>": lambda names: StreamedCalls([named_calls.SECTION], named_calls.Section(), names)},
    named_calls.write_sections,
    prompt_opens=">>>",
)
FUNCTOOLS = ToolFormat(
    "functools",
    {"functools[": lambda names: StreamedCalls([JSON_LIST], JsonList("["), names)},
    _list_in("functools"),
)
GEMMA = ToolFormat(
    "functiongemma",
    _enclosed(
        "<start_function_call>",
        "<end_function_call>",
        gemma_calls.gemma_parse("<escape>"),
        _gemma("<escape>", "<end_function_call>"),
        is_json=False,
    ),
    lambda calls: "".join(
        f"<start_function_call>{call}<end_function_call>"
        for call in gemma_calls.write_gemma(calls, "<escape>")
    ),
    marks=("<end_function_call>", "<escape>"),
)
GEMMA4 = ToolFormat(
    "gemma4",
    _enclosed(
        "<|tool_call>",
        "<tool_call|>",
        gemma_calls.gemma_parse('<|"|>'),
        _gemma('<|"|>', "<tool_call|>"),
        is_json=False,
    ),
    lambda calls: "".join(
        f"<|tool_call>{call}<tool_call|>" for call in gemma_calls.write_gemma(calls, '<|"|>')
    ),
    marks=("<tool_call|>", '<|"|>'),
)


class Swallowed:
    """Reads a mark that says nothing: it is left out, and what follows is content."""

    def read(self, text: str, *, end: bool) -> Block | None:
        """See `Reading`."""
        return Block(0, ())


def _swallowing(*marks: str) -> dict[str, Callable[[Names], Reading]]:
    return {mark: lambda names: Swallowed() for mark in marks}


def _json_behind(*openings: str) -> dict[str, Callable[[Names], Reading]]:
    """Calls in JSON behind a mark, one or a list of them."""
    return {
        opening: lambda names: StreamedCalls([JSON_VALUE], JsonList(), names)
        for opening in openings
    }


def _python_in(opening: str, closing: str) -> Mapping[str, Callable[[Names], Reading]]:
    """Calls in Python or JSON between marks."""
    return _enclosed(
        opening,
        closing,
        lambda text: read_bare(text, marked=True),
        python_until(closing),
        json_until(closing),
    )


HARMONY = ToolFormat(
    "harmony", {}, harmony.write_harmony, marks=harmony.MARKS, reads=harmony.read_harmony
)
KIMI = ToolFormat(
    "kimi-k2",
    _enclosed(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", read_json, named_calls.KIMI
    ),
    named_calls.write_kimi,
    marks=(
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
SOLAR = ToolFormat(
    "solar",
    _enclosed("<|tool_calls|>", "<|calls|>", read_json, named_calls.SOLAR),
    named_calls.write_solar,
    marks=(
        "<|calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
)
APERTUS = ToolFormat(
    "apertus",
    _enclosed(
        "<|tools_prefix|>", "<|tools_suffix|>", named_calls.parse_members, named_calls.MEMBERS
    ),
    lambda calls: f"<|tools_prefix|>{named_calls.write_members(calls)}<|tools_suffix|>",
    marks=("<|tools_suffix|>",),
)
COMMAND = ToolFormat(
    "command-a",
    _enclosed("<|START_ACTION|>", "<|END_ACTION|>", read_json),
    lambda calls: f"<|START_ACTION|>{write_actions(calls)}<|END_ACTION|>",
    marks=("<|END_ACTION|>",),
)
PHI4 = ToolFormat(
    "phi4",
    _json_behind("<|tool_call|>") | _swallowing("<|/tool_call|>"),
    _list_in("<|tool_call|>", "<|/tool_call|>"),
)
GIGACHAT = ToolFormat(
    "gigachat",
    _json_behind("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    lambda calls: "".join(f"<|function_call|>{call}" for call in write_json(calls)),
    marks=("<|message_sep|>", "<|role_sep|>"),
)
LFM2 = ToolFormat(
    "lfm2",
    _python_in("<|tool_call_start|>", "<|tool_call_end|>"),
    lambda calls: f"<|tool_call_start|>{write_python(calls)}<|tool_call_end|>",
    marks=("<|tool_call_end|>",),
)
OLMO = ToolFormat(
    "olmo3",
    _python_in("<function_calls>", "</function_calls>"),
    lambda calls: (
        f"<function_calls>{chr(10).join(write_python([c])[1:-1] for c in calls)}</function_calls>"
    ),
    marks=("</function_calls>",),
)
LLAMA4 = ToolFormat(
    "llama4",
    {**_python_in("<|python_start|>", "<|python_end|>"), **_json_behind("<|python_end|>")},
    lambda calls: f"<|python_start|>{write_python(calls)}<|python_end|>",
    marks=("<|python_end|>",),
    is_bare=True,
)


def _tagged(family: Family) -> ToolFormat:
    """The format of a family whose calls are between tags; JSON between them is read, too."""
    closing, makes = family.closing, tagged_text(family)
    skipped = () if family.end == closing else (family.end,)
    tail = Tail(skipped, closing, starts=(family.starts,) if family.starts else ())
    kinds = [Syntax(re.compile(family.call), lambda head: tail, makes)]
    if family.empty:
        kinds.append(Syntax(re.compile(family.empty), lambda head: tail, makes, only_known=True))
    openings: dict[str, Callable[[Names], Reading]] = {}
    for opening in family.openings:
        openings |= _enclosed(opening, closing, read_json, *kinds, json_until(closing))
    if family.alone:
        head = re.compile(family.call.replace(rf"\s*{family.alone}", ""))
        alone = [Syntax(head, lambda head: tail, makes, only_known=True)]
        openings[family.alone] = lambda names: StreamedCalls(alone, NoCall(), names)
    marks = (closing, family.end, *family.special)
    return ToolFormat(family.name, openings, write_tagged(family), marks=marks)


TAGGED = tuple(map(_tagged, FAMILIES))
"""Formats whose calls are between tags."""
FORMATS = (
    HERMES, MISTRAL, DEEPSEEK, NEMOTRON, APRIEL, FUNCTIONARY_31, FUNCTIONARY_32, FUNCTOOLS,
    GEMMA, GEMMA4, *TAGGED, HARMONY, KIMI, SOLAR, APERTUS, COMMAND, PHI4, GIGACHAT, LFM2, OLMO,
    LLAMA4, BARE, PYTHONIC,
)  # fmt: skip
"""All formats. Those without marks are last, so that they are searched for last."""
GENERIC = HERMES
"""Format that a model is asked to use if its template does not support tools."""


def format_named(name: str) -> ToolFormat:
    """The format of this name; `KeyError` if there is none."""
    return {form.name: form for form in FORMATS}[name]


def thoughts_named(name: str) -> Thoughts | None:
    """The marks of this name, None for `none`; `KeyError` if there are none of it."""
    known = {thoughts.name: thoughts for thoughts in (*THOUGHTS, UNOPENED_THOUGHTS)}
    return {"none": None, **known}[name]


def format_between(opening: str, closing: str) -> ToolFormat:
    """The format of calls between these marks: one of the table, or else JSON between them."""
    known = (form for form in FORMATS if opening in form.openings)
    if form_between := next(
        (form for form in known if not closing or closing in form.all_marks), None
    ):
        return form_between
    return ToolFormat(
        "json-between-marks",
        _enclosed(opening, closing, read_json) if closing else _json_behind(opening),
        _around(opening, closing) if closing else _list_in(opening),
        marks=(closing,) if closing else (),
    )


def format_that_reads(text: str, calls: Sequence[ToolCall], head: str = "") -> ToolFormat | None:
    """The format that reads exactly these calls from a text, whatever follows them.

    Calls without a mark must follow `head` (white space is ignored), with which an answer without
    calls begins too. Other words before them would be marks of an unknown format.
    """
    return next((form for form in FORMATS if _reads(form, text, list(calls), head)), None)


def format_marked_in(source: str) -> ToolFormat | None:
    """The format whose mark occurs in the source of a template that renders no calls.

    functionary's `>>>` is ignored, since it also occurs in examples of Python.
    """
    marked = (form for form in FORMATS if not form.prompt_opens)
    return next((form for form in marked if any(mark in source for mark in form.openings)), None)


def format_with_token(tokens: Collection[str]) -> ToolFormat | None:
    """The format whose mark is one of these tokens, where it is the mark of one format only."""
    marks = [mark for form in FORMATS for mark in form.openings]
    return next(
        (
            form
            for form in FORMATS
            if any(mark in tokens and marks.count(mark) == 1 for mark in form.openings)
        ),
        None,
    )


def thoughts_in(source: str) -> Thoughts | None:
    """The marks of reasoning that occur in a template's source; None if there are none."""
    if harmony.CHANNEL in source and harmony.MESSAGE in source and "analysis" in source:
        return HARMONY_THOUGHTS
    known = (thoughts for thoughts in THOUGHTS if thoughts != HARMONY_THOUGHTS)
    return next((thoughts for thoughts in known if thoughts.closing in source), None)


def thoughts_around(word: str, text: str) -> Thoughts | None:
    """The marks of reasoning between which a word stands in a text; None if there are none."""
    return next((thoughts for thoughts in THOUGHTS if thoughts.are_around(word, text)), None)


def _reads(way: ToolFormat, text: str, expected: list[ToolCall], head: str) -> bool:
    for opening, reading in way.openings.items():
        at, read = text.find(opening), list[ToolCall]()
        while at >= 0:
            at += len(opening)
            block = read_block(reading(None), text[at:])
            if block.calls is None:
                break
            read += [made_call(*call) or call for call in block.calls]
            at = text.find(opening, at + block.size)
        if read == expected:
            return True
    if way.reads is not None:
        return way.reads(text) == expected
    if way.reader is None:
        return False
    starts = (at for at, char in enumerate(text) if char in "{[")
    start = next((at for at in starts if _without_space(text[:at]) == _without_space(head)), None)
    if start is None:
        return False
    after = BracketEnd("\"'").find(text[start:])
    return after >= 0 and way.reader(text[start : start + after]) == expected


def _without_space(text: str) -> str:
    return "".join(text.split())
