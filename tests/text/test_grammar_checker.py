"""Tests of the processes that check grammars: if one dies, only that grammar is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from infer.errors import OverloadedError, RequestError
from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted import workers
from infer.text.untrusted.grammar_checker import GrammarChecker
from infer.text.untrusted.worker import OUT_OF_TIME
from infer.types.grammar import Grammar
from tests.support.server_process import cpu_s

GOOD = Grammar.choice(["a", "b"])


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def when_it_computes(pid: int, act: signal.Signals) -> threading.Thread:
    """Send a signal to the process as soon as it computes."""

    def watch() -> None:
        before_s = cpu_s(pid)
        while is_there(pid) and cpu_s(pid) < before_s + 0.025:
            time.sleep(0.005)
        os.kill(pid, act)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


LONG = [Grammar.regex("a?" * 8000 + "a" * 1200 + "b" * i) for i in range(4)]


def test_a_grammar_that_ends_it_is_refused_and_the_next_one_is_not(checker: GrammarChecker) -> None:
    checker.check(GOOD)
    [first] = checker.workers.pids
    watch = when_it_computes(first, OUT_OF_TIME)
    with pytest.raises(RequestError, match="cannot be compiled in 3 s") as caught:
        checker.check(LONG[0])
    watch.join()
    assert (caught.value.status, caught.value.param) == (400, "grammar")
    assert not is_there(first)
    checker.check(Grammar.choice(["c"]))
    assert first not in checker.workers.pids
    assert checker.workers.num_deaths == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU])
def test_a_kill_from_outside_is_not_the_grammars_fault(
    checker: GrammarChecker, number: signal.Signals
) -> None:
    checker.check(GOOD)
    [pid] = checker.workers.pids
    os.kill(pid, number)
    time.sleep(0.1)
    checker.check(Grammar.choice(["c"]))
    assert checker.workers.num_deaths == 1


def test_memory_is_limited(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that needs too much memory ends its process and harms nothing else."""
    checker.check(GOOD)
    import resource

    [pid] = checker.workers.pids
    resource.prlimit(pid, resource.RLIMIT_AS, (50 << 20, 50 << 20))
    with pytest.raises(RequestError):
        checker.check(LONG[1])
    checker.check(Grammar.choice(["c"]))


def test_a_machine_that_gives_it_no_time_is_not_the_grammars_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(GOOD)
    make_job = partial(checker.workers.job, deadline_s=0.01)
    monkeypatch.setattr(checker.workers, "job", make_job)
    [pid] = checker.workers.pids
    with pytest.raises(OverloadedError, match="grammars cannot be checked at the moment"):
        checker.check(LONG[2])
    assert not is_there(pid)
    monkeypatch.undo()
    checker.check(Grammar.choice(["c"]))


def test_a_checker_that_cannot_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = GrammarChecker(lambda: Vocabulary("no JSON", 3, (), 3))
    with pytest.raises(OverloadedError, match="cannot be checked"):
        broken.check(GOOD)
    broken.close()


def test_what_was_accepted_is_not_tried_again(checker: GrammarChecker) -> None:
    size = checker.check(GOOD)
    [pid] = checker.workers.pids
    os.kill(pid, signal.SIGKILL)
    assert checker.check(GOOD) == size
    assert checker.workers.num_deaths == 0


def test_it_ends_with_its_owner(checker: GrammarChecker) -> None:
    checker.warm()
    pids = checker.workers.pids
    assert len(pids) == workers.NUM_WORKERS
    checker.check(GOOD)
    assert checker.workers.pids == pids
    checker.close()
    assert not any(map(is_there, pids))
    with pytest.raises(OverloadedError):
        checker.check(Grammar.choice(["d"]))


def test_larger_grammars_have_more_bytes(checker: GrammarChecker) -> None:
    sizes = [checker.check(Grammar.choice([f"{i:05d}" for i in range(n)])) for n in (10, 500, 4000)]
    assert sizes == sorted(sizes)
    assert sizes[2] > 20 * sizes[0] > 0


OVERTAKEN = """
import atexit, time
atexit.register(time.sleep, 0.4)  # runs last: after the pipes have been closed
from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted.grammar_checker import GrammarChecker
GrammarChecker(lambda: time.sleep(0.2) or Vocabulary("", 0, (), 0)).warm()
"""


def test_a_program_that_ends_at_once_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OVERTAKEN], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
