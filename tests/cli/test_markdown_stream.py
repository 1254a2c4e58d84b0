"""`MarkdownStream`: the same at every split, no word cut, nothing of the text lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from infer.cli.markdown_stream import MarkdownStream

PIECES = st.sampled_from(
    [*"ab *_`#>-1.\n", "**", "```", "\n\n", "# ", "- ", "word", "中文", "😀", "  ", "snake_case"]
)
ESCAPES = re.compile(r"\x1b\[\d+m")


def shown(pieces: list[str], width: int = 30, *, styled: bool = True) -> str:
    written: list[str] = []
    stream = MarkdownStream(written.append, width, styled=styled)
    for piece in pieces:
        stream.add(piece)
    stream.close()
    return "".join(written)


@given(st.lists(PIECES, max_size=60), st.booleans())
@example(["```", "\n\n", "```", "  "], False)  # blanks behind the end of a block of code
def test_every_split_gives_the_same_and_no_line_is_too_wide(
    pieces: list[str], styled: bool
) -> None:
    text = "".join(pieces)
    whole = shown([text], styled=styled)
    assert shown(list(text), styled=styled) == whole
    assert shown(pieces, styled=styled) == whole
    for line in whole.split("\n"):
        assert cell_len(ESCAPES.sub("", line)) <= 30
    assert whole.endswith("\n") or not text


@given(st.lists(PIECES, max_size=60))
def test_without_styles_only_blanks_change(pieces: list[str]) -> None:
    """Lines are broken between words; words are cut where one is wider than the terminal."""
    text = "".join(pieces)
    assert "".join(shown(pieces, styled=False).split()) == "".join(text.split())


@given(st.lists(PIECES, max_size=60))
def test_each_style_ends(pieces: list[str]) -> None:
    found = ESCAPES.findall(shown(pieces))
    assert not found or found[-1] == "\x1b[0m"
    for line in shown(pieces).split("\n"):
        assert not (codes := ESCAPES.findall(line)) or codes[-1] == "\x1b[0m" or "\x1b" in line


def test_what_marks_become() -> None:
    text = (
        "# A **bold** head\n- *so* and `x*y` and 2 * 3, a_b_c\n```c\nint *p;\n```\nend **open\nnext"
    )
    assert shown([text], 80).split("\n") == [
        "\x1b[1mA \x1b[1mbold\x1b[0m\x1b[1m head\x1b[0m",
        "• \x1b[3mso\x1b[0m and \x1b[36mx*y\x1b[0m and 2 * 3, a_b_c",
        "\x1b[2m```c\x1b[0m",
        "int *p;",
        "\x1b[2m```\x1b[0m",
        "end \x1b[1mopen\x1b[0m",
        "next",
        "",
    ]


def test_a_word_moves_to_the_next_line_whole_with_the_indent_of_its_item() -> None:
    assert shown(["- one two three four five six"], 20, styled=False).split("\n") == [
        "- one two three four",
        "  five six",
        "",
    ]


def test_words_come_when_they_end_and_wide_characters_at_once() -> None:
    written: list[str] = []
    stream = MarkdownStream(written.append, 40, styled=True)
    stream.add("The answer is beg")
    assert "".join(written) == "The answer is"
    stream.add("inning now. ")
    assert "".join(written) == "The answer is beginning now."
    stream.add("\n这是一个句子")
    assert "".join(written).endswith("这是一个句子")


@pytest.mark.parametrize("hostile", ["\x1b]52;c;QQ==\x07", "\x1b[2J", "\u202eabc", "\r", "\x00"])
def test_no_escape_sequence_of_a_text_reaches_the_terminal(hostile: str) -> None:
    for text in (f"{hostile}!", f"a {hostile} b\n", f"```\n{hostile}!\n```\n"):
        left = ESCAPES.sub("", shown(list(text), 200))
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", left)
        assert "\\x" in left or "\\u" in left


def test_time_grows_with_the_text_and_not_with_its_square() -> None:
    """A long line without a blank, and many lines, are read once each."""
    written: list[str] = []
    stream = MarkdownStream(written.append, 80, styled=True)
    for _ in range(20_000):
        stream.add("aaaaaaaaaa")
    stream.close()
    assert "".join("".join(written).split()) == "a" * 200_000
