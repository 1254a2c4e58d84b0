"""Compiling grammars to see whether they can be served, in a process that may die of it.

`text.untrusted.worker` runs it with the engine's vocabulary and limits. The answer for a grammar is
a `Verdict`.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from typing import Any, NamedTuple

from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.grammars.grammar_bounds import problem_of_bounds
from infer.text.grammars.grammar_depth import TOO_DEEP, is_too_deep
from infer.types.grammar import Grammar

MAX_BYTES = 96 << 20
"""Maximum size of a compiled grammar, in bytes."""
TOO_LARGE = f"it is too large: it takes %d MiB when compiled, at most {MAX_BYTES >> 20} are allowed"


class Verdict(NamedTuple):
    """The result of checking one grammar."""

    problem: str
    """Reason why the grammar is refused; "": it is accepted."""
    num_bytes: int = 0
    """Size of the compiled grammar, in bytes."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def used_bytes() -> int:
    """The memory that this process has allocated and not freed, in bytes.

    Without glibc it is the maximum memory that the process has had.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mallinfo.restype = _Mallinfo2
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def verdict_on(compiler: Compiler, grammar: Grammar) -> Verdict:
    """Look at what would crash the compiler; then compile a grammar, and measure it."""
    if problem := TOO_DEEP if is_too_deep(grammar) else problem_of_bounds(grammar):
        return Verdict(problem)
    before = used_bytes()
    problem, compiled = compiler.problem(grammar)
    num_bytes = max(0, used_bytes() - before)
    del compiled
    if not problem and num_bytes > MAX_BYTES:
        problem = TOO_LARGE % (num_bytes >> 20)
    return Verdict(problem, num_bytes)


def prepare(value: Any) -> tuple[bool, Callable[[Any], Verdict]]:
    """(True, the work for `text.untrusted.worker`) for a vocabulary."""
    json_text, num_tokens, ends, num_logits = value
    compiler = Compiler(Vocabulary(json_text, num_tokens, tuple(ends), num_logits).read())
    return True, lambda grammar: verdict_on(compiler, Grammar(*grammar))
