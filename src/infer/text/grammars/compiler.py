"""`Compiler`: compiles grammars with llguidance and makes a `Constraint` for each sequence.

A grammar is first checked with `Compiler.problem` in a process of its own
(`text.grammars.grammar_checker`), before its request is accepted. The engine has another `Compiler`
for the same vocabulary. Both have the same limits, which count operations and not time, so both
give the same result on any machine. Four limits bound hostile grammars: the length of the text, its
depth (`text.grammars.grammar_depth`), llguidance's own limits, and `no_forcing`. Without
`no_forcing`, llguidance expands all text that a grammar like `(a{1000}){1000}` forces.
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
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from infer.text.grammars.token_pieces import TokenPieces, name_of_hole, token_pieces
from infer.types.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np

    from infer.text.tokenizer import Tokenizer

_HEADER = '%llguidance {"no_forcing": true}\n'
STACK_BYTES = 64 << 20
"""Stack size, in bytes, of a thread that compiles.

llguidance recurses, and a grammar may have 64 KiB of text.
"""
CACHE_BYTES = 128 << 20
"""Maximum size of all compiled grammars that are kept, in bytes.

Those in use come on top, of which a server has a limit (`ServerLimits.max_grammar_mib`).
"""
LEAST_BYTES = 64 << 10
"""Minimum size that is assumed for a compiled grammar, in bytes.

It stands for memory that is only needed while the grammar is used.
"""
# A position in llguidance's message. It refers to the text made from the caller's grammar.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
# llguidance's message for a regular expression: the expression, marks below it, and the cause.
_REGEX_FAULT = re.compile(r"regex parse error:\n *(.*)\n(?:.*\n)*?error: (.*)")
# Tokens by their ids, which may be control tokens.
_TOKEN_IDS = re.compile(r"<\[[\d\s,^*-]*\]>")
# Options for llguidance in every JSON schema.
JSON_OPTIONS: Mapping[str, Any] = {
    # One space, or a new line with indentation: a model cannot generate endless white space.
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "coerce_one_of": True,  # oneOf is read as anyOf
}


class _Tokens:
    """The tokens of a vocabulary, in the form in which llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], end: int) -> None:
        """`tokens`: the bytes of each; `special_token_ids`: those that stand for no text; `end`: id
        of the token that ends an answer."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = end

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("llguidance tokenizes only forced text, and no_forcing is set")


def _trie(tokens: _Tokens, ends: list[int]) -> LLTokenizer:
    """The tokens as llguidance needs them for masks. The list of `tokens` is empty afterwards."""
    wrapper = llguidance.TokenizerWrapper(tokens)
    trie = LLTokenizer(wrapper, n_vocab=len(tokens.tokens), eos_token=ends)
    wrapper.tokens = tokens.tokens = []  # llguidance has a copy, and keeps both objects
    return trie


def read_pieces(tokenizer_json: str, num_tokens: int, ends: list[int]) -> TokenPieces:
    """The tokens of a tokenizer as llguidance reads them, for a vocabulary of `num_tokens`.

    Its object is not kept: it has the whole tokenizer in memory, 33 MiB for 128,000 tokens.
    """
    whole = LLTokenizer(tokenizer_json, n_vocab=num_tokens, eos_token=ends, slices=[])
    ids = range(num_tokens)
    pieces = [whole.decode_bytes([token]) for token in ids]
    return TokenPieces(pieces, [token for token in ids if whole.is_special_token(token)])


def _trie_of(vocabulary: Vocabulary, num_tokens: int, ends: list[int]) -> LLTokenizer:
    """The tokens of a vocabulary, and as many that no text has as are missing to `num_tokens`."""
    tokenizer = vocabulary.tokenizer
    if isinstance(tokenizer, str):
        pieces, special = read_pieces(tokenizer, num_tokens, ends)
    else:
        missing = range(len(tokenizer.pieces), num_tokens)
        pieces = [*tokenizer.pieces, *map(name_of_hole, missing)]
        special = [*tokenizer.special, *missing]
    return _trie(_Tokens(pieces, special, ends[0]), ends)


@functools.cache
def _byte_trie() -> LLTokenizer:
    """The smallest vocabulary that llguidance accepts: one token per byte, and an end token."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return _trie(_Tokens(tokens, [256], 256), [256])


