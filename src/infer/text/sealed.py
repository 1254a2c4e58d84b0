"""The second tokenizer of a checkpoint: one that text cannot talk into a control token.

Same vocabulary, same ids, same rules, but control tokens go by sealed names: private-use characters
with a random part, which no text contains. Plain text encoded with it becomes ordinary tokens
whatever it spells, also where a vocabulary lists `</s>` among its pieces (the library's own
`encode_special_tokens` flag, which is moreover shared mutable state, misses that case), and the
control tokens a template means can still be written, by their sealed names, in the same text.
Built once per checkpoint by `Tokenizer.from_folder`; only ever used to encode.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

_PRIVATE_USE = 0xF0000  # plane 15: 65 534 characters that normalizers leave alone
_PLANE_SIZE = 0xFFFE
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def control_literals(tokens: Iterable[str]) -> list[str]:
    """Those among special tokens that are a matter of control.

    Some checkpoints flag white space or the byte tokens special too; sealing these would keep
    text from using them.
    """
    return sorted(
        token
        for token in set(tokens)
        if token and not token.isspace() and not _BYTE_TOKEN.fullmatch(token)
    )


def sealed_names_for(literals: Iterable[str]) -> dict[str, str]:
    """A name for each literal: 64 random bits, then a number. All of the same length."""
    nonce = "".join(chr(_PRIVATE_USE + secrets.randbelow(_PLANE_SIZE)) for _ in range(4))
    return {
        literal: f"{nonce}{chr(_PRIVATE_USE + index % _PLANE_SIZE)}"
        f"{chr(_PRIVATE_USE + index // _PLANE_SIZE)}"
        for index, literal in enumerate(literals)
    }


def sealed_tokenizer(
    description: dict[str, Any], sealed_names: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """The tokenizer of a parsed `tokenizer.json` with the literals renamed; changes it in place."""
    for token in description["added_tokens"]:
        token["content"] = sealed_names.get(token["content"], token["content"])
    _rename_in_model(description["model"], sealed_names)
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge for merge in model["merges"] if not _makes_any(merge, prefix, names)
        ]


def _makes_any(merge: str | list[str], prefix: str, names: Mapping[str, str]) -> bool:
    """Whether a merge yields or uses one of the tokens (it then spells it out of text)."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right.removeprefix(prefix) in names
