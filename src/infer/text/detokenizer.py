"""From a stream of token ids to a stream of text, each piece of it final.

Invariant: what `push` gave so far is a prefix of what decoding all ids at once gives, and with
`finish` it is equal to it. So nothing is given that a later token could still change: an
incomplete UTF-8 character is held back, and with byte-fallback tokenizers the whole run of byte
tokens, because their decoder replaces all bytes of a run when any of them is invalid.
`Tokenizer.new_detokenizer` picks the class that fits the checkpoint's decoder; the output
processor pushes. What single tokens stand for is `pieces.py`'s; stop strings are `stop.py`'s.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

from infer.text.pieces import ByteLevelPieces, FallbackPieces

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """One generation's text. Not shared between generations, not reused after `finish`."""

    def push(self, token_id: int) -> str:
        """Takes the next token; gives the text that is now certain, often one token behind."""
        ...

    def finish(self) -> str:
        """No more tokens: gives what was held back, U+FFFD for what stayed incomplete."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE: each token is some bytes, and the text is their UTF-8. Exact."""

    def __init__(self, pieces: ByteLevelPieces, *, skip_special_tokens: bool) -> None:
        self._bytes_of = pieces.bytes_of
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        # Python's decoder and the one in `tokenizers` agree on what they replace by one U+FFFD:
        # each maximal part of an ill-formed sequence (Unicode chapter 3, as the web does it).
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class FallbackDetokenizer:
    """For sentencepiece-like vocabularies: a token is a piece of text or a single byte. Exact."""

    def __init__(self, pieces: FallbackPieces, *, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        self._run = bytearray()  # byte tokens since the last other one
        self._at_start = True  # no token was taken yet
        self._strip_left = pieces.strip_count  # leading characters that may still be stripped

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""  # left out before decoding, so it does not even end a run of bytes
        piece = self._pieces.piece_of(token_id)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if piece is None:
            return ""
        head = self._end_run() if self._run else ""
        if self._at_start:
            self._at_start = False
            piece = self._pieces.first_text_of(token_id)
        text = head + piece
        return self._strip(text) if self._strip_left else text

    def finish(self) -> str:
        text = self._end_run() if self._run else ""
        return self._strip(text) if self._strip_left else text

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        self._at_start = False
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)  # as the decoder does: all of them

    def _strip(self, text: str) -> str:
        while self._strip_left and text.startswith(self._pieces.strip_char):
            text = text[len(self._pieces.strip_char) :]
            self._strip_left -= 1
        if text:  # the first other character ends it
            self._strip_left = 0
        return text


class WindowDetokenizer:
    """For any other decoder: decodes a short window again with each token, and gives what grew.

    Exact as far as the text of a token depends only on the token before it (WordPiece, Metaspace,
    CTC-free decoders); a decoder that looks back further cannot be streamed.
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
        if text.endswith(_REPLACEMENT) or len(text) < len(self._given):
            return ""
        return self._advance(text)

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
