"""From a stream of token ids to a stream of text, each piece of it final.

Invariant: what `push` gave so far is a prefix of what decoding all ids at once gives, and with
`finish` it is equal to it. So nothing is given that a later token could still change: an
incomplete UTF-8 character is held back, and with byte-fallback tokenizers the whole run of byte
tokens, because their decoder replaces all bytes of a run when any of them is invalid. What one
token stands for, `pieces_for` reads off the checkpoint's decoder, once for all streams.
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
"""a token as the vocabulary spells it; None: there is no such id"""


class ByteLevelPieces:
    """Byte-level BPE: every token is a string of bytes, not necessarily whole characters."""

    def __init__(self, token_of: TokenOf) -> None:
        # GPT-2's one printable character per byte: Latin-1 as it is, the rest from U+0100 on.
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
        except KeyError:  # an added token, which is written as it is
            return token.encode("utf-8")


class FallbackPieces:
    """Sentencepiece-like: a token is a piece of text, or (`<0xE6>`) one byte of a character."""

    def __init__(self, token_of: TokenOf, steps: Sequence[Mapping[str, Any]]) -> None:
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
        """a character, and how many of it are taken off the start of the whole text at most"""
        self.piece_of: Callable[[int, bool], str | bytes | None] = functools.cache(self._look_up)
        """(id, is it the first token of all) → its text, or its byte, or None: no such id"""

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
        """The bytes of a token in the middle of a text."""
        piece = self.piece_of(token_id, False) or b""
        return piece.encode("utf-8") if isinstance(piece, str) else piece


def pieces_for(
    decoder: Mapping[str, Any] | None, token_of: TokenOf
) -> ByteLevelPieces | FallbackPieces | None:
    """What tokens stand for to a decoder of `tokenizer.json`; None: only the library knows."""
    steps: list[Any] = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        steps = decoder["decoders"]
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return ByteLevelPieces(token_of)
    # In this order only: other orders mean other texts.
    known = "Metaspace|Replace( Replace)*( ByteFallback)?( Fuse( Strip)?)?"
    for step in steps:
        if step.get("stop") or "Regex" in step.get("pattern", ()):
            return None  # takes off the end of the text, or searches in it
    return FallbackPieces(token_of, steps) if re.fullmatch(known, kinds) else None


class IncrementalDetokenizer(Protocol):
    """One generation's text. Not shared between generations, not reused after `finish`."""

    def push(self, token_id: int) -> str:
        """Takes the next token; gives the text that is now certain, often one token behind."""

    def finish(self) -> str:
        """No more tokens: gives what was held back, U+FFFD for what stayed incomplete."""


class ByteLevelDetokenizer:
    """For byte-level BPE: each token is some bytes, and the text is their UTF-8. Exact."""

    def __init__(self, pieces: ByteLevelPieces, skipped: frozenset[int]) -> None:
        self._bytes_of = pieces.bytes_of
        self._skipped = skipped
        # Python's decoder and the one in `tokenizers` agree on what they replace by one U+FFFD:
        # each maximal part of an ill-formed sequence (Unicode chapter 3, as the web does it).
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class FallbackDetokenizer:
    """For sentencepiece-like vocabularies: a token is a piece of text or a single byte. Exact."""

    def __init__(self, pieces: FallbackPieces, skipped: frozenset[int]) -> None:
        self._piece_of = pieces.piece_of
        self._skipped = skipped
        self._at_start = True  # no token was taken yet
        self._run = bytearray()  # byte tokens since the last other one
        self._strip_char, self._strip_left = pieces.strip

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._piece_of(token_id, self._at_start)
        if piece is None:
            return ""  # left out before decoding, so it does not even end a run of bytes
        self._at_start = False
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._after_run(piece) if self._run or self._strip_left else piece

    def finish(self) -> str:
        return self._after_run("")

    def _after_run(self, text: str) -> str:
        try:
            text = self._run.decode("utf-8") + text
        except UnicodeDecodeError:  # as the decoder does: all of them
            text = _REPLACEMENT * len(self._run) + text
        self._run.clear()
        while self._strip_left and text.startswith(self._strip_char):
            text = text[1:]
            self._strip_left -= 1
        if text:  # the first other character ends it
            self._strip_left = 0
        return text


class WindowDetokenizer:
    """For any other decoder: decodes a short window again with each token, and gives what grew.

    Exact as far as the text of a token depends only on the token before it (WordPiece); a decoder
    that looks back further cannot be streamed.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._anchor = 0  # how many tokens of the window are only there for what follows
        self._given = ""  # text of these

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode()
        unsettled = text.endswith(_REPLACEMENT) or len(text) < len(self._given)
        return "" if unsettled else self._advance(text)

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
    """For one generation; `skipped`: tokens that have no text."""
    if isinstance(pieces, ByteLevelPieces):
        return ByteLevelDetokenizer(pieces, skipped)
    if pieces is not None:
        return FallbackDetokenizer(pieces, skipped)
    return WindowDetokenizer(tokenizer, skipped)
