"""Forced calls in each family's markup: what its grammar allows, and how the answers are read."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import tokenizers

from infer.text.answer_parser import chosen_calls, forced_answer, parser_for
from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.grammars.grammar_depth import TOO_DEEP, is_too_deep
from infer.text.tools.call import Parts, ToolCall
from infer.text.tools.forced_markup import TEXT_GRAMMAR, ForcedMarkup, forced_markup
from infer.text.tools.formats import (
    FORMATS,
    FUNCTIONARY_32,
    HARMONY,
    PYTHONIC,
    THOUGHTS,
    ToolFormat,
    format_named,
)
from infer.text.tools.tagged_calls import FAMILIES, Family
from infer.types.grammar import Grammar
from tests.support.cases import over
from tests.support.doubles import small_tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "more": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
SCHEMAS = {"weather": WEATHER, "now": {}}
ULM = {"city": 'Ulm a <b> x"y', "days": 3, "unit": "c", "more": {"ok": True}, "tags": ["x", "y"]}
CALLS = [
    ToolCall("weather", json.dumps(ULM)),
    ToolCall("now", "{}"),
    ToolCall("weather", json.dumps({"city": "", "tags": []})),
]
OWN = [way for way in FORMATS if way is not FUNCTIONARY_32]
"""Formats whose markup is forced; whether functionary's mark is there, the prompt decides."""
ENDS = ("<|call|>", "<|return|>")
USUAL = frozenset(bytes([byte]) for byte in b"\"'<>\n]})abc123,")


def special_marks(way: ToolFormat) -> list[str]:
    """A family's marks that are special tokens in its models."""
    inner = [mark for family in FAMILIES if family.name == way.name for mark in family.special]
    marks = dict.fromkeys((*way.all_marks, *inner))
    pattern = r"<\||\[|<start_|<end_|<escape|｜|<｜|\]<\]"
    return [mark for mark in marks if re.match(pattern, mark)]


class Walk:
    """A grammar of forced calls, over bytes and a family's special tokens."""

    def __init__(self, way: ToolFormat, is_special: bool, must: bool = True) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_str(small_tokenizer().to_json())
        marks = special_marks(way) if is_special else []
        self.tokenizer.add_special_tokens(marks)
        found = {mark: self.tokenizer.token_to_id(mark) for mark in marks}
        self.special = {mark: i for mark, i in found.items() if i is not None}
        ends = [mark for mark in ENDS if mark in self.special]
        made = forced_markup(way, TOOLS, parallel=True, special=self.special, ends=ends, must=must)
        assert made is not None
        self.made = made
        self.end = small_tokenizer().eos_token_ids[0]
        size = self.tokenizer.get_vocab_size()
        end_ids = (self.end, *(self.special[mark] for mark in ends))
        compiler = Compiler(Vocabulary(self.tokenizer.to_str(), size, end_ids, size))
        self.pieces = compiler.token_bytes().pieces
        self.start = compiler.constraint(made.grammar)
        afters = [family.after for family in FAMILIES if family.name == way.name]
        afters = [after.replace("{key}", key) for after in afters for key in WEATHER["properties"]]
        self.closings = [*way.all_marks, *afters, *(f"\n{after}" for after in afters), '"', "'"]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def takes(self, text: str) -> bool:
        """Whether the whole text is an answer."""
        constraint, ids = self.start.copy(), self.ids(text)
        if constraint.num_allowed(ids) < len(ids):
            return False
        return [constraint.take(i) for i in ids][-1] or not constraint.forbidden()[self.end]

    def some(self, draw: random.Random, most: int) -> tuple[str, bool]:
        """(a random answer, whether it is complete)"""
        constraint, taken = self.start.copy(), b""
        while len(taken) < most:
            ids = self.ids(draw.choice(self.closings)) if draw.random() < 0.4 else []
            if not ids or constraint.num_allowed(ids) < len(ids):
                allowed = (~constraint.forbidden()).nonzero()[0].tolist()
                if self.end in allowed and (len(allowed) == 1 or draw.random() < 0.5):
                    return taken.decode(errors="replace"), True
                allowed = [i for i in allowed if i != self.end]
                marks = self.special.values()
                usual = [i for i in allowed if i in marks or self.pieces[i] in USUAL]
                ids = [draw.choice(usual if usual and draw.random() < 0.9 else allowed)]
            taken += b"".join(self.pieces[i] for i in ids)
            if [constraint.take(i) for i in ids][-1]:
                return taken.decode(errors="replace"), True
        return taken.decode(errors="replace"), False


UNMARKED = ("json", "pythonic", "harmony")
"""Formats of which no mark says where a call begins, and text has none of it."""


