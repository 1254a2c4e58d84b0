"""Answers in many formats for the tests of the parser; tests/fuzz uses them too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from infer.text.answer_parser import AnswerParser, Parts, ToolCall
from infer.text.tools.formats import (
    APRIEL,
    BARE,
    DEEPSEEK,
    FUNCTIONARY_31,
    FUNCTIONARY_32,
    FUNCTOOLS,
    GEMMA,
    GEMMA4,
    HARMONY,
    HERMES,
    MISTRAL,
    NEMOTRON,
    PYTHONIC,
    ToolFormat,
)
from infer.text.tools.harmony import HarmonyParser

NAMES = ("f", "g", "get-weather", "weather.now")


def told_apart(pieces: Iterable[str], tools: ToolFormat | None, **options: Any) -> Parts:
    """The parts that a parser finds in an answer that comes in these pieces."""
    parser = parser_of(tools, **options)
    *before, last = [*pieces] or [""]
    given = [*map(parser.push, before), parser.push(last, end=True)]
    return Parts(
        "".join(parts.reasoning for parts in given),
        "".join(parts.content for parts in given),
        tuple(joined(given)),
    )


def parser_of(tools: ToolFormat | None, **options: Any) -> AnswerParser | HarmonyParser:
    """The parser of a format's answers."""
    if tools is HARMONY:
        return HarmonyParser(calls=True)
    return AnswerParser(tools, **{"thinks": True, **options})


def joined(given: Iterable[Parts]) -> list[ToolCall]:
    """The calls that pieces of an answer add up to."""
    found = list[ToolCall]()
    for parts in given:
        if parts.more:
            found[-1] = ToolCall(found[-1].name, found[-1].arguments + parts.more)
        found += parts.calls
    return found


def call(name: str = "f", **arguments: object) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def content(text: str) -> Parts:
    return Parts("", text)


def calls(*found: ToolCall) -> Parts:
    return Parts("", "", found)


ONE = '{"name": "f", "arguments": {"a": 1}}'
HERMES_ONE = f"<tool_call>\n{ONE}\n</tool_call>"
GEMMA_ONE = (
    "<start_function_call>call:f{a:<escape>x, y: 2<escape>,b:[1,{c:true}]}<end_function_call>"
)
BROKEN = '<|tool_call>call:f{a:<|"|>x}<tool_call|>'
NESTED = call(a="x, y: 2", b=[1, {"c": True}])
R1_ONE = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V3_ONE = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
R1_BEGIN, R1_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
F1 = call(a=1)

