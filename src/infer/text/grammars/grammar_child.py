"""The process that compiles grammars before they are accepted, and may crash in doing so.

`text.grammars.grammar_checker` starts it as `python -m infer.text.grammars.grammar_child`. It reads
a vocabulary and then grammars from its standard input, and answers each grammar with a `Verdict`.
It ends when its input ends. The system limits its time and memory and ends a process that exceeds
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from typing import BinaryIO

from infer.signals import leave_signals_to_parent
from infer.text.grammars.compiler import Compiler, Vocabulary, compiling_thread
from infer.text.grammars.grammar_frames import Verdict, read_frame, write_frame
from infer.types.grammar import Grammar

MAX_CPU_S = 3
"""Maximum CPU time for one grammar, in seconds."""
MAX_BYTES = 96 << 20
"""Maximum size of a compiled grammar, in bytes."""
MAX_BYTES_MEANWHILE = 1 << 30
"""Maximum address space while compiling, beyond that of the vocabulary, in bytes."""
_NICE = 5
TOO_LARGE = f"it is too large: it takes %d MiB when compiled, at most {MAX_BYTES >> 20} are allowed"


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


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, hard))


def _address_space() -> int | None:
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return None


def _verdict(compiler: Compiler, grammar: Grammar) -> Verdict:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + MAX_CPU_S)
    before = used_bytes()
    problem, compiled = compiler.problem(grammar)
    num_bytes = max(0, used_bytes() - before)
    del compiled
    if not problem and num_bytes > MAX_BYTES:
        problem = TOO_LARGE % (num_bytes >> 20)
    return Verdict(problem, num_bytes)


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    with contextlib.suppress(EOFError, OSError):
        json_text, num_tokens, ends, num_logits = read_frame(source)
        compiler = Compiler(Vocabulary(json_text, num_tokens, tuple(ends), num_logits))
        if (size := _address_space()) is not None:
            _limit(resource.RLIMIT_AS, size + MAX_BYTES_MEANWHILE)
        write_frame(sink, "ready")
        while True:
            write_frame(sink, _verdict(compiler, Grammar(*read_frame(source))))


def main() -> None:
    """Answer grammars until the input ends."""
    leave_signals_to_parent()
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints goes to stderr
    compiling_thread("infer-grammar").submit(_serve, sys.stdin.buffer, sink).result()


if __name__ == "__main__":
    main()
