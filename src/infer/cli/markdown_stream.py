"""`MarkdownStream`: an answer in a terminal while it is written, with its marks shown as styles"""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

from infer.cli.plain import visible

_BLOCK = re.compile(r"(\s*)(#{1,6} |[-*+] |> |\d{1,3}[.)] )?")
_MARK = re.compile(r"\*\*|__|`|\*|(?<!\w)_|_(?!\w)")
_BREAK = re.compile(r"[ \t]+|\n|[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60]")
_ON = {
    "heading": "\x1b[1m",
    "bold": "\x1b[1m",
    "emphasis": "\x1b[3m",
    "code": "\x1b[36m",
    "fence": "\x1b[2m",
}
_OFF = "\x1b[0m"
_STYLE_OF = {"**": "bold", "__": "bold", "*": "emphasis", "_": "emphasis", "`": "code"}
LONGEST_MARK = 7
"""Characters with which a line says what it is: a heading of the sixth level."""
MAX_HELD = 4096
"""Characters of a word without an end after which it is shown as far as it has come."""


class MarkdownStream:
    """Text goes out word by word, so no word is cut at the terminal's edge, and nothing that was
    shown changes afterwards. Of Markdown it knows what answers have: headings, lists, quotes,
    blocks of code, bold, emphasis, code in a line. A mark without its partner ends with its line.
    Without styles the text keeps its marks, and lines are only broken between words."""

    def __init__(self, write: Callable[[str], object], width: int, *, styled: bool) -> None:
        """`write` shows text at once; `width`: columns of the terminal; `styled`: whether it may
        get escape sequences of styles."""
        self._write, self._width, self._styled = write, max(20, width), styled
        self._held = ""
        self._column = 0
        self._indent = 0
        """Columns with which a line goes on that is broken."""
        self._at_start = True
        """Whether nothing of the current line has been read."""
        self._space = ""
        """Blanks between the last word and the next one, which may be broken here."""
        self._styles: list[str] = []
        self._in_fence = False
        self._is_fence = False
        """Whether the current line begins or ends a block of code."""

    def add(self, text: str) -> None:
        """Show what can be shown of the text so far."""
        self._held += visible(text)
        self._go_on()

    def close(self) -> None:
        """Show the rest, and end the line."""
        self._go_on(is_last=True)
        self._end_styles()
        if self._column or not self._at_start:
            self._write("\n")
        self._column, self._at_start = 0, True

    @property
    def _is_code(self) -> bool:
        """Whether the line is one of a block of code, its fences included."""
        return self._in_fence or self._is_fence

    def _go_on(self, *, is_last: bool = False) -> None:
        while self._held:
            end = self._next_end()
            if end is None and is_last:
                end = len(self._held)
            if end is None:
                return
            piece, self._held = self._held[:end], self._held[end:]
            self._show(piece)

    def _next_end(self) -> int | None:
        """Where the next piece ends: a line feed, a word, blanks, the beginning of a line as far as
        it says what the line is; None: more must come."""
        held = self._held
        if held[0] == "\n":
            return 1
        if self._at_start:
            line, newline, _ = held.partition("\n")
            begun = line.lstrip()
            is_long = len(begun) > LONGEST_MARK or _BREAK.search(begun) is not None
            return len(line) if newline or is_long else None
        if self._is_code:
            return held.index("\n") if "\n" in held else len(held)
        match = _BREAK.search(held)
        if match is None:
            return len(held) if len(held) > MAX_HELD else None
        is_wide = match[0][0] not in " \t\n"  # a line may be broken behind each of these
        return match.end() if is_wide or not match.start() else match.start()

    def _show(self, piece: str) -> None:
        if piece == "\n":
            self._end_line()
        elif self._at_start:
            self._begin_line(piece)
        elif self._is_code:
            self._put(piece)
        elif piece[0] in " \t":
            self._space += piece
        else:
            self._word(piece)

    def _end_line(self) -> None:
        self._end_styles()
        self._write("\n")
        self._column, self._indent, self._at_start, self._space = 0, 0, True, ""

    def _begin_line(self, text: str) -> None:
        """The beginning of a line: its fence, heading, bullet or quote, then its words."""
        self._at_start = False
        self._is_fence = text.lstrip().startswith("```")
        if self._is_fence:
            self._in_fence = not self._in_fence
            self._begin("fence")
            self._put(text)
            return
        if self._in_fence:
            self._put(text)
            return
        match = _BLOCK.match(text)
        assert match is not None  # it may be empty
        blank, mark = match[1], match[2] or ""
        rest = text[match.end() :]
        self._put(blank)
        if mark.startswith("#"):
            self._begin("heading")
            if not self._styled:
                self._put(mark)
        elif mark:
            self._put("• " if mark[0] in "-*+" and self._styled else mark)
        self._indent = min(self._column, self._width // 2) if not mark.startswith("#") else 0
        self._held = rest + self._held

    def _word(self, word: str) -> None:
        columns = cell_len(_MARK.sub("", word) if self._styled else word)
        if self._column + len(self._space) + columns > self._width and self._column > self._indent:
            self._write("\n" + " " * self._indent)
            self._column, self._space = self._indent, ""
        space, self._space = self._space, ""
        self._put(space)
        at = 0
        for mark in _MARK.finditer(word) if self._styled else ():
            style = _STYLE_OF[mark[0]]
            if "code" in self._styles and style != "code":
                continue
            if style not in self._styles and not self._opens(word, mark):
                continue
            self._put(word[at : mark.start()])
            at = mark.end()
            self._toggle(style)
        self._put(word[at:])

    def _opens(self, word: str, mark: re.Match[str]) -> bool:
        """Whether a mark can begin a style, as in `*so*` and not in `2 * 3`."""
        return mark.end() < len(word)

    def _toggle(self, style: str) -> None:
        if style in self._styles:
            self._styles.remove(style)
            self._write(_OFF + "".join(_ON[shown] for shown in self._styles))
        else:
            self._begin(style)

    def _begin(self, style: str) -> None:
        if self._styled:
            self._styles.append(style)
            self._write(_ON[style])

    def _end_styles(self) -> None:
        if self._styles:
            self._styles.clear()
            self._write(_OFF)

    def _put(self, text: str) -> None:
        """Show text; where it is wider than the line it goes on in the next one."""
        for part in _fitting(text, self._width - self._column, self._width):
            if part == "\n":
                self._column = 0
            else:
                self._column += cell_len(part)
            self._write(part)


def _fitting(text: str, room: int, width: int) -> list[str]:
    """The text in parts that fit, with a line feed between them."""
    parts: list[str] = []
    part, columns = "", 0
    for character in text:
        wide = cell_len(character)
        if columns + wide > room:
            parts += [part, "\n"] if part or not parts else ["\n"]
            part, columns, room = "", 0, width
        part += character
        columns += wide
    return [part_of_word for part_of_word in [*parts, part] if part_of_word]
