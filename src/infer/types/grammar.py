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
_TEXT = "%text "
"""Beginning of the line with a grammar of the caller; rules are never written so."""
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
    def calls(cls, source: str, texts: Sequence[str] = ()) -> Grammar:
        """A grammar in the same dialect that `text.tools.forced_markup` has made; it may name
        special tokens, which no grammar of a caller may. `texts`: grammars of the caller, which the
        rules name `@text0`, `@text1`, …; they know no rule but their own."""
        return cls("calls", "\n".join([source, *(f"{_TEXT}{json.dumps(text)}" for text in texts)]))

    @property
    def texts(self) -> list[str]:
        """The grammars of the caller that a grammar of calls names."""
        lines = self.text.split("\n") if self.kind == "calls" else []
        return [json.loads(line.removeprefix(_TEXT)) for line in lines if line.startswith(_TEXT)]

    @property
    def rules(self) -> str:
        """The text without them."""
        if self.kind != "calls":
            return self.text
        return "\n".join(line for line in self.text.split("\n") if not line.startswith(_TEXT))
