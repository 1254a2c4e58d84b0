"""Chat templates whose processes stay for the next test.

Each template of a test is rendered by processes of its own, and a server that ends ends them. To
start one and compile the template takes a tenth of a second or more.
"""

from __future__ import annotations

import functools
from typing import Any

from infer.text.chat_template import ChatTemplate
from infer.text.tokenizer import Tokenizer


@functools.lru_cache(24)
def template_of(source: str) -> ChatTemplate:
    """A template, compiled once."""
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def stays_ready(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, whose processes start one by one as they are needed, and end with it."""
    held: Any = tokenizer
    held.warm = held.rest = lambda: None
    return tokenizer
