"""Text that others wrote, shown in a terminal as it is: no markup, colours or escape sequences.

What a model writes, the name of a file and the answer of a server may hold rich's markup, escape
sequences that move the cursor or set the title or the clipboard, and characters that change the
direction of writing. All data that the command line prints goes through `visible` or `plain`.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from infer.readable_text import readable

# Control characters except tab and line feed; direction marks and overrides; line separators.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    """The readable text with control characters written out: U+001B becomes `\\x1b`.

    Each character is replaced by itself, so a stream may be given in pieces.
    """
    return _HIDDEN.sub(_written_out, readable(text))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def plain(text: object, style: str = "") -> Text:
    """The text for rich, in one style, whatever it contains."""
    return Text(visible(str(text)), style=style)


def write(text: str) -> None:
    """Write to stdout at once. A terminal gets `visible` text, a file or pipe the text itself."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_any_text() -> None:
    """Let stdout and stderr write each text: what the locale's encoding lacks as `\\u2014`.

    rich draws its boxes in ASCII where the encoding is not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="backslashreplace")


def note(console: Console, text: object, style: str = "dim") -> None:
    """Print a line that is not part of the output."""
    print_line(console, plain(text, style))


def print_line(console: Console, line: Text) -> None:
    """Print a line of any length. A terminal gets it in rows of whole words; a word that is longer
    than a row, such as a path, stays whole, so that it can be copied."""
    rows = [line]
    if console.is_terminal:
        lines = line.split("\n", allow_blank=True)
        rows = [row for text_line in lines for row in _rows(text_line, console.width)]
    for row in rows:
        console.print(row, highlight=False, soft_wrap=True)


def _rows(line: Text, width: int) -> Iterator[Text]:
    """A line cut between its words into rows of `width` columns."""
    ends, room = [], width
    for word in re.finditer(r"\s*\S+", line.plain):
        room -= cell_len(word[0])
        if room < 0 and word.start():
            ends.append(word.start())
            room = width - cell_len(word[0].lstrip())
    for number, row in enumerate(line.divide(ends)):
        spaces = len(row.plain) - len(row.plain.lstrip()) if number else 0
        yield row[spaces:] if spaces else row
