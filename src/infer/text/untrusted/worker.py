"""The process that works on untrusted text, and may die of it.

`text.untrusted.process` starts it as `python -m infer.text.untrusted.worker KIND`. It reads jobs
from its standard input, and answers each. The first job prepares it: for the kind `template` it is
the template's source, for `grammar` the vocabulary, for `pattern` the tokenizer. The system limits
the CPU time of each job (`OUT_OF_TIME`) and the memory, and ends a process that exceeds them. The
process has no environment of its parent's, cannot write files, and ends when its input ends.

A message is a head and JSON. The head has the length of the JSON, and seconds of CPU time: in a
job those that it may use, in an answer those that it has used.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from infer.signals import leave_signals_to_parent

Work = Callable[[Any], Any]
"""Function: value of a job → value of the answer."""

MAX_BYTES_MEANWHILE = {"template": 512 << 20, "grammar": 1 << 30, "pattern": 1 << 31}
"""Maximum address space beyond that of the prepared process, by kind, in bytes."""
HEAD = struct.Struct("<Id")
"""Head of a message: bytes of the JSON, seconds of CPU time."""
OUT_OF_TIME = signal.SIGPROF
"""Signal by which the system ends a process whose job has used its CPU time."""
SURROGATES = "surrogatepass"
"""How lone surrogates are encoded, which texts of callers may have."""
_STACK_BYTES = 64 << 20
"""Stack size, in bytes, of the thread that works: compilers recurse."""
_NICE = 5


def encoded(cpu_s: float, value: Any) -> bytes:
    """The bytes of one message. `RecursionError` or `ValueError` for values that JSON lacks."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", SURROGATES)
    return HEAD.pack(len(body), cpu_s) + body


def decoded(body: bytes) -> Any:
    """The value of a message, without its head."""
    return json.loads(body.decode("utf-8", SURROGATES))


def _read_message(pipe: BinaryIO) -> tuple[float, Any]:
    """Wait for one message; `EOFError` if the other process has ended."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError
    num_bytes, cpu_s = HEAD.unpack(head)
    return cpu_s, decoded(pipe.read(num_bytes))


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, hard))


def _limit_memory(more_bytes: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + more_bytes)


def _used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _prepared(kind: str, value: Any) -> tuple[Any, Work]:
    """(value of the answer, the work of this kind) for the value of the first job."""
    # Each kind imports only what it needs.
    if kind == "template":
        from infer.text.untrusted import template_renderer

        return template_renderer.prepare(value)
    if kind == "grammar":
        from infer.text.untrusted import grammar_verdicts

        return grammar_verdicts.prepare(value)
    from infer.text.untrusted import pattern_trial

    return pattern_trial.prepare(value)


def _serve(kind: str, source: BinaryIO, sink: BinaryIO) -> None:
    work: Work | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            cpu_s, value = _read_message(source)
            before_s = _used_s()
            # Not RLIMIT_CPU: the system counts that in ticks from the start of the process, some
            # per cent away from `_used_s`. After two minutes of work a job would end at once.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            if work is not None:
                answer = work(value)
            else:
                _limit_memory(MAX_BYTES_MEANWHILE[kind])
                answer, work = _prepared(kind, value)
                _limit_memory(MAX_BYTES_MEANWHILE[kind])
            del value
            message = encoded(_used_s() - before_s, answer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sink.write(message)
            sink.flush()


def main() -> None:
    """Answer jobs until the input ends."""
    leave_signals_to_parent()
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        _limit(limit, 0)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    sink = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # a stranger's text writes nothing to a terminal or a log
        os.dup2(nothing, output)
    threading.stack_size(_STACK_BYTES)
    arguments = (sys.argv[1], sys.stdin.buffer, sink)
    thread = threading.Thread(target=_serve, args=arguments, name="infer-untrusted")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