@functools.cache
def _limits() -> LLParserLimits:
    return LLParserLimits(
        # A row has an item per alternative, which makes 8,000 for a schema of 2,000 properties.
        max_items_in_row=20_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        max_lexer_states=10_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own format; `ValueError` if it is not valid."""
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
            raise ValueError("the list of choices is empty: there is nothing to choose from")
        lark = "start: " + " | ".join(json.dumps(choice) for choice in choices)
    elif grammar.kind == "calls":
        lark = grammar.rules
    else:
        lark = _lark(text)
    named = [
        {"name": f"text{i}", "lark_grammar": _HEADER + _lark(text)}
        for i, text in enumerate(grammar.texts)
    ]
    return json.dumps({"grammars": [{"lark_grammar": _HEADER + lark}, *named]})


def _lark(text: str) -> str:
    """A caller's grammar in llguidance's dialect; `ValueError` if it is not valid."""
    if "%llguidance" in text:
        raise ValueError("a grammar cannot set options (%llguidance)")
    lark = str(any_to_lark(text).replace("%llguidance {}\n", ""))
    if match := _TOKEN_IDS.search(lark):  # also in texts: what is one, llguidance's lexer decides
        shown = f"{match[0]:.40}"
        raise ValueError(f"a grammar cannot name tokens by their ids ({shown}); write \\x3c for <")
    return lark


def _in_one_line(problem: str) -> str:
    """The beginning of a message; of one about a regular expression, the cause too."""
    if fault := _REGEX_FAULT.search(problem):
        what = "failed to compile JSON schema: " if problem.startswith("failed to compile") else ""
        return f"{what}invalid regex: {fault[2]:.120} (in {fault[1]:.60})"
    return problem.split("\n", 1)[0][:200]


def compiling_thread(name: str) -> ThreadPoolExecutor:
    """An executor with one running thread whose stack is large enough to compile grammars."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = ThreadPoolExecutor(1, name)
        thread.submit(int).result()
    finally:
        threading.stack_size(before)
    return thread


class Constraint:
    """The state of a grammar after the tokens of one sequence; a function of those tokens."""

    thread = 0
    """The thread that has compiled the grammar: `threading.get_ident`; 0: it was not compiled."""

    def __init__(self, matcher: LLMatcher, width: int, thread: int) -> None:
        """`matcher`: the compiled grammar, for this sequence only; `width`: number of logits, V;
        `thread`: see there."""
        self._matcher = matcher
        self._width = width
        self.thread = thread
        self._num_taken = 0

    def follow(self, tokens: list[int]) -> None:
        """Move to the state after `tokens`; `ValueError` if the grammar does not allow them."""
        if self._num_taken > len(tokens):  # the last step was not committed
            self._num_taken = 0
            self._reset()
        for token in tokens[self._num_taken :]:
            self.take(token)

    def _reset(self) -> None:
        """Go back to the state before all tokens."""
        self._matcher.reset()

    def take(self, token: int) -> bool:
        """Take one more token; returns whether the text is complete, so no token may follow.

        `ValueError` if the grammar does not allow the token.
        """
        if not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error())
        self._num_taken += 1
        return self._matcher.is_stopped()

    def copy(self) -> Constraint:
        """A constraint in the same state; tokens that it takes are not seen by this one."""
        copied = Constraint(self._matcher.deep_copy(), self._width, self.thread)
        copied._num_taken = self._num_taken
        return copied

    def num_allowed(self, tokens: Iterable[int]) -> int:
        """Number of leading `tokens` that may follow; the state does not change."""
        return self._matcher.validate_tokens(list(tokens))

    def forbidden(self) -> np.ndarray:
        """A mask of the tokens that may not be next, [V] bool."""
        import numpy as np  # not in the processes that check grammars: a third of their start

        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        allowed = np.unpackbits(bits, bitorder="little")[: self._width]
        return np.equal(allowed, 0)


class Vocabulary(NamedTuple):
    """The vocabulary for which grammars are compiled, as plain data."""

    tokenizer: str | TokenPieces
    """Tokenizer as JSON (see `Tokenizer.to_json`), or the bytes of its tokens."""
    num_tokens: int
    """Number of tokens of the tokenizer."""
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end an answer."""
    num_logits: int
    """Number of logits of the model, V, which may differ from `num_tokens`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_logits: int) -> Vocabulary:
        """The vocabulary of a tokenizer, for a model with this number of logits."""
        ends = tuple(tokenizer.eos_token_ids)
        return cls(tokenizer.to_json(), tokenizer.vocab_size, ends, num_logits)

    def read(self) -> Vocabulary:
        """The same with the bytes of the tokens in place of JSON, if they can be had so."""
        if not isinstance(self.tokenizer, str):
            return self
        tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer)
        pieces = token_pieces(tokenizer, tokenizer.get_vocab())
        return self if pieces is None else self._replace(tokenizer=pieces)


class Compiled(NamedTuple):
    """A compiled grammar."""

    matcher: LLMatcher
    num_bytes: int
    thread: int
    """Thread that has compiled it: `threading.get_ident`."""


