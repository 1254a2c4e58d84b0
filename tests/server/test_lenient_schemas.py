"""Schemas, tools and choices that people pass on and cannot change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError
from infer.server.openai.grammar_fields import enforced_tools
from infer.text.answer_parser import forced_calls, forced_format, takes_nothing
from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.tools.formats import FORMATS, ToolFormat
from infer.types.grammar import Grammar
from tests.server.test_tool_loops import THINKS, saying, script_of, tokenizer_of
from tests.support.demo_answers import demo
from tests.support.doubles import small_tokenizer
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    ask,
    asking,
    chat_body,
    scripted,
    spelled,
    with_app,
)

FORMATS_OF_PEOPLE = (
    "password", "path", "file-path", "binary", "byte", "uri-reference", "iri", "regex",
    "json-pointer", "color", "decimal", "char",
)  # fmt: skip
ODD: list[dict[str, Any]] = [
    *({"type": "string", "format": name} for name in FORMATS_OF_PEOPLE),
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 2},
    {"type": "integer", "not": {"const": 3}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "integer", "if": {"const": 1}, "then": {"minimum": 0}, "else": {"minimum": 5}},
    {"type": "string", "pattern": "^(?!-)[a-z]+$"},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "maximum": 1.7976931348623157e308},
    {"type": "integer", "multipleOf": 604800},
    {"const": -(2**63)},
]
NOTHING: list[dict[str, Any]] = [
    {}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}},
    {"parameters": {"type": "object", "properties": {}}},
    {"parameters": {"type": "object", "properties": {}, "required": []}},
    {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"parameters": {"type": "object", "description": "none", "$schema": "http://x", "title": "t"}},
    {"parameters": {"type": ["object", "null"]}},
]  # fmt: skip


def hi() -> AsyncLLM:
    """An engine that says Hi, with room for long prompts."""
    return scripted(spelled("Hi"), max_seq_len=4096, num_pages=4096)


def within(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_odd_schemas_are_answered_and_named() -> None:
    """In each field that takes a schema; strict, they are refused with their place."""

    async def use(app: App) -> None:
        for schema in map(within, ODD):
            named = {"name": "n", "schema": schema}
            tools = [tool("ok"), tool("f", parameters=schema)]
            ways: list[tuple[str, dict[str, Any], str]] = [
                (CHAT, {"tools": tools, "tool_choice": "required"},
                 "tools[1].function.parameters.properties.v"),
                (CHAT, {"response_format": {"type": "json_schema", "json_schema": named}},
                 "response_format.json_schema.schema.properties.v"),
                (CHAT, {"response_format": {"type": "json_object", "schema": schema}},
                 "response_format.schema.properties.v"),
                (CHAT, {"guided_json": schema}, "guided_json.properties.v"),
                (COMPLETIONS, {"guided_json": json.dumps(schema)}, "guided_json.properties.v"),
                (COMPLETIONS, {"structured_outputs": {"json": schema}},
                 "structured_outputs.json.properties.v"),
            ]  # fmt: skip
            for path, fields, place in ways:
                reply = await app.post(path, BODIES[path](**fields))
                assert reply.status == 200, reply.body
                assert f"not enforced: {place}: " in reply.headers["x-warning"]
            strict = {"name": "n", "schema": schema, "strict": True}
            tools = [tool("ok"), tool("f", parameters=schema, strict=True)]
            for fields, place in (
                ({"tools": tools, "tool_choice": "required"}, ways[0][2]),
                ({"response_format": {"type": "json_schema", "json_schema": strict}}, ways[1][2]),
            ):
                reply = await app.post(CHAT, chat_body(**fields))
                assert reply.status == 400
                error = reply.json()["error"]
                assert (error["param"], place in error["message"]) == (place, True)

    with_app(hi(), use)


@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_arguments_are_an_object_whatever_a_schema_says(way: ToolFormat) -> None:
    """A root of another type gave calls whose arguments were no object, or a text behind them."""
    tokenizer = small_tokenizer()
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    schemas: list[tuple[Any, bool]] = [
        ({"type": "array", "items": {"type": "integer"}}, True),
        ({"type": "string"}, True),
        ({"type": ["object", "null"], "properties": {"a": {"type": "integer"}}}, False),
        ({"type": ["integer", "null"]}, True),
    ]
    for parameters, is_named in schemas:
        [kept], names = enforced_tools([(3, tool("f", parameters=parameters))])
        assert bool(names) is is_named
        grammar = forced_calls(forced_format(way), [kept], parallel=False)
        rule = next(line for line in grammar.text.splitlines() if line.startswith("call0: "))
        text = json.loads(rule.removeprefix("call0: ").partition(" arguments0")[0])
        assert _num_allowed(compiler, grammar, text + "{") == len(text) + 1
        for other in "[", '"', "5", "n":
            assert _num_allowed(compiler, grammar, text + other) == len(text)
        if is_named:
            assert names[0].startswith("tools[3].function.parameters: type '")
            with pytest.raises(RequestError, match=r"tools\[3\].function.parameters: type"):
                enforced_tools([(3, tool("f", parameters=parameters, strict=True))])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_has_the_same_header(stream: bool) -> None:
    schema = within({"type": "string", "format": 'pä"th\r\nx-other: 1'})
    many = {"type": "object", "properties": {f"p{i}": {"not": {}} for i in range(900)}}
    with asking(hi()) as post:
        reply = post(CHAT, chat_body(guided_json=schema, stream=stream))
        other = post(CHAT, chat_body(guided_json=many, stream=stream))
    assert reply.headers["x-warning"].isascii()
    assert reply.headers["x-warning"].startswith("not enforced: guided_json.properties.v: format")
    assert "x-other" not in reply.headers
    assert "and 892 more" in other.headers["x-warning"]
    assert len(other.headers["x-warning"]) < 1000


def test_a_tool_that_cannot_be_served_is_named() -> None:
    bad = tool("bad", parameters=within({"enum": []}))
    tools = [{"type": "web_search"}, tool("a"), bad, tool("b")]
    body = chat_body(tools=tools, tool_choice="required")
    reply = ask(hi(), CHAT, body)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "tools[2].function.parameters"
    assert "tools[2].function.parameters" in reply.json()["error"]["message"]


def test_the_value_of_a_relaxed_schema_is_enforced() -> None:
    schema = within({"type": "string", "format": "path", "maxLength": 3})
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 60,
        "guided_json": schema,
    }
    [answer] = demo(CHAT, body)
    assert len(json.loads(answer["choices"][0]["message"]["content"])["v"]) <= 3


@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_a_tool_without_parameters_takes_nothing(way: ToolFormat) -> None:
    """The grammar allows `{}` and nothing else, also beside other tools."""
    tokenizer, found = small_tokenizer(), forced_format(way)
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    opening, closing = found.forced
    city = tool("city", parameters=within({"type": "string"}))
    head = f'{opening and opening + chr(10)}{{"name": "ping", "{found.arguments}": '
    for function in NOTHING:
        assert takes_nothing(function.get("parameters") or {})
        for tools in ([tool("ping", **function)], [city, tool("ping", **function)]):
            grammar = forced_calls(found, tools, parallel=False)
            whole = f"{head}{{}}}}{closing and chr(10) + closing}"
            assert _num_allowed(compiler, grammar, whole) == len(whole)
            for other in ('{"', "{ }", "{\n}", "{a"):
                assert _num_allowed(compiler, grammar, head + other) == len(head) + 1
    more: dict[str, Any]
    for more in ({"properties": {"a": {}}}, {"additionalProperties": True}, {"minProperties": 1},
                 {"additionalProperties": {}}, {"$ref": "#/$defs/a"},
                 {"patternProperties": {"a": {}}},
                 {"anyOf": [{"required": ["a"]}]}, {"propertyNames": {"pattern": "a"}},
                 {"not": {}}, {"enum": [{"a": 1}]}, {"type": "string"}):  # fmt: skip
        assert not takes_nothing({"type": "object", **more})


def _num_allowed(compiler: Compiler, grammar: Grammar, text: str) -> int:
    return compiler.constraint(grammar).num_allowed(spelled(text))


def test_what_only_a_dropped_keyword_describes_may_be_anything() -> None:
    """The names of a map's keys: without them it is a map, and not nothing."""
    body = chat_body(
        tools=[tool("f", parameters={"type": "object", "propertyNames": {"pattern": "^a"}})],
        tool_choice="required",
        max_tokens=60,
    )
    reply = ask(hi(), CHAT, body)
    assert "propertyNames" in reply.headers["x-warning"]


