"""Text of others in a terminal: as it is read, without markup, colours or orders to the terminal.

What a model writes, what a file is called and what a server answers may hold rich's markup, escape
sequences that move the cursor, set the title or the clipboard, and characters that turn the
direction of writing. Everything the command line prints of data goes through `visible` or `plain`.
"""

from __future__ import annotations

import re
import sys

from rich.console import Console
from rich.text import Text

# Controls but for tab and line feed; marks and overrides of direction; line separators.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    """With control characters written out: U+001B is `\\x1b`. Each character by itself, so that
    pieces of a stream may be given one after the other."""
    return _HIDDEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def plain(text: object, style: str = "") -> Text:
    """For rich: the text in one style, whatever stands in it."""
    return Text(visible(str(text)), style=style)


def write(text: str) -> None:
    """To stdout, at once; as it is where stdout is a file or a pipe."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(console: Console, text: object, style: str = "dim") -> None:
    """A line beside the output."""
    console.print(plain(text, style), highlight=False, soft_wrap=True)