@over("is_special", [False, True])
@over("way", OWN)
def test_calls_that_the_model_chooses_are_held_to_the_schema(
    way: ToolFormat, is_special: bool
) -> None:
    if way.name in UNMARKED:
        made = chosen_calls(way, TOOLS, parallel=True, special={}, ends=())
        assert made is None
        return
    walk = Walk(way, is_special, must=False)
    for text in ("Hello.", "a < b [1] {2} <x>\n\n", way.write(CALLS[:1]).strip()[:1]):
        assert walk.takes(text), text
        for calls in (CALLS[:1], CALLS):
            assert walk.takes(text + way.write(calls)), text
    for wrong in ({"days": 3}, {"city": "Ulm", "color": "red"}, {"city": "Ulm", "days": 1.5}):
        text = way.write([ToolCall("weather", json.dumps(wrong))])
        assert not walk.takes(text), text
        assert not walk.takes(f"Hello. {text}")
    assert not walk.takes(f"Hello. {way.write([ToolCall('later', '{}')])}")
    opening = way.write(CALLS[1:2]).partition("now")[0]
    assert not walk.takes(opening), "a call that was begun goes on"


def walk_of(way: ToolFormat, is_special: bool) -> tuple[Walk, ForcedMarkup]:
    walk = _walk(way.name, is_special)
    return walk, walk.made


@cache
def _walk(name: str, is_special: bool) -> Walk:
    return Walk(format_named(name), is_special)


def before_end(way: ToolFormat, text: str, is_special: bool) -> str:
    """The text that the grammar has: a special token that ends an answer is not in it."""
    return text.removesuffix("<|call|>") if way is HARMONY and is_special else text


@over("is_special", [False, True])
@over("way", OWN)
def test_what_the_family_writes_is_allowed(way: ToolFormat, is_special: bool) -> None:
    walk, _ = walk_of(way, is_special)
    for calls in (CALLS[:1], CALLS[1:2], CALLS):
        text = before_end(way, way.write(calls), is_special)
        if len(calls) > 1 and "<|call|>" in text and is_special:
            continue  # harmony's answers end with a call
        assert walk.takes(text), text


@pytest.mark.parametrize("way", OWN, ids=lambda way: way.name)
def test_what_the_schema_forbids_is_not(way: ToolFormat) -> None:
    walk, _ = walk_of(way, True)
    for wrong in (
        {"days": 3}, {"city": "Ulm", "unit": "k"}, {"city": "Ulm", "days": 1.5},
        {"city": "Ulm", "color": "red"}, {"city": "Ulm", "tags": ["abcdef"]},
        {"city": "Ulm", "tags": ["a"] * 4}, {"city": 7} if way.name not in _UNTYPED else {},
    ):  # fmt: skip
        text = way.write([ToolCall("weather", json.dumps(wrong))])
        assert not walk.takes(before_end(way, text, True)), text
    text = way.write([ToolCall("now", '{"a": 1}')])
    assert not walk.takes(before_end(way, text, True))
    text = way.write([ToolCall("later", "{}")])
    assert not walk.takes(before_end(way, text, True))


_UNTYPED = {family.name for family in FAMILIES if "{string}" not in family.written[1]
            and "{type}" not in family.written[1]}  # fmt: skip
"""Formats in which a number is the text that it spells."""


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is one of these tests' schemas."""
    if "enum" in schema:
        return value in schema["enum"]
    types = schema.get("type", "object")
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list,
             "null": type(None)}  # fmt: skip
    allowed = tuple(kinds[kind] for kind in ([types] if isinstance(types, str) else types))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return value.keys() >= set(schema.get("required", ())) and all(
            key in known and fits(item, known[key]) for key, item in value.items()
        )
    if isinstance(value, list):
        return len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
    return len(value) <= schema.get("maxLength", 10**6) if isinstance(value, str) else True


def read(way: ToolFormat, made: ForcedMarkup, pieces: list[str]) -> Parts:
    parser = parser_for(
        THOUGHTS[0], way, prompt_end="", names=SCHEMAS, forced=True, heads=made.heads
    )
    found = [parser.push(piece) for piece in pieces] + [parser.push("", end=True)]
    calls = list[ToolCall]()
    for parts in found:
        if parts.more:
            name, arguments = calls[-1]
            calls[-1] = ToolCall(name, arguments + parts.more)
        calls += parts.calls
    reasoning = "".join(parts.reasoning for parts in found)
    return Parts(reasoning, "".join(parts.content for parts in found), tuple(calls))


