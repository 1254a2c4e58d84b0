"""Chat templates whose processes stay for the next test.

Each template is rendered by processes of its own; to start one and compile the template takes a
tenth of a second or more. Of tokenizers: `doubles.LastingTokenizer`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import pytest

from infer.text.chat_template import ChatTemplate

SPECIAL_TOKENS: Mapping[str, str] = MappingProxyType({"bos_token": "<s>", "eos_token": "</s>"})


@functools.lru_cache(24)
def _compiled(source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(tokens))


def template_of(source: str, special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> ChatTemplate:
    """A template with its special tokens, compiled once."""
    return _compiled(source, tuple(special_tokens.items()))


@contextmanager
def templates_kept() -> Iterator[None]:
    """Meanwhile the tokenizers of all engines of this process have such templates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.text.tokenizer.ChatTemplate", template_of)
        patch.setattr(ChatTemplate, "rest", lambda self: None)
        yield
