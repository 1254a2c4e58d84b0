"""Tests of the parser of answers: each format, text that is not a call, and all ways to split."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from infer.text.answer_parser import (
    AnswerParser,
    Parts,
    ToolCall,
    cut_calls,
    forced_format,
    parser_for,
)
from infer.text.tools.formats import (
    BARE,
    DEEPSEEK,
    FORMATS,
    FUNCTIONARY_32,
    GEMMA,
    HERMES,
    MISTRAL,
    PYTHONIC,
    THOUGHTS,
    ToolFormat,
    format_named,
    format_that_reads,
    thoughts_in,
)
from tests.support.cases import timed
from tests.support.tool_answers import (
    BROKEN,
    CASES,
    F1,
    GEMMA_ONE,
    HERMES_ONE,
    NAMES,
    ONE,
    R1_BEGIN,
    R1_END,
    R1_ONE,
    call,
    calls,
    content,
    told_apart,
)

PAIRS_UP_TO = 40
"""Maximum length of texts that are split at every pair of places, in characters."""


@pytest.mark.parametrize(("tools", "text", "expected"), CASES, ids=range(len(CASES)))
def test_every_split_gives_the_same(tools: ToolFormat | None, text: str, expected: Parts) -> None:
    assert told_apart([text], tools, names=NAMES) == expected
    assert told_apart([text, ""], tools, names=NAMES) == expected
    for cut in range(0, len(text), max(1, len(text) // 120)):
        assert told_apart([text[:cut], text[cut:]], tools, names=NAMES) == expected
    if len(text) < 5000:
        assert told_apart(list(text), tools, names=NAMES) == expected
    if len(text) <= PAIRS_UP_TO:
        for one, other in itertools.combinations(range(len(text) + 1), 2):
            pieces = [text[:one], text[one:other], text[other:]]
            assert told_apart(pieces, tools, names=NAMES) == expected, pieces


@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_every_format_reads_what_it_writes(way: ToolFormat) -> None:
    made = [call("f", city="Ulm", days=3), call("g", note="x: [1], {2} 'ä'", also=[True, None])]
    for some in (made[:1], made):
        text = way.write(some)
        assert told_apart([text], way, names=NAMES) == calls(*some)
        assert told_apart(list(text), way, names=NAMES) == calls(*some)
        for cut in range(len(text)):
            assert told_apart([text[:cut], text[cut:]], way, names=NAMES) == calls(*some)
    head = "<|im_start|>assistant\n"
    assert format_that_reads(f"{head}{way.write(made[:1])}<|im_end|>", made[:1], head) is way
    assert format_named(way.name) is way


@pytest.mark.parametrize("rounds", [700, pytest.param(2500, marks=pytest.mark.slow)])
def test_many_texts_at_many_splits(rounds: int) -> None:
    """Random texts made of the formats' marks and values, each split in many ways."""
    draw = random.Random(7)
    atoms = ["<think>", "</think>", "<tool_call>", "</tool_call>", ONE, "{", "}", "<", " ", "\n",
             "text", "é😀", GEMMA_ONE, "<|python_tag|>", ";", "<start_function_call>",
             "<end_function_call>", '<|"|>', "call:f{}", HERMES_ONE, HERMES_ONE, "[TOOL_CALLS]",
             "[ARGS]", "f", "[", "]", R1_BEGIN, R1_END, R1_ONE, ">>>", "f\n{}", "all\n", "```",
             "f(a=1)", "json\n", '"', "functools[", "<TOOLCALL>", "</TOOLCALL>", "[THINK]",
             "[/THINK]", "<function=f>{}</function>", BROKEN, "<function=f>", "<parameter=a>\n",
             "\n</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
             "<｜DSML｜parameter name=\"a\">"]  # fmt: skip
    atoms += [each.write([call(a="x")]) for each in FORMATS]
    num_cases = num_calls = 0
    for _ in range(rounds):
        text = "".join(draw.choices(atoms, k=draw.randint(1, 9)))
        tools = draw.choice([None, *FORMATS])
        how = {
            "thinks": draw.random() < 0.8,
            "inside": draw.random() < 0.2,
            "thoughts": draw.choice(THOUGHTS),
            "names": draw.choice([None, NAMES]),
            "opened": tools is FUNCTIONARY_32 and draw.random() < 0.7,
        }
        whole = told_apart([text], tools, **how)
        num_calls += len(whole.calls)
        for _ in range(8):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert told_apart(pieces, tools, **how) == whole, (tools and tools.name, pieces)
            num_cases += 1
    assert num_cases == 8 * rounds
    assert num_calls > rounds / 25


def test_without_a_mark_only_calls_of_the_tools_are_held_back() -> None:
    """Other JSON is returned while it is written, and not only at its end."""
    parser = AnswerParser(BARE, thinks=False, names=["weather"])
    assert parser.push('{"na').content == ""
    assert parser.push('me": "we').content == ""
    assert parser.push('b"').content == '{"name": "web"'
    assert parser.push(", 1").content == ", 1"
    parser = AnswerParser(BARE, thinks=False, names=["weather"])
    assert parser.push('{"answer').content == '{"answer'
    parser = AnswerParser(BARE, thinks=False, names=["weather"])
    assert parser.push("[1").content == "[1"
    parser = AnswerParser(BARE, thinks=False, names=["weather"])
    assert parser.push("```python").content == ""
    assert parser.push("\nimport").content == "```python\nimport"


