"""What each token id stands for: bytes, or a piece of text, read off the checkpoint's decoder.

`pieces_for` looks at the decoder of a `tokenizer.json` and gives the table class that computes
exactly what that decoder does with one token, or None for a decoder it does not know; such
checkpoints are decoded through the `tokenizers` library only. Entries are computed when first
needed and then kept (a benign race: two threads would store the same value). Used by the
tokenizer (logprobs) and the detokenizers (streams); holds no state of any generation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNSET = object()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character per byte: Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(0x100) if byte not in printable)
    alphabet.update({chr(0x100 + offset): byte for offset, byte in enumerate(moved)})
    return alphabet


class ByteLevelPieces:
    """Byte-level BPE: every token is a string of bytes, not necessarily whole characters."""

    def __init__(
        self, token_of: Callable[[int], str | None], size: int, special_ids: frozenset[int]
    ) -> None:
        self.special_ids = special_ids
        self._token_of = token_of
        self._known: list[bytes | None] = [None] * size
        self._alphabet = _byte_alphabet()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that does not exist, as in the decoder."""
        if not 0 <= token_id < len(self._known):
            return b""
        known = self._known[token_id]
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token, which is written as it is
            return token.encode("utf-8")

    def text_of(self, token_id: int) -> str:
        """As text on its own, U+FFFD for bytes that are only a part of a character."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


class FallbackPieces:
    """Sentencepiece-like: a token is a piece of text, or (`<0xE6>`) one byte of a character."""

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        size: int,
        special_ids: frozenset[int],
        *,
        replacements: Sequence[tuple[str, str]],
        first_replacements: Sequence[tuple[str, str]],
        byte_fallback: bool,
        strip_char: str = "",
        strip_count: int = 0,
    ) -> None:
        self.special_ids = special_ids
        self.strip_char = strip_char
        self.strip_count = strip_count if strip_char else 0
        """up to so many `strip_char` are taken off the start of the whole text"""
        self._token_of = token_of
        self._replacements = replacements
        self._first_replacements = first_replacements
        self._byte_fallback = byte_fallback
        self._known: list[Any] = [_UNSET] * size

    def piece_of(self, token_id: int) -> str | int | None:
        """Text of a token that is not the first, or its byte as a number, or None: no such id."""
        if not 0 <= token_id < len(self._known):
            return None
        known = self._known[token_id]
        if known is _UNSET:
            known = self._known[token_id] = self._look_up(token_id, self._replacements)
        return known  # type: ignore[no-any-return]

    def first_text_of(self, token_id: int) -> str:
        """Text of a token that is the first of all (and not a byte)."""
        piece = self._look_up(token_id, self._first_replacements)
        return piece if isinstance(piece, str) else ""

    def _look_up(self, token_id: int, replacements: Sequence[tuple[str, str]]) -> str | int | None:
        token = self._token_of(token_id)
        if token is None:
            return None
        for old, new in replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match.group(1), 16)
        return token

    def text_of(self, token_id: int) -> str:
        """As text on its own, U+FFFD for a byte that is only a part of a character."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text."""
        piece = self.piece_of(token_id)
        if isinstance(piece, int):
            return bytes([piece])
        return (piece or "").encode("utf-8")


Pieces = ByteLevelPieces | FallbackPieces


def pieces_for(
    decoder: Mapping[str, Any] | None,
    token_of: Callable[[int], str | None],
    size: int,
    special_ids: frozenset[int],
) -> Pieces | None:
    """The table for a decoder as it is written in `tokenizer.json`; None if it is another kind."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return ByteLevelPieces(token_of, size, special_ids)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        first = "" if steps[0].get("prepend_scheme", "always") != "never" else " "
        return FallbackPieces(
            token_of,
            size,
            special_ids,
            replacements=[(mark, " ")],
            first_replacements=[(mark, first)],
            byte_fallback=False,
        )
    return _fallback_pieces(steps, token_of, size, special_ids)


def _fallback_pieces(
    steps: Sequence[Mapping[str, Any]],
    token_of: Callable[[int], str | None],
    size: int,
    special_ids: frozenset[int],
) -> FallbackPieces | None:
    """Replace* ByteFallback? (Fuse Strip-left?)? in this order; other orders mean other texts."""
    remaining = list(steps)
    replacements: list[tuple[str, str]] = []
    while remaining and remaining[0]["type"] == "Replace":
        step = remaining.pop(0)
        if set(step["pattern"]) != {"String"}:  # a regular expression is left to the library
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(remaining) and remaining[0]["type"] == "ByteFallback"
    if byte_fallback:
        remaining.pop(0)
    strip_char, strip_count = "", 0
    if remaining and remaining[0]["type"] == "Fuse":
        remaining.pop(0)
        if remaining and remaining[0]["type"] == "Strip" and remaining[0]["stop"] == 0:
            step = remaining.pop(0)
            strip_char, strip_count = step["content"], step["start"]
    if remaining or not (replacements or byte_fallback):
        return None
    return FallbackPieces(
        token_of,
        size,
        special_ids,
        replacements=replacements,
        first_replacements=replacements,
        byte_fallback=byte_fallback,
        strip_char=strip_char,
        strip_count=strip_count,
    )
