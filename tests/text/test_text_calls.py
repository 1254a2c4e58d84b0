"""The parser of chat answers: each format, what is no call, and every split of many texts."""

from __future__ import annotations

import json
import random

import pytest

from infer.text.calls import (
    BARE,
    GEMMA,
    GEMMA4,
    HERMES,
    AnswerParser,
    Parts,
    ToolCall,
    ToolFormat,
    format_of,
    parser_for,
)


def told_apart(
    pieces: list[str], tools: ToolFormat | None, *, thinks: bool = True, inside: bool = False
) -> Parts:
    parser = AnswerParser(tools, thinks=thinks, inside=inside)
    all_parts = [*map(parser.push, pieces), parser.push("", end=True)]
    return Parts(
        "".join(parts.reasoning for parts in all_parts),
        "".join(parts.content for parts in all_parts),
        tuple(call for parts in all_parts for call in parts.calls),
    )


def call(name: str = "f", **arguments: object) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


ONE = '{"name": "f", "arguments": {"a": 1}}'
HERMES_ONE = f"<tool_call>\n{ONE}\n</tool_call>"
GEMMA_ONE = (
    "<start_function_call>call:f{a:<escape>x, y: 2<escape>,b:[1,{c:true}]}<end_function_call>"
)
BROKEN = '<|tool_call>call:f{a:<|"|>x}<tool_call|>'
NESTED = call(a="x, y: 2", b=[1, {"c": True}])
CASES: list[tuple[ToolFormat | None, str, Parts]] = [
    (None, "", Parts()),
    (None, "plain {text}", Parts("", "plain {text}")),
    (None, " <tool_call> ", Parts("", " <tool_call> ")),
    (None, "<think>\nhm \n</think>\n\nSo: 5 < 6", Parts("hm", "So: 5 < 6")),
    (None, "\n<think>never ends \n", Parts("never ends \n")),
    (None, "<thin", Parts("", "<thin")),
    (None, "a <think>b</think>", Parts("", "a <think>b</think>")),
    (HERMES, HERMES_ONE, Parts("", "", (call(a=1),))),
    (HERMES, f"{HERMES_ONE}\n{HERMES_ONE}\n", Parts("", "", (call(a=1),) * 2)),
    (HERMES, f"<think>t</think>Hm. \n{HERMES_ONE}", Parts("t", "Hm.", (call(a=1),))),
    (HERMES, f"<tool_call>{ONE}", Parts("", "", (call(a=1),))),
    (HERMES, '<tool_call>{"name": "f"', Parts("", '<tool_call>{"name": "f"')),
    (HERMES, "<tool_call>no</tool_call> end", Parts("", "<tool_call>no</tool_call>end")),
    (HERMES, "a <tool", Parts("", "a <tool")),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', Parts("", "", (call(),))),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', Parts("", '<tool_call>{"name": 5}</tool_call>')),
    (BARE, '{"name": "f", "parameters": {"a": "ü"}}', Parts("", "", (call(a="ü"),))),
    (BARE, f" <|python_tag|>{ONE}; {ONE}", Parts("", "", (call(a=1),) * 2)),
    (BARE, '{"answer": 42} is it', Parts("", '{"answer": 42} is it')),
    (BARE, f"Hm {ONE}", Parts("", f"Hm {ONE}")),
    (BARE, "<|py", Parts("", "<|py")),
    (BARE, "[" * 5000, Parts("", "[" * 5000)),
    (BARE, '{"name":' * 30000, Parts("", '{"name":' * 30000)),
    (GEMMA, GEMMA_ONE, Parts("", "", (NESTED,))),
    (GEMMA, "call:f{}", Parts("", "call:f{}")),
    (GEMMA, "<start_function_call>call:f{}<end_function_call>", Parts("", "", (call(),))),
    (
        GEMMA4,
        '<|tool_call>call:f{a:<|"|>x, y: 2<|"|>,b:[1,{c:true}]}<tool_call|><|tool_call>call:g{}',
        Parts("", "", (NESTED, call("g"))),
    ),
    (GEMMA4, BROKEN, Parts("", BROKEN)),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "expected"), CASES, ids=range(len(CASES)))
def test_every_split_gives_the_same(tools: ToolFormat | None, text: str, expected: Parts) -> None:
    assert told_apart([text], tools) == expected
    for cut in range(0, len(text), max(1, len(text) // 300)):
        assert told_apart([text[:cut], text[cut:]], tools) == expected
    if len(text) < 5000:
        assert told_apart(list(text), tools) == expected


def test_many_texts_at_many_splits() -> None:
    """Texts put together from what matters to the formats, each cut in many ways."""
    draw = random.Random(7)
    atoms = ["<think>", "</think>", "<tool_call>", "</tool_call>", ONE, "{", "}", "<", " ", "\n",
             "text", "é😀", GEMMA_ONE, "<|python_tag|>", ";", "<start_function_call>",
             "<end_function_call>", '<|"|>', "call:f{}", HERMES_ONE, HERMES_ONE]  # fmt: skip
    num_cases = num_calls = 0
    for _ in range(700):
        text = "".join(draw.choices(atoms, k=draw.randint(1, 9)))
        tools = draw.choice([None, HERMES, BARE, GEMMA, GEMMA4])
        how = {"thinks": draw.random() < 0.8, "inside": draw.random() < 0.2}
        whole = told_apart([text], tools, **how)
        num_calls += len(whole.calls)
        for _ in range(8):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert told_apart(pieces, tools, **how) == whole, pieces
            num_cases += 1
    assert num_cases >= 5000
    assert num_calls > 60


def test_what_is_certain_is_given_at_once() -> None:
    parser = AnswerParser(HERMES, thinks=True)
    assert parser.push("Hello").content == "Hello"
    assert parser.push(" wor").content == " wor"
    assert parser.push("ld \n").content == "ld"  # white space may stand before a call
    assert parser.push("<tool_").content == ""
    assert parser.push("box>").content == " \n<tool_box>"
    calls = [parser.push(char).calls for char in HERMES_ONE]
    assert [bool(one) for one in calls] == [False] * (len(HERMES_ONE) - 1) + [True]


def test_the_format_is_read_off_the_template() -> None:
    assert format_of("{{ messages }}") is None
    assert format_of("{{ messages }}", forced=True) is BARE
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{% if tools %}<tool_call>{% endif %}", forced=True) is HERMES
    assert format_of("{{ tools }}") is BARE
    assert format_of("{{ tools }}<start_function_call>") is GEMMA
    assert format_of("{{ tools }}<start_function_call>", forced=True) is BARE
    assert format_of("{{ tools }}<|tool_call><tool_call|>") is GEMMA4


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    template = "<think>{{ x }}</think>"
    parser = parser_for(template, None, prompt_end="<|assistant|>\n<think>\n")
    assert parser.push("\nhm</think>\nyes") == Parts("hm", "yes")
    parser = parser_for(template, None, prompt_end="<think>\n\n</think>\n\n")
    assert parser.push("hm").content == "hm"
    parser = parser_for("no such thing", None, prompt_end="<think>")
    assert parser.push("<think>hm").content == "<think>hm"