def test_a_forced_call_without_parameters_has_no_arguments() -> None:
    bodies = [
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [tool("ping", **function)],
            "tool_choice": "required",
            "temperature": 1,
            "seed": seed,
            "max_tokens": 40,
            "parallel_tool_calls": False,
        }
        for function in NOTHING[:5]
        for seed in range(2)
    ]
    for answer in demo(CHAT, *bodies):
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "ping", "arguments": "{}"}


ALLOWED = {"mode": "auto", "tools": [tool("b"), {"type": "mcp", "server_label": "x"}]}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_allowed(tmp_path: Any, mode: str, nested: bool) -> None:
    tokenizer = tokenizer_of(THINKS)
    allowed = {**ALLOWED, "mode": mode}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    fields = {"tools": [tool("a"), tool("b"), {"type": "web_search"}], "tool_choice": choice}
    engine = saying(script_of(tokenizer, '{"name": "b", "parameters": {}}'), tokenizer)
    reply = ask(engine, CHAT, chat_body(max_tokens=300, **fields))
    assert reply.status == 200, reply.body
    [call] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "b"
    assert "tools[2] 'web_search'" in reply.headers["x-warning"]
    prompt = ask(saying([], tokenizer), f"{CHAT}/render", chat_body(**fields)).json()["prompt"]
    assert '"name": "b"' in prompt
    assert "web_search" not in prompt
    # Without a grammar nothing else keeps the model from calling a tool that it sees.
    assert ('"name": "a"' in prompt) is (mode == "required")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "none"}, "'auto' or 'required'"),
        ({"mode": "auto", "tools": 5}, "'auto' or 'required'"),
        ({"tools": [5]}, "object"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [tool("c")]}, "'c'"),
        ({"mode": "required", "tools": []}, "none of the tools"),
    ],
)
def test_what_is_wrong_with_allowed_tools(changes: dict[str, Any], words: str) -> None:
    choice = {"type": "allowed_tools", **ALLOWED, **changes}
    reply = ask(hi(), CHAT, chat_body(tools=[tool("b")], tool_choice=choice))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "tool_choice")
    assert words in reply.json()["error"]["message"]


