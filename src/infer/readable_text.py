"""`readable`: valid text of what the locale cannot decode, such as a path; `listing` of names"""

from __future__ import annotations

from collections.abc import Sequence


def readable(text: str) -> str:
    """The text as valid Unicode, for names and messages.

    Python reads the bytes of a path or an argument that the locale cannot decode as lone
    surrogates. They are read as UTF-8 here; what is none becomes U+FFFD.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def listing(names: Sequence[str]) -> str:
    """The first 12 names, each cut to 200 characters, and the number of the others."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{', '.join(f'{name:.200}' for name in names[:12])}{more}"