class CompiledGrammars:
    """A cache of compiled grammars with a limit in bytes; the least recently used go first.

    Several threads may use it. A grammar that another thread is compiling is waited for.
    """

    def __init__(self, compile_one: Callable[[Grammar], LLMatcher], max_bytes: int) -> None:
        """`compile_one` compiles a grammar; `max_bytes`: maximum size of all together."""
        self._compile = compile_one
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._being_compiled: set[Grammar] = set()
        self._changed = threading.Condition()
        self.num_bytes = 0
        self.free: Callable[[int, list[Any]], object] = _clear
        """Called with the thread and a list of what is evicted, which it empties."""

    def __len__(self) -> int:
        return len(self._kept)

    def compiled(self, grammar: Grammar, num_bytes: int) -> Compiled:
        """The compiled grammar, from the cache or from `compile_one`, whose errors are not kept.

        `num_bytes`: its size, as `GrammarChecker` has found it.
        """
        with self._changed:
            self._changed.wait_for(lambda: grammar not in self._being_compiled)
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept
            self._being_compiled.add(grammar)
        try:
            matcher = self._compile(grammar)
            new = Compiled(matcher, max(LEAST_BYTES, num_bytes), threading.get_ident())
            self._keep(grammar, new)
        finally:
            with self._changed:
                self._being_compiled.remove(grammar)
                self._changed.notify_all()
        return new

    def _keep(self, grammar: Grammar, new: Compiled) -> None:
        evicted: list[Compiled] = []
        with self._changed:
            self._kept[grammar] = new
            self.num_bytes += new.num_bytes
            while self.num_bytes > self._max_bytes:
                evicted.append(self._kept.popitem(last=False)[1])
                self.num_bytes -= evicted[-1].num_bytes
        while evicted:
            thread = evicted[-1].thread
            self.free(thread, [evicted.pop()])


def _clear(thread: int, holder: list[Any]) -> None:
    holder.clear()


class TokenBytes:
    """The bytes of each token of a vocabulary."""

    def __init__(self, pieces: list[bytes], num_logits: int, ends: Iterable[int]) -> None:
        """`pieces`: the bytes of each token; those of a control token are its name.

        `num_logits`: number of logits, V. `ends`: ids of the tokens that end an answer.
        """
        self.pieces = pieces
        self.num_logits = num_logits
        self.ends = sorted(end for end in ends if end < num_logits)
        self._containing: dict[bytes, list[int]] = {}

    def containing(self, byte: bytes) -> list[int]:
        """The ids of the tokens in which a byte occurs; each byte is searched for once."""
        if byte not in self._containing:
            tokens = [token for token, piece in enumerate(self.pieces) if byte in piece]
            self._containing[byte] = tokens
        return self._containing[byte]


class Compiler:
    """Compiles grammars for one model. Several threads may use it at once."""

    def __init__(self, vocabulary: Vocabulary, *, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes`: maximum size of all compiled grammars that are kept."""
        self._width = vocabulary.num_logits
        size = max(self._width, vocabulary.num_tokens)
        self._bytes: TokenBytes | None = None
        self._ends = vocabulary.eos_token_ids
        ends = list(vocabulary.eos_token_ids) or [size]  # llguidance needs at least one end token
        size = max(size, *(end + 1 for end in ends))
        self._trie = _trie_of(vocabulary, size, ends)
        self.cache = CompiledGrammars(self._compile, cache_bytes)

    @property
    def width(self) -> int:
        """Number of logits of the model, V."""
        return self._width

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        for text in grammar.texts:  # alone, where it can name neither special tokens nor rules
            matcher = self._matcher(Grammar.grammar(text))
            if matcher.is_error():
                return matcher
        source = _source(grammar)
        if grammar.kind == "grammar" and "<" in grammar.text:
            # The grammar may name control tokens, which is refused. The trie of bytes has no
            # control tokens, so compiling with it fails in that case.
            matcher = LLMatcher(_byte_trie(), source, log_level=0, limits=_limits())
            if matcher.is_error():
                return matcher
        return LLMatcher(self._trie, source, log_level=0, limits=_limits())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def constraint(self, grammar: Grammar, num_bytes: int = 0) -> Constraint:
        """The constraint of one sequence; `ValueError` for a grammar that has a `problem`.

        `num_bytes`: size of the compiled grammar, as `GrammarChecker` has found it.
        """
        compiled = self.cache.compiled(grammar, num_bytes)
        return Constraint(compiled.matcher.deep_copy(), self._width, compiled.thread)

    def token_bytes(self) -> TokenBytes:
        """The bytes of the model's tokens; they are made in the first call."""
        if self._bytes is None:
            decode = self._trie.decode_bytes
            num = min(self._width, self._trie.vocab_size)
            pieces = [decode([token]).removeprefix(b"\xff") for token in range(num)]
            self._bytes = TokenBytes(pieces, self._width, self._ends)
        return self._bytes

    def problem(self, grammar: Grammar) -> tuple[str, Any]:
        """(why no text can be generated with a grammar, or ""; the compiled grammar).

        The compiled grammar lets the caller measure its memory.
        """
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
        except Exception as error:  # the converter of grammars raises many kinds of errors
            problem = str(error) or type(error).__name__
        return _in_one_line(problem), matcher
