"""Trying a tokenizer's regular expressions on short texts, in a process that may die of it.

A regular expression of a `tokenizer.json` may take unlimited time for a few hundred characters, in
native code that cannot be interrupted. `try_patterns` has such texts encoded by a process with
limited CPU time. The patterns of published model families are known and not tried.
`engine.build.checkpoint` calls it before any other text is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from infer.errors import LoadError, OverloadedError
from infer.text.gguf_vocab import PATTERNS
from infer.text.untrusted.workers import UntrustedWorkers

LOADING_S, TRIAL_S = 20, 3
"""Maximum CPU time in seconds: for reading the tokenizer, and for all texts together.

The texts usually take milliseconds.
"""
_MAX_WAIT_S = 120.0
_PATTERN = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')


def try_patterns(tokenizer_json: str) -> None:
    """Try the patterns of a `tokenizer.json`.

    Raises `LoadError` if they take too long for short texts, or if the machine has no time to try
    them.
    """
    if all(_known(pattern) for pattern in _PATTERN.findall(tokenizer_json)):
        return
    workers = UntrustedWorkers("pattern", lambda: tokenizer_json, 1, prepare_cpu_s=LOADING_S)
    try:
        answer = workers.first_answer()  # the tokenizer is read
        if not answer.death:
            answer = workers.submit(workers.job(None, TRIAL_S, _MAX_WAIT_S)).result()
        workers.lasting(answer)
    except OverloadedError as error:
        raise LoadError(f"tokenizer.json cannot be tried: {error}") from None
    finally:
        workers.close()
    if answer.death:
        raise LoadError("tokenizer.json cannot be used: its patterns take too long for short texts")


def _known(pattern: str) -> bool:
    try:
        return json.loads(pattern) in PATTERNS
    except ValueError:
        return False


def prepare(tokenizer_json: str) -> tuple[bool, Callable[[Any], bool]]:
    """(True, the work for `text.untrusted.worker`) for a tokenizer."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception:  # `Tokenizer` will report what is wrong with the file
        return True, lambda _: True
    return True, lambda _: _encode_texts(tokenizer)


def _encode_texts(tokenizer: Any) -> bool:
    chars = "aA1 .é中\n\t_-'"
    for char in chars:
        for end in ("", "!", "\0", "a1"):
            tokenizer.encode(char * 300 + end)
    for repeated in chars:
        for other in chars:
            tokenizer.encode((repeated + other) * 100 + "\0")
    return True
