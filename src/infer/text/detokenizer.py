"""Incremental detokenizers: a stream of token ids becomes a stream of final pieces of text.

Invariant: the pieces from `push` are together a prefix of the text that decoding all ids at once
gives, and with the piece from `finish` they are equal to it. So text that a later token could
change is held back. That is an incomplete UTF-8 character. With byte-fallback tokenizers it is a
whole run of byte tokens, because their decoder replaces all bytes of a run if one is invalid.
`pieces_for` derives the text of each token from the checkpoint's decoder, once for all streams.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = "<0x([0-9A-Fa-f]{2})>"
TokenOf = Callable[[int], str | None]
"""Function from a token id to the token as the vocabulary spells it; None: no such id."""


class ByteLevelPieces:
    """The bytes of each token of byte-level BPE; they need not be whole characters."""

    def __init__(self, token_of: TokenOf) -> None:
        # GPT-2 writes each byte as a printable character: that of Latin-1 or one from U+0100 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        moved = [byte for byte in range(0x100) if byte not in printable]
        self._alphabet = {chr(byte): byte for byte in printable}
        self._alphabet |= {chr(0x100 + offset): byte for offset, byte in enumerate(moved)}
        self._token_of = token_of
        self.bytes_of: Callable[[int], bytes] = functools.cache(self._look_up)

    def _look_up(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token, which is not written in that alphabet
            return token.encode("utf-8")


class FallbackPieces:
    """The text or byte of each token of a sentencepiece-like vocabulary.

    A token is a piece of text, or one byte of a character (`<0xE6>`).
    """

    def __init__(self, token_of: TokenOf, steps: Sequence[Mapping[str, Any]]) -> None:
        """`steps`: the decoders of `tokenizer.json`, in order."""
        by_kind = {step["type"]: step for step in steps}
        self._token_of = token_of
        self._replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace"
        ]
        self._first_without = ""
        if metaspace := by_kind.get("Metaspace"):
            self._replacements = [(metaspace["replacement"], " ")]
            if metaspace.get("prepend_scheme") != "never":
                self._first_without = metaspace["replacement"]
        self._byte_token = re.compile(_BYTE_TOKEN if "ByteFallback" in by_kind else "(?!)")
        strip = by_kind.get("Strip", {"content": "", "start": 0})
        self.strip: tuple[str, int] = (strip["content"], strip["start"])
        """A character, and how many of it are removed at most from the start of the text."""
        self.piece_of: Callable[[int, bool], str | bytes | None] = functools.cache(self._look_up)
        """(token id, whether it is the text's first) → its text or its byte; None: no such id."""

    def _look_up(self, token_id: int, first: bool) -> str | bytes | None:
        token = self._token_of(token_id)
        if token is None:
            return None
        if first:
            token = token.replace(self._first_without, "")
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = self._byte_token.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token that is not the first of a text."""
        piece = self.piece_of(token_id, False) or b""
        return piece.encode("utf-8") if isinstance(piece, str) else piece


def pieces_for(
    decoder: Mapping[str, Any] | None, token_of: TokenOf
) -> ByteLevelPieces | FallbackPieces | None:
    """The text of each token for a decoder of `tokenizer.json`.

    None for a decoder that only the `tokenizers` library can apply.
    """
    steps: list[Any] = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        steps = decoder["decoders"]
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return ByteLevelPieces(token_of)
    # The order matters: decoders in another order give another text.
    known = "Metaspace|Replace( Replace)*( ByteFallback)?( Fuse( Strip)?)?"
    for step in steps:
        if step.get("stop") or "Regex" in step.get("pattern", ()):
            return None  # it strips the end of the text, or needs a search in it
    return FallbackPieces(token_of, steps) if re.fullmatch(known, kinds) else None


class IncrementalDetokenizer(Protocol):
    """The text of one generation. It serves one generation and cannot be used after `finish`."""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now, often one token behind."""

    def finish(self) -> str:
        """End the text; returns what was held back, with U+FFFD for incomplete characters."""


class ByteLevelDetokenizer:
    """The detokenizer of byte-level BPE: the text is the UTF-8 of all tokens' bytes. Exact."""

    def __init__(self, pieces: ByteLevelPieces, skipped: frozenset[int]) -> None:
        """`skipped`: ids of tokens that have no text."""
        self._bytes_of = pieces.bytes_of
        self._skipped = skipped
        # Python's decoder and that of `tokenizers` both replace each maximal subpart of an
        # ill-formed sequence by one U+FFFD (Unicode, chapter 3, "U+FFFD Substitution").
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class FallbackDetokenizer:
    """The detokenizer of sentencepiece-like vocabularies with single-byte tokens. Exact."""

    def __init__(self, pieces: FallbackPieces, skipped: frozenset[int]) -> None:
        """`skipped`: ids of tokens that have no text."""
        self._piece_of = pieces.piece_of
        self._skipped = skipped
        self._at_start = True  # no token has been taken yet
        self._run = bytearray()  # bytes of the byte tokens since the last other token
        self._strip_char, self._strip_left = pieces.strip

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._piece_of(token_id, self._at_start)
        if piece is None:
            return ""  # the token is removed before decoding, so it does not end a run of bytes
        self._at_start = False
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._end_run(piece) if self._run or self._strip_left else piece

    def finish(self) -> str:
        return self._end_run("")

    def _end_run(self, text: str) -> str:
        try:
            text = self._run.decode("utf-8") + text
        except UnicodeDecodeError:  # the library's decoder replaces all bytes of the run too
            text = _REPLACEMENT * len(self._run) + text
        self._run.clear()
        while self._strip_left and text.startswith(self._strip_char):
            text = text[1:]
            self._strip_left -= 1
        if text:  # the first other character ends the stripping
            self._strip_left = 0
        return text


class WindowDetokenizer:
    """The detokenizer for any other decoder: with each token it decodes a short window again.

    It is exact if the text of a token depends only on the token before it (WordPiece). A decoder
    that looks back further cannot be streamed.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        """`skipped`: ids of tokens that have no text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._anchor = 0  # number of tokens at the window's start whose text has been returned
        self._given = ""  # the text of these tokens

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode()
        is_incomplete = text.endswith(_REPLACEMENT) or len(text) < len(self._given)
        return "" if is_incomplete else self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode()) if self._window else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        del self._window[: self._anchor]
        self._anchor = len(self._window)
        self._given = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def make_detokenizer(
    pieces: ByteLevelPieces | FallbackPieces | None,
    tokenizer: tokenizers.Tokenizer,
    skipped: frozenset[int],
) -> IncrementalDetokenizer:
    """The detokenizer of one generation; `skipped`: ids of tokens that have no text."""
    if isinstance(pieces, ByteLevelPieces):
        return ByteLevelDetokenizer(pieces, skipped)
    if pieces is not None:
        return FallbackDetokenizer(pieces, skipped)
    return WindowDetokenizer(tokenizer, skipped)
