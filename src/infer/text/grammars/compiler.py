"""Grammars compiled with llguidance: refused if they mean nothing, else a matcher per sequence.

`Compiler.problem` is what a request meets before it is accepted, in a process of its own
(`text.grammars.grammar_checker`); another `Compiler`, for the same vocabulary, lives in the engine.
Both work within the same limits, which count operations and not time, so that both say the same on
any machine. Hostile grammars are bounded by four things: the length of the text; its depth
(`text.grammars.grammar_depth`); those limits; and `no_forcing`, without which llguidance writes out
what a grammar like `(a{1000}){1000}` forces.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from infer.types.grammar import Grammar

if TYPE_CHECKING:
    from infer.text.tokenizer import Tokenizer

_HEADER = '%llguidance {"no_forcing": true}\n'
STACK_BYTES = 64 << 20
"""of a thread that compiles; llguidance recurses, and a grammar is at most 64 KiB long"""
CACHE_BYTES = 224 << 20
"""of compiled grammars that are kept; what is used while one is compiled and followed comes beside
it, and all together is to stay below 300 MB"""
LEAST_BYTES = 64 << 10
"""that a compiled grammar is taken to have: some memory is only needed while it is followed"""
# Where in our own text around the caller's it was found.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
JSON_OPTIONS: Mapping[str, Any] = {
    # One space, or a new line and its indentation: a model cannot get lost in white space.
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "coerce_one_of": True,  # read as anyOf
}


class _Bytes:
    """The smallest tokenizer that llguidance takes: one token a byte, and an end."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


@functools.cache
def _limits() -> LLParserLimits:
    return LLParserLimits(
        # A row has an item for each alternative: a schema of 2,000 properties has 8,000.
        max_items_in_row=20_000,
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


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """One thread in which grammars may be compiled; it runs already."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = ThreadPoolExecutor(1, name)
        thread.submit(int).result()
    finally:
        threading.stack_size(before)
    return thread


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


class Vocabulary(NamedTuple):
    """What a grammar is compiled for; plain data."""

    tokenizer_json: str
    """see `Tokenizer.to_json`"""
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    num_logits: int
    """the width of the model's last layer, which may differ from `num_tokens`"""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_logits: int) -> Vocabulary:
        ends = tuple(tokenizer.eos_token_ids)
        return cls(tokenizer.to_json(), tokenizer.vocab_size, ends, num_logits)


class CompiledGrammars:
    """Matchers by grammar, the least recently used given up when all together are too large."""

    def __init__(self, compile_one: Callable[[Grammar], LLMatcher], max_bytes: int) -> None:
        self._compile = compile_one
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Grammar, tuple[LLMatcher, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def matcher(self, grammar: Grammar, num_bytes: int) -> LLMatcher:
        """What `compile_one` makes of it, `num_bytes` large; what it raises is not kept."""
        kept = self._kept.pop(grammar, None)
        if kept is None:
            kept = self._compile(grammar), max(LEAST_BYTES, num_bytes)
            self.num_bytes += kept[1]
        self._kept[grammar] = kept
        while self.num_bytes > self._max_bytes:
            _, (_, size) = self._kept.popitem(last=False)
            self.num_bytes -= size
        return kept[0]


class TokenBytes:
    """A vocabulary as text."""

    def __init__(self, pieces: list[bytes], num_logits: int, ends: Iterable[int]) -> None:
        """`pieces`: the bytes of each token, a control token's are its name; `ends`: tokens that
        end an answer."""
        self.pieces = pieces
        self.num_logits = num_logits
        self.ends = sorted(end for end in ends if end < num_logits)
        self._containing: dict[bytes, list[int]] = {}

    def containing(self, byte: bytes) -> list[int]:
        """The tokens in which a byte occurs; searched for once."""
        if byte not in self._containing:
            found = [token for token, piece in enumerate(self.pieces) if byte in piece]
            self._containing[byte] = found
        return self._containing[byte]


class Compiler:
    """Grammars of one model. Not safe for several threads at once."""

    def __init__(self, vocabulary: Vocabulary, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._width = vocabulary.num_logits
        size = max(self._width, vocabulary.num_tokens)
        self._bytes: TokenBytes | None = None
        self._ends = vocabulary.eos_token_ids
        ends = list(vocabulary.eos_token_ids) or [size]  # a model without an end needs one here
        size = max(size, *(end + 1 for end in ends))
        self._tokenizer = LLTokenizer(vocabulary.tokenizer_json, n_vocab=size, eos_token=ends)
        self.cache = CompiledGrammars(self._compile, cache_bytes)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        source = _source(grammar)
        if grammar.kind == "grammar" and "<" in grammar.text:
            # It may name control tokens. None of them exists for bytes: that is the refusal.
            matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=_limits())
            if matcher.is_error():
                return matcher
        return LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def constraint(self, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        """For one sequence; raises `ValueError` for what has a `problem`. `num_bytes`: what it
        takes when it is compiled."""
        return Constraint(self.cache.matcher(grammar, num_bytes).deep_copy(), self._width)

    def token_bytes(self) -> TokenBytes:
        """What the tokens of this model are, made when it is first asked for."""
        if self._bytes is None:
            decode = self._tokenizer.decode_bytes
            num = min(self._width, self._tokenizer.vocab_size)
            pieces = [decode([token]).removeprefix(b"\xff") for token in range(num)]
            self._bytes = TokenBytes(pieces, self._width, self._ends)
        return self._bytes

    def problem(self, grammar: Grammar) -> tuple[str, Any]:
        """(why no text can be made with it, or "", what has been compiled and is to be dropped)."""
        matcher = None
        try:
            matcher = self._matcher(grammar)
            if not matcher.is_error():
                matcher.compute_bitmask()
            problem = _PLACE.sub("", matcher.get_error())
            if problem.startswith("NoExtension"):
                problem = "no text satisfies it"
        except RecursionError:
            problem = "it is nested too deeply"
        except Exception as error:  # of the converter, which raises what it likes
            problem = str(error) or type(error).__name__
        return problem.split("\n", 1)[0][:200], matcher
