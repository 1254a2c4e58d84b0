"""Answers in harmony: every text has a channel, and calls have a recipient."""

from __future__ import annotations

import random

import pytest

from infer.text.answer_parser import Parts, parser_for
from infer.text.tools.formats import HARMONY, HARMONY_THOUGHTS, thoughts_in
from infer.text.tools.harmony import HarmonyParser, read_harmony
from tests.support.tool_answers import call, joined

ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|>"
NEXT = "<|start|>assistant"
ONE = '{"a": 1}'
F1 = call("f", a=1)
CASES = {
    "an answer": (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>Hi.<|return|>",
                  Parts("I think.", "Hi.")),
    "a call": (f"{ANALYSIS}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
               f"{ONE}<|call|>", Parts("I think.", "", (F1,))),
    "a recipient behind the role": (
        f"{ANALYSIS}{NEXT} to=functions.f<|channel|>commentary json<|message|>{ONE}<|call|>",
        Parts("I think.", "", (F1,))),
    "a recipient at once": (f" to=functions.f<|channel|>commentary<|message|>{ONE}",
                            Parts("", "", (F1,))),
    "a preamble": (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}<|channel|>commentary "
                   f"to=functions.f <|constrain|>json<|message|>{ONE}<|call|>",
                   Parts("", "I look.", (F1,))),
    "two calls": (f"<|channel|>commentary to=functions.f<|message|>{ONE}<|call|>{NEXT}<|channel|>"
                  "commentary to=functions.g<|message|>{}<|call|>",
                  Parts("", "", (F1, call("g")))),
    "a call without arguments": ("<|channel|>commentary to=functions.g<|message|><|call|>",
                                 Parts("", "", (call("g"),))),
    "two thoughts": (f"{ANALYSIS}{NEXT}{ANALYSIS}", Parts("I think.\n\nI think.")),
    "without a head": ('{"city": "Ulm"}', Parts("", '{"city": "Ulm"}')),
    "behind thoughts, without a head": (
        f'{ANALYSIS}{{"city": 1}}', Parts("I think.", '{"city": 1}')),
    "no end": (f"<|channel|>analysis<|message|>Hm{NEXT}<|channel|>final<|message|>So: 5 < 6",
               Parts("Hm", "So: 5 < 6")),
    "a head that is cut": ("<|channel|>analysis", Parts()),
    "a mark that is cut": ("<|channel|>final<|message|>a <|en", Parts("", "a <|en")),
    "a cut call": ('<|channel|>commentary to=functions.f<|message|>{"a": ',
                   Parts("", "", (F1._replace(arguments='{"a": '),))),
}  # fmt: skip


def told(pieces: list[str], **options: str) -> Parts:
    parser = HarmonyParser(calls=True, **options)
    given = [parser.push(piece) for piece in pieces] + [parser.push("", end=True)]
    return Parts(
        "".join(parts.reasoning for parts in given),
        "".join(parts.content for parts in given),
        tuple(joined(given)),
    )


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_divided_by_its_channels_at_every_split(name: str) -> None:
    text, parts = CASES[name]
    assert told([text]) == parts
    assert told(list(text)) == parts
    draw = random.Random(name)
    for _ in range(100):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told(pieces) == parts, pieces


def test_the_prompt_may_have_begun_a_message() -> None:
    begun = "<|start|>assistant<|channel|>final<|message|>So"
    assert told([" it is"], prompt_end=begun) == Parts("", " it is")
    begun = "<|start|>assistant<|channel|>analysis<|message|>"
    assert told([f"Hm<|end|>{NEXT}<|channel|>final<|message|>Hi"], prompt_end=begun) == Parts(
        "Hm", "Hi"
    )
    assert (
        told([CASES["an answer"][0]], prompt_end="x<|end|><|start|>assistant")
        == (CASES["an answer"][1])
    )


def test_without_tools_a_call_is_content() -> None:
    parser = parser_for(HARMONY_THOUGHTS, None, prompt_end="<|start|>assistant")
    parts = parser.push(CASES["a call"][0], end=True)
    assert (parts.reasoning, parts.content, parts.calls) == ("I think.", ONE, ())


def test_what_it_writes_it_reads() -> None:
    made = [F1, call("g", text='<b> "x"\n')]
    assert read_harmony(HARMONY.write(made)) == made
    source = "<|channel|>{{ analysis }}<|message|>"
    assert thoughts_in(source) == HARMONY_THOUGHTS


def test_the_first_piece_of_a_call_has_its_name() -> None:
    parser = HarmonyParser(calls=True)
    assert parser.push("<|channel|>commentary to=functions.f<|mess") == Parts()
    assert parser.push('age|>{"a"').calls == (F1._replace(arguments='{"a"'),)
    assert parser.push(": 1}<|ca").more == ": 1}"
    assert parser.push("ll|>") == Parts()
