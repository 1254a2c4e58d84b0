"""`readable`: valid text of what the locale cannot decode, such as the bytes of a path"""

from __future__ import annotations


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
