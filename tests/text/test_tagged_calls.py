"""Calls between tags: values get the types of the tool's schema, and may have tags in them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from infer.text.answer_parser import AnswerParser
from infer.text.tools.formats import FORMATS, format_named
from infer.text.tools.parameter_types import json_of, types_of
from infer.text.tools.tagged_calls import FAMILIES, TaggedText
from tests.support.cases import over
from tests.support.tool_answers import call, told_apart

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "rate": {"type": "number"},
    "on": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "either": {"type": ["string", "integer"]},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["a", "b"]},
    "level": {"enum": [1, 2]},
    "linked": {"$ref": "#/$defs/Point"},
    "any": {},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TOOLS = {"f": SCHEMA, "g": {}}
QWEN = format_named("qwen3-coder")
VALUES = [
    ("text", "12", '"12"'),
    ("text", "true", '"true"'),
    ("text", '{"a": 1}', '"{\\"a\\": 1}"'),
    ("text", "", '""'),
    ("text", '"quoted"', '"\\"quoted\\""'),
    ("count", "12", "12"),
    ("count", " 12 ", "12"),
    ("count", "many", '"many"'),
    ("rate", "1.50", "1.50"),
    ("on", "true", "true"),
    ("on", "True", "true"),
    ("items", '[1, "b"]', '[1, "b"]'),
    ("items", "[1, ", '"[1, "'),
    ("options", '{"a":\n 1}', '{"a":\n 1}'),
    ("either", "12", "12"),
    ("either", "12 or so", '"12 or so"'),
    ("either", "1" * 100, f'"{"1" * 100}"'),
    ("maybe", "null", "null"),
    ("maybe", "nullify", '"nullify"'),
    ("maybe", "12", '"12"'),
    ("kind", "12", '"12"'),
    ("level", "2", "2"),
    ("linked", '{"x": 1}', '{"x": 1}'),
    ("any", "12", "12"),
    ("any", "twelve", '"twelve"'),
    ("unknown", "[2]", "[2]"),
    ("rate", "NaN", '"NaN"'),
    ("any", "[" * 5000, f'"{"[" * 5000}"'),
]


@pytest.mark.parametrize(("key", "text", "expected"), VALUES, ids=str)
def test_a_value_has_the_type_of_its_schema(key: str, text: str, expected: str) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n"
    written += "</tool_call>"
    for pieces in ([written], list(written)):
        found = told_apart(pieces, QWEN, names=TOOLS)
        assert [one.arguments for one in found.calls] == [f'{{"{key}": {expected}}}']
        assert not found.content


CODE = (
    "</tool_call>", "<tool_call>", "<parameter=x>", "</parameter>", "</function>", "<function=g>",
    "a </parameter> b", "x\n</parameter> y", "if a <b: c>d", "\n\nx\n\n", "\n", "", "<", "</par",
    "<parameter=count>", "x <parameter=count>\n", "</function>\n</tool_call> and more",
    "see\n<parameter=nothing>\n",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@over("text", CODE)
def test_values_may_have_tags_in_them(family: Any, text: str) -> None:
    made = [call("f", text=text), call("f", text=text, count=3)]
    way = format_named(family.name)
    written = way.write(made)
    for pieces in ([written], list(written)):
        assert list(told_apart(pieces, way, names=TOOLS).calls) == made


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_parameters_come_in_any_order_and_may_be_none(family: Any) -> None:
    way = format_named(family.name)
    made = [call("f", count=1, text="a"), call("f", text="a", count=1), call("f")]
    for some in (made[:2], made[2:], made):
        written = way.write(some)
        for pieces in ([written], list(written)):
            found = told_apart(["Hm.\n", *pieces], way, names=TOOLS)
            assert list(found.calls) == some
            assert found.content == "Hm."


def test_a_parameter_may_come_twice() -> None:
    one, other = (f"<parameter=count>{n}</parameter>" for n in (1, 2))
    text = f"<tool_call><function=f>{one}{other}</function></tool_call>"
    [made] = told_apart([text], QWEN, names=TOOLS).calls
    assert json.loads(made.arguments) == {"count": 2}


LEFT_OUT = {
    "the tag after a value": "<tool_call>\n<function=f>\n<parameter=text>\nhi\n<parameter=count>\n"
    "3\n</parameter>\n</function>\n</tool_call>",
    "the tag after the last value": "<tool_call>\n<function=f>\n<parameter=text>\nhi\n</parameter>"
    "\n<parameter=count>\n3\n</function>\n</tool_call>",
    "the end of the function": "<tool_call>\n<function=f>\n<parameter=text>\nhi\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</tool_call>",
    "the opening mark": "<function=f>\n<parameter=text>\nhi\n</parameter>\n<parameter=count>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "both marks": "<function=f>\n<parameter=text>\nhi\n</parameter>\n<parameter=count>\n3\n"
    "</parameter>\n</function>",
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_models_leave_out(what: str) -> None:
    for pieces in ([LEFT_OUT[what]], list(LEFT_OUT[what])):
        found = told_apart(["I look. ", *pieces], QWEN, names=TOOLS)
        assert found.calls == (call("f", text="hi", count=3),)
        assert found.content == "I look."


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=f> to call it.",
        "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=",
        "a <function=f",
        "<function=f> <parameter",
        "<tool_call>no</tool_call>",
    ],
)
def test_a_mention_is_no_call(text: str) -> None:
    for pieces in ([text], list(text)):
        found = told_apart(pieces, QWEN, names=TOOLS)
        assert (found.content, found.calls) == (text, ())


def test_a_text_streams_as_it_is_written_and_json_when_it_is_whole() -> None:
    parser = AnswerParser(QWEN, thinks=False, names=TOOLS)
    head = parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert [one.name for one in head.calls] == ["f"]
    assert head.calls[0].arguments + parser.push('say "a"').more == '{"text": "say \\"a\\"'
    assert parser.push("\n").more == ""  # it may be the tag's
    assert parser.push("b").more == "\\nb"
    assert parser.push("\n</parameter>\n<parameter=items>\n[1,").more == '", "items": '
    assert parser.push(" 2]\n</parameter>\n</function>").more == "[1, 2]}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("key", ["text", "items"])
def test_the_work_is_linear_in_the_text(family: Any, key: str) -> None:
    """No more than a few hundred characters are held while a value is written."""
    way = format_named(family.name)
    value = "<b>x</b>\n" * 2000 if key == "text" else ["<b>x</b>\n"] * 2000
    written = way.write([call("f", **{key: value})])
    assert list(told_apart([written], way, names=TOOLS).calls) == [call("f", **{key: value})]
    head = re.search(family.call, written) or re.match(family.call, written.partition('"')[2])
    assert head is not None
    rest = written[written.index(head[0]) + len(head[0]) :]
    reader, held, given = TaggedText(family, SCHEMA), "", list[str]()
    for at in range(0, len(rest), 5):
        held += rest[at : at + 5]
        piece = reader.read(held, end=False)
        held, given = held[piece.size :], [*given, piece.json] if piece.json else given
        assert len(held) < 400
        if piece.state == "whole":
            break
    assert json.loads("".join(given)) == {key: value}


@pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_stream_is_the_whole_at_every_split(family: Any, rounds: int) -> None:
    """Values of the tags themselves, whole and cut: what has been given is never taken back."""
    draw, way = random.Random(family.name), format_named(family.name)
    parts = (family.closing, family.end, family.after.replace("{key}", "text"), *family.openings)
    atoms = (
        *CODE,
        *parts,
        family.key_mark,
        family.starts,
        " ",
        "12",
        "true",
        "null",
        "[1]",
        "\r\n",
    )
    for _ in range(rounds):
        keys = draw.sample(sorted(PROPERTIES), draw.randint(0, 4))
        made = {key: "".join(draw.choices(atoms, k=draw.randrange(6))) for key in keys}
        text = "Hm.\n" * draw.randrange(2) + way.write([call("f", **made)] * draw.randint(1, 2))
        text = text[: draw.choice((len(text), draw.randrange(len(text) + 1)))]
        text += draw.choice(("", " more", "<", "\n", "</think>"))
        how = {"names": TOOLS, "inside": draw.random() < 0.3}
        whole = told_apart([text], way, **how)
        assert told_apart(list(text), way, **how) == whole, text
        for _ in range(6):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 9)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert told_apart(pieces, way, **how) == whole, pieces


def test_types() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"anyOf": [deep, {"type": "string"}]}
    assert "string" in types_of({"properties": {"a": deep}}, "a")
    circle = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert "object" in types_of(circle, "a")
    assert types_of({"additionalProperties": {"type": "integer"}}, "a") == {"integer"}
    assert types_of({"properties": {"a": {"type": "string", "nullable": True}}}, "a") == {
        "string",
        "null",
    }
    broken: Any
    for broken in (
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 5}}},
    ):
        assert types_of(broken, "a")
    assert json_of("None", frozenset(("null",))) == "null"


def test_every_family_is_a_format() -> None:
    assert {family.name for family in FAMILIES} <= {way.name for way in FORMATS}
