"""`Grammar`: the form that the text of an answer must have, as plain data.

Plain data that crosses the boundary inside `SamplingParams`. Whether it means anything is found out
by `infer.text.grammars.compiler`, which compiles it; here it is a kind and a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_CHARS = 64 * 1024
KINDS = ("json", "regex", "choice", "grammar", "calls")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Made by one of the class methods."""

    kind: str
    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> Grammar:
        """JSON that fits a schema (a mapping, or its text); without one: any JSON object."""
        if schema is None:
            schema = {"type": "object"}
        return cls("json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def grammar(cls, source: str) -> Grammar:
        """A context-free grammar: llguidance's dialect of Lark, or llama.cpp's GBNF."""
        return cls("grammar", source)

    @classmethod
    def calls(cls, source: str) -> Grammar:
        """A grammar in the same dialect that `text.tools.forced_markup` has made; it may name
        special tokens, which no grammar of a caller may."""
        return cls("calls", source)