def test_what_is_certain_is_given_at_once() -> None:
    parser = AnswerParser(HERMES, thinks=True)
    assert parser.push("Hello").content == "Hello"
    assert parser.push(" wor").content == " wor"
    assert parser.push("ld \n").content == "ld"  # white space may precede a call
    assert parser.push("<tool_").content == ""
    assert parser.push("box>").content == " \n<tool_box>"
    parser = AnswerParser(MISTRAL, thinks=False)
    assert parser.push("[TOOL_CALLS]f[ARGS]{ ") == Parts()
    assert parser.push('"') == Parts("", "", (ToolCall("f", '{ "'),))
    assert parser.push("a") == Parts(more="a")
    assert parser.push('": 1}[TOOL_') == Parts(more='": 1}')
    assert parser.push("CALLS]g[ARGS]{}", end=True) == Parts("", "", (call("g"),))


@timed(20)
@pytest.mark.parametrize(
    ("way", "begin", "unit"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call>"),
        (HERMES, "", "<tool_call>"),
        (HERMES, "", "<tool_call>{</tool_call>"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]", '{"a":'),
        (MISTRAL, "", "[TOOL_CALLS]"),
        (DEEPSEEK, R1_BEGIN, R1_ONE[:40]),
        (DEEPSEEK, R1_BEGIN, " \n"),
        (BARE, "", '{"name": "f", "arguments": {}};'),
        (BARE, "[", "f(a="),
        (BARE, "```tool_code\n", "print("),
        (FUNCTIONARY_32, "", ">>>f\n"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', 'a"\\\\'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', " "),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "}"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', ONE),
        (PYTHONIC, "[f(a='", "x\\n"),
        (PYTHONIC, '[f(a="""', '""x'),
        (PYTHONIC, "[f(a=[1", "1"),
        (PYTHONIC, "[f(a=[1", ", 1"),
        (PYTHONIC, "[f(a=1", " "),
        (PYTHONIC, "[f()", ", g()"),
        (PYTHONIC, "[f(a=1, b", "b"),
        (GEMMA, "<start_function_call>call:f{a:<escape>", "a<b"),
        (GEMMA, "<start_function_call>call:f{a:1,b", "b"),
        (GEMMA, "<start_function_call>call:f{a:1,b", " "),
        (GEMMA, '<start_function_call>call:f{a:"', "b"),
    ],
)  # fmt: skip
def test_long_answers_are_not_read_again_with_each_piece(
    way: ToolFormat, begin: str, unit: str, most_s: float
) -> None:
    """Scanning 256,000 characters again with each of 16,000 pieces would take minutes. Where no
    time is measured, a sixteenth says whether it ends well."""
    length = 16_000 if math.isinf(most_s) else 256_000
    text = begin + unit * (length // len(unit))
    started_s = time.perf_counter()
    told_apart([text[at : at + 16] for at in range(0, len(text), 16)], way, names=NAMES)
    told_apart([text], way, names=NAMES)
    assert time.perf_counter() - started_s < most_s


def test_mistral_thinks_in_other_marks() -> None:
    parser = parser_for(thoughts_in("{% x %}[THINK]…[/THINK]"), MISTRAL, prompt_end="[/INST]")
    given = parser.push("[THINK]hm[/THINK]yes[TOOL_CALLS]f[ARGS]{}", end=True)
    assert given == Parts("hm", "yes", (call(),))


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    template = "<think>{{ x }}</think>"
    parser = parser_for(thoughts_in(template), None, prompt_end="<|assistant|>\n<think>\n")
    assert parser.push("\nhm</think>\nyes") == Parts("hm", "yes")
    parser = parser_for(thoughts_in(template), None, prompt_end="<think>\n\n</think>\n\n")
    assert parser.push("hm").content == "hm"
    parser = parser_for(None, None, prompt_end="<think>")
    assert parser.push("<think>hm").content == "<think>hm"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('f\n{"a": 1}>>>g\n{}', calls(F1, call("g"))),
        ("all\nHello", content("Hello")),
        ("all", content("")),
        ('all\nHm>>>f\n{"a": 1}', Parts("", "Hm", (F1,))),
        ("nothing else", content("nothing else")),
    ],
)
def test_a_prompt_may_have_begun_a_section(text: str, expected: Parts) -> None:
    parser = parser_for(None, FUNCTIONARY_32, prompt_end="<|end_header_id|>\n\n>>>", names=NAMES)
    assert parser.push(text, end=True) == expected
    for cut in range(len(text)):
        pieces = [text[:cut], text[cut:]]
        assert told_apart(pieces, FUNCTIONARY_32, opened=True, names=NAMES) == expected


@pytest.mark.parametrize("way", [HERMES, BARE, forced_format(MISTRAL)], ids=lambda way: way.name)
def test_a_forced_call_is_cut_wherever_the_tokens_end(way: ToolFormat) -> None:
    """At every place complete calls stay complete, and the last one is incomplete."""
    opening, closing = (f"{mark}\n" if mark else "" for mark in way.forced)
    head = f'{opening}{{"name": "weather", "{way.arguments}": '
    one = f'{head}{{"city": "Ulm"}}}}\n{closing}'.strip()
    between = "\n" if opening else "; "
    text = one + between + one
    names = ["weather", "time"]
    for cut in range(len(text) + 1):
        parts = told_apart([text[:cut]], way, thinks=False, names=names, forced=True)
        assert parts == told_apart(list(text[:cut]), way, thinks=False, names=names, forced=True)
        assert {found.name for found in parts.calls} <= {"weather"}
        for found, start in zip(parts.calls, (len(head), len(one + between + head)), strict=False):
            assert '{"city": "Ulm"}'.startswith(found.arguments)
            assert found.arguments == text[start:cut][: len('{"city": "Ulm"}')]
        if cut >= len(head):
            assert not parts.content
            assert parts.calls
    [only] = told_apart(
        [text[: len(opening) + 3]], way, thinks=False, names=["w"], forced=True
    ).calls
    assert only == ToolCall("w", "")
    assert cut_calls("something else", way, names) is None
