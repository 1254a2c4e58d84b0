"""Arguments of calls while they are written: in every format, whole and cut, at every split."""

from __future__ import annotations

import random
import time

import pytest

from infer.text.answer_parser import Parts, forced_format
from infer.text.tools.formats import FORMATS, MISTRAL, TAGGED, ToolFormat
from tests.support.tool_answers import NAMES, call, calls, joined, parser_of, told_apart

ATOMS = (
    "a", "ü", "😀", '"', "'", "\\", "\n", "</", "<", ">", "{", "}", "[", "]", ",", ":", "```", "<|",
    '"""', "'''", "\\n", "\\u00e9", "\t", "\x01", " ", ";", "(", ")", "</tool_call>", "call:f{",
    "=", "all\n",
)  # fmt: skip
ENDS = ("", "", " and more", "}", "<", "]", "</tool_call>")


@pytest.mark.parametrize("way", [*FORMATS, forced_format(MISTRAL)], ids=lambda way: way.name)
def test_arguments_come_as_they_are_written(way: ToolFormat) -> None:
    long = call("f", note="".join(chr(65 + i % 26) for i in range(600)))
    text = way.write([long])
    is_forced = way is forced_format(MISTRAL)
    names = {"f": {"type": "object", "properties": {"note": {"type": "string"}}}}
    parser = parser_of(way, names=names, forced=is_forced)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    given = [parser.push(piece) for piece in pieces]
    assert sum(1 for parts in given if parts.calls or parts.more) > 80
    given.append(parser.push("", end=True))
    assert joined(given) == [long]
    assert max(len(parts.more) for parts in given) < 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
@pytest.mark.parametrize("where", ["arguments", "text", "thoughts"])
def test_an_answer_of_a_megabyte_takes_twice_the_time_of_half_of_it(
    way: ToolFormat, where: str
) -> None:
    """In pieces of 16 characters and whole, by the best of three each."""
    names = {"f": {"type": "object", "properties": {"note": {"type": "string"}}}}

    def seconds(num_chars: int, size: int) -> float:
        note = "a line of <b>text</b>, and more\n" * (num_chars // 32)
        text = way.write([call("f", note=note if where == "arguments" else "x")])
        if where == "thoughts" and way.name != "harmony":
            text = f"<think>\n{note}</think>{text}"
        elif where != "arguments":
            text = note + text
        times = list[float]()
        for _ in range(3):
            parser = parser_of(way, names=names)
            begun = time.process_time()
            for at in range(0, len(text), size):
                parser.push(text[at : at + size])
            parser.push("", end=True)
            times.append(time.process_time() - begun)
        return min(times)

    for size in (16, 2_000_000):
        half, whole = seconds(500_000, size), seconds(1_000_000, size)
        print(f"{way.name}, {where}, {size}: {half:.3f} and {whole:.3f} s, {whole / half:.2f}")
        assert whole < 3 * half


def some_value(draw: random.Random, depth: int = 0) -> object:
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [some_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        names = [some_name(draw) for _ in range(draw.randrange(4))]
        return {name: some_value(draw, depth + 1) for name in names}
    if kind == 5:
        number = draw.random() * 10.0 ** draw.randint(-9, 9)
        return draw.choice((True, False, None, draw.randint(-(10**6), 10**6), number))
    return "".join(draw.choices(ATOMS, k=draw.randrange(12)))


def some_name(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefgh_XYZ", k=draw.randint(1, 6)))


@pytest.mark.parametrize("rounds", [4, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_streamed_arguments_are_those_of_the_whole_answer(way: ToolFormat, rounds: int) -> None:
    """Random arguments, whole and cut, split in many ways; at all times a beginning of the whole.

    Nothing that has been given is taken back.
    """
    draw, num_cases = random.Random(way.name), 0
    has_own_strings = way.name in ("functiongemma", "gemma4") or way in TAGGED
    for _ in range(rounds):
        made = [
            call(
                draw.choice(("f", "g")),
                **{some_name(draw): some_value(draw) for _ in range(draw.randrange(4))},
            )
            for _ in range(draw.randint(1, 3))
        ]
        text = way.write(made)
        if not has_own_strings:  # strings in these cannot have the marks of the format
            assert told_apart([text], way, names=NAMES) == calls(*made), text
        for end in (len(text), *draw.choices(range(len(text) + 1), k=3)):
            check_splits(draw, way, text[:end] + draw.choice(ENDS))
            num_cases += 1
    assert num_cases == rounds * 4


def in_order(way: ToolFormat, pieces: list[str]) -> list[tuple[str, str]]:
    """The parts of an answer in their order, each with its kind, whatever pieces they came in."""
    parser, found = parser_of(way, names=NAMES), list[tuple[str, str]]()
    for i, piece in enumerate(pieces):
        for parts in parser.push_in_order(piece, end=i == len(pieces) - 1):
            calls = [
                part
                for each in parts.calls
                for part in (("call", each.name), ("given", each.arguments))
            ]
            new = [("given", parts.more), ("thought", parts.reasoning), ("text", parts.content)]
            for kind, said in [*new, *calls]:
                if found and found[-1][0] == kind != "call":
                    found[-1] = (kind, found[-1][1] + said)
                elif said:
                    found.append((kind, said))
    return found


def check_splits(draw: random.Random, way: ToolFormat, text: str) -> None:
    whole = told_apart([text], way, names=NAMES)
    assert not whole.more
    for num_places in (len(text), 1, 5, 20):
        places = sorted(draw.choices(range(len(text) + 1), k=num_places))
        if num_places == len(text):
            places = list(range(1, len(text)))
        cuts = zip([0, *places], [*places, len(text)], strict=True)
        pieces = [text[start:stop] for start, stop in cuts]
        parser = parser_of(way, names=NAMES)
        given, found = list[Parts](), list[str]()
        for i, piece in enumerate(pieces):
            given.append(parser.push(piece, end=i == len(pieces) - 1))
            if given[-1].more:
                found[-1] += given[-1].more
            for one in given[-1].calls:
                assert one.name == whole.calls[len(found)].name
                found.append(one.arguments)
        assert found == [one.arguments for one in whole.calls], pieces
        assert "".join(parts.content for parts in given) == whole.content, pieces
        assert in_order(way, pieces) == in_order(way, [text]), pieces
