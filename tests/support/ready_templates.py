"""Chat templates whose processes stay for the next test.

Each template is rendered by processes of its own; to start one and compile the template takes a
tenth of a second or more. Of tokenizers: `doubles.LastingTokenizer`.
"""

from __future__ import annotations

import functools

from infer.text.chat_template import ChatTemplate


@functools.lru_cache(24)
def template_of(source: str) -> ChatTemplate:
    """A template, compiled once."""
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
