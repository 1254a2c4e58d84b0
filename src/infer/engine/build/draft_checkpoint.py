"""`find_draft`: the checkpoint of the draft model, if the settings name one, and its vocabulary

A draft model proposes token ids, so it must have the model's vocabulary. Its number of logits may
differ, because checkpoints pad their vocabularies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from infer.config import EngineConfig
from infer.engine.build.checkpoint import Checkpoint, find_checkpoint
from infer.errors import ConfigError
from infer.text.checkpoint_text import TextFiles

if TYPE_CHECKING:
    from infer.text.tokenizer import Tokenizer

NUM_SHOWN = 3
"""Number of differing ids that a refusal names."""


def find_draft(config: EngineConfig) -> Checkpoint | None:
    """The draft model's checkpoint; None if the settings name no draft model.

    Raises `LoadError` if there is no such checkpoint.
    """
    settings = config.of_draft_model()
    if settings is None:
        return None
    return find_checkpoint(settings.model, dummy=settings.load_format == "dummy")


def check_vocabulary(files: TextFiles, draft: Checkpoint) -> None:
    """Raise `ConfigError` if the draft model has another vocabulary than the model.

    `files`: the model's.
    """
    from infer.text.tokenizer import Tokenizer  # few engines have a draft model

    target, other = (Tokenizer(replace(text, templates={})) for text in (files, draft.text()))
    differing = [
        token_id
        for token_id in range(max(target.vocab_size, other.vocab_size))
        if target.token_piece(token_id) != other.token_piece(token_id)
    ]
    if not differing:
        return
    shown = ", ".join(
        f"{token_id} is {_shown(target, token_id)} here and {_shown(other, token_id)} there"
        for token_id in differing[:NUM_SHOWN]
    )
    more = f" (and {len(differing) - NUM_SHOWN:,} more)" if len(differing) > NUM_SHOWN else ""
    raise ConfigError(
        "speculative_config",
        f"the draft model {draft.name!r} has another vocabulary: id {shown}{more}; give a model of"
        " the same tokenizer",
    )


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    piece = tokenizer.token_piece(token_id)
    return repr(piece) if piece else "no token"
