"""`token_pieces`: the bytes of a vocabulary's tokens, as llguidance has them.

llguidance reads them from the tokenizer's JSON, which takes ten times as long, with the
interpreter's lock, and ends in a panic where a token is named like a byte. It is asked only about
tokenizers of other kinds than the two that nearly all models have: bytes that stand for themselves
as letters (GPT-2's alphabet), and pieces of text with names for single bytes (sentencepiece).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import tokenizers

_NAMED_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_NEVER_A_BYTE = b"\xff"
"""A byte that no text has; llguidance marks special tokens with it."""
_NO_LETTER = 0x10FFFF


class TokenPieces(NamedTuple):
    """A vocabulary's tokens by their ids, without holes."""

    pieces: list[bytes]
    """The bytes of each; the name of a special one."""
    special: list[int]
    """Ids of the tokens that stand for no text."""


def token_pieces(tokenizer: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> TokenPieces | None:
    """The pieces of all tokens of `vocab`, which is `tokenizer.get_vocab()`; None for a kind of
    tokenizer that is not known here."""
    piece_of = _reader(tokenizer)
    size = max(vocab.values(), default=-1) + 1
    if piece_of is None or size > 2 * len(vocab):  # ids may be any numbers
        return None
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special or _is_marked(token.content)}
    pieces = [b""] * size
    for token, i in vocab.items():
        piece = token.encode() if i in special else piece_of(token)
        if piece is None or piece == b"":
            if i not in added:
                return None
            piece = token.encode()
        elif piece == _NEVER_A_BYTE:
            piece = b""
            special.add(i)
        pieces[i] = piece
    for hole in set(range(size)).difference(vocab.values()):
        pieces[hole] = name_of_hole(hole)
        special.add(hole)
    return TokenPieces(pieces, sorted(special))


def name_of_hole(token_id: int) -> bytes:
    """What an id without a token is called."""
    return b"<[%d]>" % token_id


def _is_marked(content: str) -> bool:
    """Whether llguidance takes an added token for a special one by its name."""
    return content.startswith("<") and content.endswith(">")


def _reader(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes | None] | None:
    """What gives the bytes of a token that stands for text; its result is None where the token
    cannot be read. By the tokenizer's decoder."""
    decoder = tokenizer.decoder
    decoder_fields = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = decoder_fields.get("decoders", [decoder_fields])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and "ByteFallback" not in kinds:
        return _of_letters
    if "ByteFallback" in kinds and "ByteLevel" not in kinds:
        spaces = [
            step["pattern"]["String"]
            for step in steps
            if step.get("type") == "Replace" and step.get("content") == " "
            if "String" in step["pattern"]
        ]
        if len(spaces) == 1:
            return lambda token: _of_text(token, spaces[0])
    return None


def _of_letters(token: str) -> bytes | None:
    try:
        return token.translate(_BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _of_text(token: str, space: str) -> bytes:
    if token.startswith("<0x") and (named := _NAMED_BYTE.fullmatch(token)):
        return bytes([int(named[1], 16)])
    return token.replace(space, " ").encode()


def _byte_of_letter() -> dict[int, int]:
    """The byte that each letter of GPT-2's alphabet stands for: printable ones for themselves, the
    others in their order for the letters from U+0100 on. Other letters of Latin-1 are none."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, _NO_LETTER) | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