CASES: list[tuple[ToolFormat | None, str, Parts]] = [
    (None, "", Parts()),
    (None, "plain {text}", content("plain {text}")),
    (None, " <tool_call> ", content(" <tool_call> ")),
    (None, "<think>\nhm \n</think>\n\nSo: 5 < 6", Parts("hm", "So: 5 < 6")),
    (None, "\n<think>never ends \n", Parts("never ends \n")),
    (None, "<thin", content("<thin")),
    (None, "a <think>b</think>", content("a <think>b</think>")),
    # marks around each call
    (HERMES, HERMES_ONE, calls(F1)),
    (HERMES, f"{HERMES_ONE}\n{HERMES_ONE}\n", calls(F1, F1)),
    (HERMES, f"<think>t</think>Hm. \n{HERMES_ONE}", Parts("t", "Hm.", (F1,))),
    (HERMES, f"<tool_call>{ONE}", calls(F1)),
    (HERMES, '<tool_call>{"name": "f"', content('<tool_call>{"name": "f"')),
    (HERMES, "A \n<tool_call>no</tool_call> end", content("A \n<tool_call>no</tool_call> end")),
    (HERMES, "a <tool", content("a <tool")),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', calls(call())),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', calls(call())),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', calls(call())),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', content('<tool_call>{"name": 5}</tool_call>')),
    (HERMES, '<tool_call>{"name": "f", "city": 1}</tool_call>',
     content('<tool_call>{"name": "f", "city": 1}</tool_call>')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
     calls(ToolCall("f", '{"a": 1e999}'))),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>!',
     Parts("", "!", (call(a='</tool_call>"'),))),
    (HERMES, f'<tool_call>{{"name": "f</tool_call> {HERMES_ONE}',
     Parts("", '<tool_call>{"name": "f</tool_call>', (F1,))),
    (HERMES, f"<tool_call>\n{{oh, {HERMES_ONE} and more",
     Parts("", "<tool_call>\n{oh, \n\nand more", (F1,))),
    (HERMES, "<tool_call>" * 9, content("<tool_call>" * 9)),
    (HERMES, f"<tool_call>[{ONE}, {ONE}]</tool_call>", calls(F1, F1)),
    (NEMOTRON, f"Yes. <TOOLCALL>[{ONE}, {ONE}]</TOOLCALL>", Parts("", "Yes.", (F1, F1))),
    (NEMOTRON, "<TOOLCALL>[]</TOOLCALL>", content("<TOOLCALL>[]</TOOLCALL>")),
    (APRIEL, f"<tool_calls>[{ONE}]</tool_calls>", calls(F1)),
    (FUNCTIONARY_31, 'So<function=f>{"a": 1}</function>', Parts("", "So", (F1,))),
    (FUNCTIONARY_31, '<function=f>{"a": 1}</function><function=g>{}</function>',
     calls(F1, call("g"))),
    (FUNCTIONARY_31, "<function=f>a</function>", content("<function=f>a</function>")),
    (GEMMA, GEMMA_ONE, calls(NESTED)),
    (GEMMA, "call:f{}", content("call:f{}")),
    (GEMMA, "<start_function_call>call:f{}<end_function_call>", calls(call())),
    (GEMMA4, '<|tool_call>call:f{a:<|"|>x, y: 2<|"|>,b:[1,{c:true}]}<tool_call|>'
     "<|tool_call>call:g{}", calls(NESTED, call("g"))),
    (GEMMA4, BROKEN, calls(ToolCall("f", '{"a": "x}'))),
    (GEMMA4, "<|tool_call>call:f<tool_call|>", content("<|tool_call>call:f<tool_call|>")),
    # marks around all calls and around each call
    (DEEPSEEK, f"{R1_BEGIN}{R1_ONE}\n{R1_ONE}{R1_END}", calls(F1, F1)),
    (DEEPSEEK, f"<think>\nhm\n</think>\n\n{R1_BEGIN}{R1_ONE}", Parts("hm", "", (F1,))),
    (DEEPSEEK, f"{R1_BEGIN}{R1_ONE[:-26]}", calls(ToolCall("f", '{"a'))),
    (DEEPSEEK, f"{R1_BEGIN}{V3_ONE}{R1_END}", calls(F1)),
    (DEEPSEEK, f"{R1_BEGIN}no{R1_END}", content(f"{R1_BEGIN}no{R1_END}")),
    # a mark before calls
    (MISTRAL, f"[TOOL_CALLS][{ONE}]", calls(F1)),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {ONE}]", calls(F1, F1)),
    (MISTRAL, f"[TOOL_CALLS] {ONE}", calls(F1)),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', calls(F1)),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', calls(F1)),
    (MISTRAL, 'See.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get-weather[ARGS]{"a": "}"}',
     Parts("", "See.", (F1, call("get-weather", a="}")))),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}', calls(F1)),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": ', calls(ToolCall("f", '{"a": '))),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{", content("[TOOL_CALLS]f[ARGS]{")),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc123def"}, {"arguments"'
     ': {"a": 1}, "name": "f"}] so', Parts("", "so", (F1, F1))),
    (MISTRAL, "[TOOL_CALLS] I shall call", content("[TOOL_CALLS] I shall call")),
    (MISTRAL, "[TOOL_CALLS][1, 2] so", content("[TOOL_CALLS][1, 2] so")),
    (MISTRAL, "[TOOL_CALLS]", content("[TOOL_CALLS]")),
    (MISTRAL, "[TOOL_", content("[TOOL_")),
    (FUNCTOOLS, f" functools[{ONE}, {ONE}]", calls(F1, F1)),
    (FUNCTOOLS, "functools[", content("functools[")),
    (FUNCTOOLS, "see functools[0]!", content("see functools[0]!")),
    (FUNCTIONARY_32, '>>>all\nHi >>> 1\n>>>f\n{"a": 1}>>>g\n{}',
     Parts("", "Hi >>> 1", (F1, call("g")))),
    (FUNCTIONARY_32, ">>>f\nno", content(">>>f\nno")),
    (FUNCTIONARY_32, ">>>f", content(">>>f")),
    # no mark
    (BARE, '{"name": "f", "parameters": {"a": "ü"}}', calls(call(a="ü"))),
    (BARE, f" <|python_tag|>{ONE}; {ONE}", calls(F1, F1)),
    (BARE, f"{ONE}\n{ONE}", calls(F1, F1)),
    (BARE, f"[{ONE}, {ONE}]", calls(F1, F1)),
    (BARE, f"```json\n{ONE}\n```", calls(F1)),
    (BARE, '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
     calls(F1)),
    (BARE, '{"type": "function", "function": "f", "parameters": {"a": 1}}', calls(F1)),
    (BARE, '{"answer": 42} is it', content('{"answer": 42} is it')),
    (BARE, '{"name": "Bob", "age": 3}', content('{"name": "Bob", "age": 3}')),
    (BARE, '{"name": "f", "age": 3}', content('{"name": "f", "age": 3}')),
    (BARE, '{"name": "f"}', content('{"name": "f"}')),
    (BARE, '{"name": "h", "parameters": {}}', content('{"name": "h", "parameters": {}}')),
    (BARE, f"{ONE} or so", Parts("", "or so", (F1,))),
    (BARE, f"{ONE}; or {{", Parts("", "or {", (F1,))),
    (BARE, f'{ONE}; {{"name": "h", "parameters": {{}}}}',
     Parts("", '{"name": "h", "parameters": {}}', (F1,))),
    (BARE, f"Hm {ONE}", content(f"Hm {ONE}")),
    (BARE, "<|py", content("<|py")),
    (BARE, "<|python_tag|>print(5)", content("<|python_tag|>print(5)")),
    (BARE, "<|python_tag|>f(a=1)", calls(F1)),
    (BARE, "``", content("``")),
    (BARE, "```python\nprint(1)\n```", content("```python\nprint(1)\n```")),
    (BARE, "[" * 5000, content("[" * 5000)),
    (BARE, '{"name":' * 999, content('{"name":' * 999)),
    (BARE, "[f(a=1), g()]", calls(F1, call("g"))),
    (PYTHONIC, "[f(a=1)]", calls(F1)),
    (PYTHONIC, " [ weather.now( a = 'it\\'s ]', b = [1, -2.5, True, None], c={'d': \"x\"} ) , ]",
     calls(call("weather.now", a="it's ]", b=[1, -2.5, True, None], c={"d": "x"}))),
    (PYTHONIC, "[get-weather(a=(1, 2))]", calls(call("get-weather", a=[1, 2]))),
    (PYTHONIC, "```tool_code\nprint(f(a=1))\n```", calls(F1)),
    (PYTHONIC, "```tool_code\n[f(a=1)]\n```\n", calls(F1)),
    (PYTHONIC, "[f(1)]", content("[f(1)]")),
    (PYTHONIC, "[h(a=1)]", content("[h(a=1)]")),
    (PYTHONIC, "[f(a=open('x'))]", content("[f(a=open('x'))]")),
    (PYTHONIC, "[f(a=1)] and more", Parts("", "and more", (F1,))),
    (PYTHONIC, "[1, 2]", content("[1, 2]")),
    (PYTHONIC, f"[f(a={'[' * 5000}", Parts("", "[" * 4936, (ToolCall("f", '{"a": ' + "[" * 64),))),
    (PYTHONIC, f"[f(a={'[' * 80}{']' * 80})]", 
     Parts("", f"{'[' * 16}{']' * 80})]", (ToolCall("f", '{"a": ' + "[" * 64),))),
    (PYTHONIC, "[f(a=1, a=2)]", Parts("", "a=2)]", (ToolCall("f", '{"a": 1'),))),
    (PYTHONIC, "[f(a=1e999)]", Parts("", "1e999)]", (ToolCall("f", '{"a": '),))),
    (PYTHONIC, f"[f(a={'9' * 5000})]", Parts("", f"{'9' * 5000})]", (ToolCall("f", '{"a": '),))),
]  # fmt: skip
"""(format, answer, its parts for a request with the tools in NAMES)."""
