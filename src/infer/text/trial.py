"""Trying a tokenizer's regular expressions on short texts, in a process with a time limit.

A regular expression of a `tokenizer.json` may take unlimited time for a few hundred characters, in
native code that cannot be interrupted. `try_patterns` starts a process that encodes such texts with
limited CPU time. The patterns of published model families are known and not tried.
`engine.build.checkpoint` calls it before any other text is encoded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from infer.errors import LoadError
from infer.text.gguf_vocab import PATTERNS

LOADING_S, TRIAL_S = 20, 3
"""Maximum CPU time in seconds: for reading the tokenizer, and for all texts together.

The texts usually take milliseconds.
"""
_MAX_WAIT_S = 120.0
_PATTERN = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')


def try_patterns(tokenizer_json: str) -> None:
    """Raise `LoadError` if the patterns of a `tokenizer.json` take too long for short texts."""
    if all(_known(found) for found in _PATTERN.findall(tokenizer_json)):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "infer.text.trial"],
            input=tokenizer_json.encode("utf-8", "surrogatepass"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=_MAX_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pass
    else:
        if done.returncode == 0:
            return
    raise LoadError("tokenizer.json cannot be used: its patterns take too long for short texts")


def _known(pattern: str) -> bool:
    try:
        return json.loads(pattern) in PATTERNS
    except ValueError:
        return False


def main() -> None:
    """Encode the texts; a signal or the library's own limit ends the process after too long."""
    import resource

    import tokenizers

    resource.setrlimit(resource.RLIMIT_CPU, (LOADING_S, LOADING_S + 1))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    except Exception:
        return  # `Tokenizer` will report what is wrong with the file
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + TRIAL_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, LOADING_S + 1))
    chars = "aA1 .é中\n\t_-'"
    for char in chars:
        for end in ("", "!", "\0", "a1"):
            tokenizer.encode(char * 300 + end)
    for one in chars:
        for other in chars:
            tokenizer.encode((one + other) * 100 + "\0")


if __name__ == "__main__":
    main()
