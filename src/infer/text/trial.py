"""Tries a tokenizer's patterns on short texts, in a process that may die.

A pattern of a `tokenizer.json` can take longer than anybody waits over a few hundred characters,
in native code that nothing interrupts. `try_patterns` has a process with a limit of CPU time encode
such texts; patterns that published families have are known and not tried. Used by
`engine.build.checkpoint`, before anything else is encoded.
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
"""Of CPU: for reading the tokenizer, and for all texts together, which take milliseconds."""
_MAX_WAIT_S = 120.0
_PATTERN = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')


def try_patterns(tokenizer_json: str) -> None:
    """Raises `LoadError` if the patterns of a `tokenizer.json` take too long over short texts."""
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
    raise LoadError("tokenizer.json cannot be used: its patterns take too long over short texts")


def _known(pattern: str) -> bool:
    try:
        return json.loads(pattern) in PATTERNS
    except ValueError:
        return False


def main() -> None:
    """Encode; ended by a signal, or by the library's own limit, where it takes too long."""
    import resource

    import tokenizers

    resource.setrlimit(resource.RLIMIT_CPU, (LOADING_S, LOADING_S + 1))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    except Exception:
        return  # what is wrong with it is told by who reads it next
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
