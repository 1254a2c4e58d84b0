"""Grammars compiled with llguidance: refused if they mean nothing, else a matcher per sequence.

`check` is what a request meets before it is accepted; `Compiler` lives in the engine. Both work
within the same limits, which count operations and not time, so that both say the same on any
machine. Hostile grammars are bounded by three things: the length of the text; those limits; and
`no_forcing`, without which llguidance writes out what a grammar like `(a{1000}){1000}` forces.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from infer.errors import RequestError
from infer.grammar import Grammar
from infer.text.tokenizer import Tokenizer

_HEADER = '%llguidance {"no_forcing": true}\n'
_END = 256
"""of the byte-wise tokenizer with which grammars are checked"""
_MAX_COMPILED = 32
# Where in our own text around the caller's it was found.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
JSON_OPTIONS: Mapping[str, Any] = {
    # One space, or a new line and its indentation: a model cannot get lost in white space.
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "coerce_one_of": True,  # read as anyOf
}


class _Bytes:
    """The smallest tokenizer that llguidance takes: one token a byte, and an end."""

    eos_token_id, bos_token_id = _END, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


@functools.cache
def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        max_lexer_states=10_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    text = grammar.text
    if grammar.kind == "json":
        schema = json.loads(text)
        if isinstance(schema, dict):
            schema["x-guidance"] = JSON_OPTIONS
        lark = f"start: %json {json.dumps(schema)}"
    elif grammar.kind == "regex":
        lark = f"start: /{llguidance.regex_to_lark(text, '')}/"
    elif grammar.kind == "choice":
        if not (choices := json.loads(text)):
            raise ValueError("there is nothing to choose from")
        lark = "start: " + " | ".join(json.dumps(one) for one in choices)
    else:
        if "%llguidance" in text:
            raise ValueError("a grammar cannot set options (%llguidance)")
        lark = any_to_lark(text).replace("%llguidance {}\n", "")
    return json.dumps({"grammars": [{"lark_grammar": _HEADER + lark}]})


@functools.lru_cache(64)
def check(grammar: Grammar) -> None:
    """Raises `RequestError` (param "grammar") for a grammar that no text can be made with."""
    try:
        matcher = LLMatcher(_byte_tokenizer(), _source(grammar), log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        problem = _PLACE.sub("", matcher.get_error())
        if problem.startswith("NoExtension"):
            problem = "no text satisfies it"
    except RecursionError:
        problem = "it is nested too deeply"
    except Exception as error:  # of the converter, which raises what it likes
        problem = str(error)
    if problem:
        problem = problem.split("\n", 1)[0][:200]
        raise RequestError(f"grammar ({grammar.kind}): {problem}", param="grammar")


class Constraint:
    """What a grammar leaves open after the tokens of one sequence: a function of those tokens."""

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        self._matcher = matcher
        self._width = width
        self._num_taken = 0

    def follow(self, tokens: list[int]) -> None:
        """Be where these tokens lead, wherever it was; raises `ValueError` if they lead nowhere."""
        if self._num_taken > len(tokens):  # the end of a step that was not committed
            self._matcher.reset()
            self._num_taken = 0
        for token in tokens[self._num_taken :]:
            self.take(token)

    def take(self, token: int) -> bool:
        """One more token; whether the text is complete, so that none may follow."""
        if not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error())
        self._num_taken += 1
        return self._matcher.is_stopped()

    def forbidden(self) -> np.ndarray:
        """For each token of the vocabulary whether it may not be next, [V] bool."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        allowed = np.unpackbits(bits, bitorder="little")[: self._width]
        return np.equal(allowed, 0)


class Compiler:
    """Grammars of one model. Not safe for several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the width of the logits."""
        self._width = vocab_size
        size = max(vocab_size, tokenizer.vocab_size)
        ends = list(tokenizer.eos_token_ids) or [size]  # a model without an end needs one here
        size = max(size, *(end + 1 for end in ends))
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=ends)
        self._compiled = functools.lru_cache(_MAX_COMPILED)(self._compile)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def constraint(self, grammar: Grammar) -> Constraint:
        """For one sequence; raises `ValueError` for what `check` refuses."""
        return Constraint(self._compiled(grammar).deep_copy(), self._width)
