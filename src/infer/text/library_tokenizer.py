"""The `tokenizers` library's object for a checkpoint's text files, and what grammars need of it.

`Tokenizer` is made from it. An engine's process needs no more than `read_vocabulary`, which has no
templates and no second tokenizer for callers' text.
"""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers

from infer.errors import LoadError
from infer.files import reading
from infer.text.checkpoint_text import TextFiles
from infer.text.grammars.compiler import Vocabulary
from infer.text.grammars.token_pieces import token_pieces

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def library_tokenizer(
    files: TextFiles, built: tokenizers.Tokenizer | None = None
) -> tokenizers.Tokenizer:
    """The library's tokenizer for these files, with the same additions as transformers makes.

    `built`: that of their `tokenizer_json`, if it is not to be read from there.
    """
    try:
        tokenizer = built or tokenizers.Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise LoadError(
            f"tokenizer.json cannot be used with tokenizers {tokenizers.__version__}: {error}"
        ) from None
    # Some checkpoints have these settings left from training; prompts are not cut or padded here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(**{name: token[name] for name in _TOKEN_FIELDS if name in token})
            for token in files.added_tokens
            if token["content"] not in known
        ]
    )
    special = (*files.named_tokens.values(), *files.extra_special_tokens)
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(content, special=True, normalized=False)
            for content in dict.fromkeys(special)
            if content not in known or not known[content].special
        ]
    )
    return tokenizer


def end_token_ids(files: TextFiles, vocab: Mapping[str, int]) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, config.json and the tokenizer, in this
    order. `vocab`: the id of each token."""
    ends = (*files.eos_token_ids, vocab.get(files.named_tokens.get("eos_token", "")))
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def read_vocabulary(files: TextFiles, num_logits: int) -> Vocabulary:
    """The vocabulary for grammars of a model with this number of logits, as `Vocabulary.of` has it.

    Raises `LoadError` if the files are malformed.
    """
    with reading("the tokenizer"):
        tokenizer = library_tokenizer(files, files.built)
        vocab = tokenizer.get_vocab()
        ends = end_token_ids(files, vocab)
        pieces = token_pieces(tokenizer, vocab)
        known = tokenizer.to_str() if pieces is None else pieces
        return Vocabulary(known, max(vocab.values(), default=-1) + 1, ends, num_logits)