def test_other_kinds_of_tools_are_skipped_and_named() -> None:
    others = [
        {"type": "web_search"},
        {"type": "custom", "custom": {"name": "c"}},
        {"type": "mcp", "server_url": "x"},
    ]
    for choice in ("auto", "required", "none"):
        body = chat_body(tools=[*others, tool("f")], tool_choice=choice)
        reply = ask(hi(), CHAT, body)
        assert reply.status == 200, reply.body
        assert "tools[0] 'web_search', tools[1] 'custom'" in reply.headers["x-warning"]
    assert ask(hi(), CHAT, chat_body(tools=others)).status == 200
    reply = ask(hi(), CHAT, chat_body(tools=others, tool_choice="required"))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "tool_choice")
    for wrong in ({"type": 5}, {"type": "function"}, {}):
        assert ask(hi(), CHAT, chat_body(tools=[wrong])).status == 400


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_strict_tool_is_refused_whoever_chooses_it(choice: str) -> None:
    schema = within({"type": "string", "format": "path"})
    body = chat_body(tools=[tool("ok"), tool("f", parameters=schema, strict=True)])
    reply = ask(hi(), CHAT, {**body, "tool_choice": choice})
    place = "tools[1].function.parameters.properties.v"
    assert (reply.status, reply.error()["param"]) == (400, place)
    assert "format 'path'" in reply.error()["message"]
    body["tools"][1]["function"]["strict"] = False
    assert ask(hi(), CHAT, {**body, "tool_choice": choice}).status == 200
