"""`GrammarChecker`: checks whether a grammar can be served, in a separate process that may crash.

The compiler of grammars is native code, and clients write the grammars. A fault in it must not end
the process that serves all streams. So grammars are first compiled in a small process
(`text.grammars.grammar_child`), with the engine's vocabulary and limits, and with limits of time
and memory. If that process dies, the grammar is refused and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from infer.errors import OverloadedError, RequestError
from infer.readiness import READABLE, is_ready
from infer.text.grammars.compiler import Vocabulary
from infer.text.grammars.grammar_bounds import problem_of_bounds
from infer.text.grammars.grammar_child import MAX_CPU_S
from infer.text.grammars.grammar_depth import TOO_DEEP, is_too_deep
from infer.text.grammars.grammar_frames import Verdict, read_frame, write_frame
from infer.types.grammar import Grammar

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""Maximum time for one grammar in seconds; `MAX_CPU_S` ends it sooner unless the CPU is busy."""
START_S = 120.0
"""Maximum time for the process to start and to read the vocabulary, in seconds."""
MAX_KNOWN = 256
"""Maximum number of accepted grammars that are remembered."""
_TOO_LONG = f"it cannot be compiled in {MAX_CPU_S} s of CPU time"
_TOO_HARD = "it cannot be compiled within the memory limit"
_DIED = "it cannot be compiled"


class _Process:
    """A running process that compiles grammars."""

    def __init__(self) -> None:
        # -P and PYTHONPATH: the process finds modules only where this process finds them.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "infer.text.grammars.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._is_ready = False
        # The process is killed when this object is collected and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _kill, self._process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Wait until the process has read the vocabulary.

        Raises `EOFError` or `OSError` if it dies, and `TimeoutError` after `START_S`.
        """
        if not self._is_ready:
            write_frame(self._in, vocabulary())
            self._receive(START_S)
            self._is_ready = True

    def verdict(self, grammar: Grammar) -> Verdict:
        """The verdict on a grammar.

        Raises `EOFError` or `OSError` if the process dies, and `TimeoutError` after `DEADLINE_S`.
        """
        write_frame(self._in, (grammar.kind, grammar.text))
        return Verdict(*self._receive(DEADLINE_S))

    def _receive(self, patience_s: float) -> Any:
        if not is_ready(self._out, READABLE, patience_s):
            raise TimeoutError
        return read_frame(self._out)

    def end(self) -> int:
        """End the process; returns its exit code, or minus the signal that ended it."""
        with contextlib.suppress(OSError):
            self._in.close()
        # The process ends when its input ends, unless it is compiling.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self._is_ready else 0)
        self._finalizer()
        return self._process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    process.kill()
    process.wait()


class GrammarChecker:
    """Checks grammars; see the module's docstring.

    Any thread may call it. One grammar is compiled at a time.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called whenever a new process starts."""
        self._vocabulary = vocabulary
        self._process: _Process | None = None
        self._busy = threading.Lock()
        self._accepted: OrderedDict[Grammar, int] = OrderedDict()
        self._is_closed = False
        self.num_deaths = 0
        """Number of times that the process has died of a grammar."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none at the moment."""
        return None if self._process is None else self._process.pid

    def warm(self) -> None:
        """Start the process without waiting until it is ready."""
        with self._busy:
            if self._process is None and not self._is_closed:
                self._process = _Process()
        threading.Thread(target=self._warm, name="infer-grammar-start", daemon=True).start()

    def _warm(self) -> None:
        # ValueError: the interpreter is ending and has closed the pipes.
        with self._busy, contextlib.suppress(OSError, EOFError, TimeoutError, ValueError):
            self._ready_process()

    def check(self, grammar: Grammar) -> int:
        """Check a grammar; returns the size of the compiled grammar in bytes.

        Raises `RequestError` (param "grammar") for a grammar that is not valid, allows no text, or
        takes too much time or memory; `OverloadedError` if it cannot be checked at the moment.
        """
        known = self._accepted.get(grammar)
        if known is not None:
            return known
        if is_too_deep(grammar):
            raise _refusal(grammar, TOO_DEEP)
        if problem := problem_of_bounds(grammar):
            raise _refusal(grammar, problem)
        with self._busy:
            verdict = self._verdict_on(grammar)
            if verdict.problem:
                raise _refusal(grammar, verdict.problem)
            self._accepted[grammar] = verdict.num_bytes
            if len(self._accepted) > MAX_KNOWN:
                self._accepted.popitem(last=False)
            return verdict.num_bytes

    def _verdict_on(self, grammar: Grammar) -> Verdict:
        """The verdict of the process, or one that follows from its death."""
        for _ in range(2):
            try:
                process = self._ready_process()
            except (OSError, EOFError, TimeoutError) as error:
                code = self._end()
                log.error("grammars cannot be checked: %r, status %s", error, code)
                raise OverloadedError("grammars cannot be checked at the moment") from None
            started_s = time.monotonic()
            try:
                return process.verdict(grammar)
            except (OSError, EOFError, TimeoutError) as error:
                code = self._end()
                self.num_deaths += 1
                took_s = time.monotonic() - started_s
                log.warning("a grammar has ended its check: status %s, %.1f s", code, took_s)
                if code == -signal.SIGXCPU or isinstance(error, TimeoutError):
                    return Verdict(_TOO_LONG)
                if code == -signal.SIGABRT:  # native allocators abort if there is no memory
                    return Verdict(_TOO_HARD)
                # Other deaths may have another cause than the grammar, so it is tried once more.
        return Verdict(_DIED)

    def _ready_process(self) -> _Process:
        if self._is_closed:
            raise OSError("the checker is closed")
        if self._process is None:
            self._process = _Process()
        self._process.wait_until_ready(self._vocabulary)
        return self._process

    def _end(self) -> int | None:
        process, self._process = self._process, None
        return None if process is None else process.end()

    def close(self) -> None:
        """End the process. No grammar can be checked afterwards."""
        self._is_closed = True
        with self._busy:
            self._end()


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    return RequestError(f"grammar ({grammar.kind}): {problem}", param="grammar")