@pytest.mark.parametrize("rounds", [12, pytest.param(330, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", OWN, ids=lambda way: way.name)
def test_any_answer_is_read_whole_cut_and_split(way: ToolFormat, rounds: int) -> None:
    """Random texts of the grammar: calls that fit the schema and nothing else, however they are
    split; cut anywhere, the calls before stay, and no mark is content."""
    walk, made = walk_of(way, way is HARMONY)
    draw, num_whole = random.Random(way.name), 0
    for _ in range(rounds):
        text, is_whole = walk.some(draw, 500)
        num_whole += is_whole
        parts = read(way, made, [text])
        if is_whole:
            assert not parts.content
            assert parts.calls
            for call in parts.calls:
                assert fits(json.loads(call.arguments), SCHEMAS[call.name]), (text, call)
        for _ in range(3):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 9)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert read(way, made, pieces) == parts
        cut = text[: draw.randrange(len(text) + 1)]
        short = read(way, made, [cut])
        assert short == read(way, made, list(cut))
        assert not short.content or not short.calls
        if len(short.calls) > 1:
            assert short.calls[:-1] == parts.calls[: len(short.calls) - 1]
    assert num_whole > rounds // 10


@pytest.mark.parametrize("way", OWN, ids=lambda way: way.name)
def test_a_call_that_is_cut_in_its_head_is_one_if_only_one_is_possible(way: ToolFormat) -> None:
    made = forced_markup(way, TOOLS, parallel=True, special={})
    assert made is not None
    head = made.heads["weather"]
    first = next(i for i in range(len(head)) if not made.heads["now"].startswith(head[: i + 1]))
    for cut in range(first + 1, len(head) + 1):
        assert read(way, made, [head[:cut]]) == Parts("", "", (ToolCall("weather", ""),)), cut
    both = read(way, made, [head[:first]])
    assert not both.calls
    thought = f"<think>Hm {head}, no.</think>" if way is not HARMONY else ""
    parts = read(way, made, [thought + way.write(CALLS[:1])])
    assert [call.name for call in parts.calls] == ["weather"]
    assert not parts.content


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date"},
        {"type": "string", "maxLength": 5000},
        {"allOf": [{"type": "string", "pattern": "a"}]},
    ],
    ids=str,
)
def test_what_a_markup_cannot_express_is_forced_in_json(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for way in FORMATS:
        made = forced_answer(way, tools, parallel=False, special={}, ends=(), thinks=False)
        is_json = made.heads is None or "%json" in made.grammar.text.partition("arguments0:")[2]
        assert is_json or way is PYTHONIC, way.name
        assert json.dumps(schema)[1:-1] in made.grammar.text


def test_no_caller_can_name_a_special_token() -> None:
    walk = _walk(HARMONY.name, True)
    size = len(walk.pieces)
    compiler = Compiler(Vocabulary(walk.tokenizer.to_str(), size, (walk.end,), size))
    for name in (f"<[{walk.special['<|call|>']}]>", "<|call|>"):
        assert compiler.problem(Grammar.grammar(f"start: {name}"))[0]
        assert compiler.problem(Grammar.grammar(f"%llguidance {{}}\nstart: {name}"))[0]
    assert not compiler.problem(walk.made.grammar)[0]


GIVEN = 'start: "add " NAME | "del " NAME\nNAME: /[a-z]+/'


def given_text(way: ToolFormat, source: str = GIVEN) -> ForcedMarkup | None:
    """The grammar of a call of a tool that takes a text in the caller's grammar."""
    parameters = {"type": "object", "properties": {"input": {"type": "string"}},
                  "required": ["input"], "additionalProperties": False}  # fmt: skip
    tool = {"name": "edit", "parameters": parameters, TEXT_GRAMMAR: source}
    wanted = [{"type": "function", "function": tool}]
    return forced_markup(way, wanted, parallel=True, special={})


def small_compiler() -> Compiler:
    tokenizer = small_tokenizer()
    ends, size = tokenizer.eos_token_ids, tokenizer.vocab_size
    return Compiler(Vocabulary(tokenizer.to_json(), size, tuple(ends), size))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_text_has_the_callers_grammar_between_tags(family: Family) -> None:
    way, tokenizer = format_named(family.name), small_tokenizer()
    made = given_text(way)
    assert made is not None
    assert made.grammar.texts == [GIVEN]
    start = small_compiler().constraint(made.grammar)

    def takes(*texts: str) -> bool:
        calls = [ToolCall("edit", json.dumps({"input": text})) for text in texts]
        ids = tokenizer.encode(way.write(calls), add_special_tokens=False)
        return start.copy().num_allowed(ids) == len(ids)

    assert takes("add bob")
    assert takes("del a")
    for wrong in ("xdd bob", "add Bob", "add ", "add bob\nx", ""):
        assert not takes(wrong), wrong


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("start: <[5]>", ""),
        ("start: <|im_end|>", ""),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "cannot set options"),
        ("start: @text0", ""),
        ("start: @text1", ""),
        ("start: call0", ""),
        ("start: arguments0", ""),
        ('start: "a"\n}\ncall0: "b"', ""),
        ("no grammar", ""),
        ("start: " + "(" * 600 + '"a"' + ")" * 600, "nested too deeply"),
    ],
)
def test_a_callers_grammar_stands_for_itself(source: str, word: str) -> None:
    """It names neither the model's special tokens nor the rules around it."""
    made = given_text(format_named("qwen3-coder"), source)
    assert made is not None
    found = TOO_DEEP if is_too_deep(made.grammar) else small_compiler().problem(made.grammar)[0]
    assert found
    assert word in found


def test_a_grammar_whose_text_looks_like_a_line_of_ours_is_a_text() -> None:
    grammar = Grammar.grammar('start: "a"\n%text "b"')
    assert (grammar.texts, grammar.rules) == ([], grammar.text)
    hidden = Grammar.calls("start: @text0", ['start: "a"\n%text "b"'])
    assert hidden.texts == ['start: "a"\n%text "b"']
