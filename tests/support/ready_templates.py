"""Chat templates whose processes stay for the next test.

Each template is rendered by processes of its own; to start one and compile the template takes a
tenth of a second or more. Of tokenizers: `doubles.LastingTokenizer`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from infer.text.chat_template import ChatTemplate


@functools.lru_cache(24)
def template_of(
    source: str, names: tuple[tuple[str, str], ...] = (("bos_token", "<s>"), ("eos_token", "</s>"))
) -> ChatTemplate:
    """A template, compiled once. `names`: the special tokens that it may use."""
    return ChatTemplate(source, dict(names))


@contextmanager
def templates_kept() -> Iterator[None]:
    """Meanwhile the tokenizers of all engines of this process have such templates."""

    def kept(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        return template_of(source, tuple(special_tokens.items()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.text.tokenizer.ChatTemplate", kept)
        patch.setattr(ChatTemplate, "rest", lambda self: None)
        yield
