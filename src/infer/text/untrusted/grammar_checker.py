"""`GrammarChecker`: checks whether a grammar can be served, in processes that may crash."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from infer.errors import RequestError
from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted.grammar_verdicts import Verdict
from infer.text.untrusted.workers import Answer, Steps, UntrustedWorkers, run_steps
from infer.types.grammar import Grammar

MAX_CPU_S = 3
"""Maximum CPU time for one grammar, in seconds."""
MAX_KNOWN = 256
"""Maximum number of grammars whose verdict is remembered."""
_TOO_LONG = f"it cannot be compiled in {MAX_CPU_S} s of CPU time"
_TOO_HARD = "it cannot be compiled within the memory limit"
_DIED = "it cannot be compiled"
_PROBLEMS = {"cpu": _TOO_LONG, "memory": _TOO_HARD}


class GrammarChecker:
    """Checks grammars.

    The compiler of grammars is native code, and clients write the grammars. A fault in it must not
    end the process that serves all streams. So grammars are first compiled in a small process
    (`text.untrusted.worker`), with the engine's vocabulary and limits, and with limits of time and
    memory. If that process dies, the grammar is refused. What was found is remembered, refusals
    too. A death whose cause may pass says nothing about the grammar, which may be sent again. Any
    thread may call it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called whenever a new process starts."""
        self.workers = UntrustedWorkers("grammar", vocabulary)
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()
        """The least recently used first."""
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> int:
        """Check a grammar, and block meanwhile; see `checking`."""
        return run_steps(self.checking(grammar))

    def checking(self, grammar: Grammar) -> Steps[int]:
        """Check a grammar; returns the size of the compiled grammar in bytes.

        Raises `RequestError` (param "grammar") for a grammar that is not valid, allows no text, or
        takes too much time or memory; `OverloadedError` if it cannot be checked at the moment.
        """
        verdict = self._known(grammar)
        if verdict is None:
            verdict = yield from self._verdict(grammar)
        if verdict.problem:
            raise RequestError(f"grammar ({grammar.kind}): {verdict.problem}", param="grammar")
        return verdict.num_bytes

    def _verdict(self, grammar: Grammar) -> Steps[Verdict]:
        answer = yield self.workers.job(
            (grammar.kind, grammar.text),
            MAX_CPU_S,
            recall=partial(self._recalled, grammar),
            remember=partial(self._remember, grammar),
        )
        return _verdict_of(self.workers.lasting(answer))

    def _known(self, grammar: Grammar) -> Verdict | None:
        with self._lock:
            verdict = self._verdicts.get(grammar)
            if verdict is not None:
                self._verdicts.move_to_end(grammar)
            return verdict

    def _recalled(self, grammar: Grammar) -> Answer | None:
        """The answer to a grammar that was checked while this job waited."""
        verdict = self._known(grammar)
        return None if verdict is None else Answer.of(verdict)

    def _remember(self, grammar: Grammar, answer: Answer) -> None:
        if not answer.is_lasting:
            return
        with self._lock:
            self._verdicts[grammar] = _verdict_of(answer)
            if len(self._verdicts) > MAX_KNOWN:
                self._verdicts.popitem(last=False)

    def warm(self) -> None:
        """Start the processes without waiting until they are ready."""
        self.workers.warm()

    def close(self) -> None:
        """End the processes. No grammar can be checked afterwards."""
        self.workers.close()


def _verdict_of(answer: Answer) -> Verdict:
    if answer.death:
        return Verdict(_PROBLEMS.get(answer.death, _DIED))
    return Verdict(*answer.value)
