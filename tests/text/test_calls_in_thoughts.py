"""Calls inside of reasoning that the model has not closed, and what only mentions a call there."""

from __future__ import annotations

from typing import Any

import pytest

from infer.text.answer_parser import Parts, parser_for
from infer.text.tools.formats import HERMES, THOUGHTS, format_named
from tests.support.tool_answers import HERMES_ONE, call, told_apart

QWEN = format_named("qwen3-coder")
ONE = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
F1 = call(a=1)
TOOLS = {"f": {"properties": {"a": {"type": "integer"}}}}
ROWS: list[tuple[Any, str, Parts]] = [
    (QWEN, f"I call it.\n{ONE}", Parts("I call it.", "", (F1,))),
    (QWEN, ONE, Parts("", "", (F1,))),
    (QWEN, f"Hm.\n\n  {ONE}\n{ONE}\n", Parts("Hm.", "", (F1, F1))),
    (QWEN, f"Hm.\n{ONE}\n</think>\n\nDone.", Parts("Hm.", "Done.", (F1,))),
    (QWEN, f"I could write {ONE} here.</think>No.", Parts(f"I could write {ONE} here.", "No.")),
    (QWEN, "Use <tool_call> now.\n</think>No.", Parts("Use <tool_call> now.", "No.")),
    (QWEN, "So:\n<tool_call> is a mark.</think>No.", Parts("So:\n<tool_call> is a mark.", "No.")),
    (QWEN, f"So:\n{ONE.replace('=f', '=h')}</think>No.",
     Parts(f"So:\n{ONE.replace('=f', '=h')}", "No.")),
    (QWEN, "So <tool", Parts("So <tool")),
    (QWEN, f"Hm.\n{ONE[ONE.index('<function'):]}", Parts("Hm.", "", (F1,))),
    (HERMES, f"I call it.\n{HERMES_ONE}", Parts("I call it.", "", (F1,))),
    (HERMES, f"A call is {HERMES_ONE}</think>No.", Parts(f"A call is {HERMES_ONE}", "No.")),
    (None, f"Hm.\n{ONE}</think>No.", Parts(f"Hm.\n{ONE}", "No.")),
]  # fmt: skip


@pytest.mark.parametrize(("way", "text", "parts"), ROWS)
@pytest.mark.parametrize("opened", [False, True])
def test_a_call_at_a_lines_start_is_one(way: Any, text: str, parts: Parts, opened: bool) -> None:
    text = text if opened else f"<think>\n{text}"
    for pieces in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        assert told_apart(pieces, way, names=TOOLS, inside=opened) == parts


@pytest.mark.parametrize("thoughts", THOUGHTS, ids=lambda thoughts: thoughts.opening)
def test_all_marks_of_reasoning(thoughts: Any) -> None:
    answer = f"{thoughts.opening}hm{thoughts.closing}\n\nHi."
    for prompt_end, said in (
        ("<assistant>", answer),
        (f"<assistant>{thoughts.opening}", answer.removeprefix(thoughts.opening)),
    ):
        for pieces in ([said], list(said)):
            parser = parser_for(thoughts, None, prompt_end=prompt_end)
            given = [parser.push(piece) for piece in pieces] + [parser.push("", end=True)]
            assert "".join(parts.reasoning for parts in given) == "hm"
            assert "".join(parts.content for parts in given).strip() == "Hi."
    assert thoughts.are_around("hm", f"x{answer}")
    assert not thoughts.are_around("hm", "x hm y")
