"""Tests of the processes for untrusted text: they are shared fairly, may die, and are replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from infer.errors import LoadError, OverloadedError, RequestError
from infer.text.untrusted.grammar_checker import MAX_KNOWN, GrammarChecker
from infer.text.untrusted.pattern_trial import try_patterns
from infer.text.untrusted.process import WorkerProcess
from infer.text.untrusted.worker import OUT_OF_TIME, encoded
from infer.text.untrusted.workers import Answer, Death, Job, UntrustedWorkers
from infer.types.grammar import Grammar
from tests.support.stopped import go_on, stop

LOOP = "{% for i in range(n) %}{% endfor %}{{ n }}"
"""A template whose work is a variable."""
NOW_S = 60.0


@pytest.fixture
def workers() -> Iterator[UntrustedWorkers]:
    workers = UntrustedWorkers("template", lambda: LOOP)
    assert workers.first_answer().value == {}
    yield workers
    workers.close()


def loop(workers: UntrustedWorkers, n: int, cpu_s: int = 5) -> Job:
    return workers.job(({"n": n}, 100), cpu_s)


def text_of(answer: Future[Answer]) -> Any:
    return answer.result(NOW_S).value["text"]


def test_an_owner_with_many_jobs_waits_only_for_its_own(workers: UntrustedWorkers) -> None:
    workers.warm()
    while workers.num_warm < workers.num_workers:
        time.sleep(0.01)
    ended: list[str] = []

    def submit(owner: str, length: int) -> Future[Answer]:
        job = workers.submit(loop(workers, length), owner)
        job.add_done_callback(lambda _: ended.append(owner))
        return job

    flood = [submit("a", 99_999) for _ in range(40)]
    others = [submit(owner, 1) for owner in "bc"]
    num_before = len(ended)
    wait(flood + others)
    assert [text_of(each) for each in others] == ["1", "1"]
    assert [text_of(each) for each in flood] == ["99999"] * 40
    for owner in "bc":  # behind those that have begun, and in turn with the next ones
        assert ended.index(owner) <= num_before + 2 * workers.num_workers + 3
    assert len(workers.pids) == workers.num_workers


def test_a_job_that_takes_too_much_cpu_time_ends_its_process_only(
    workers: UntrustedWorkers,
) -> None:
    [first] = workers.pids
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    busy = UntrustedWorkers("template", lambda: source)
    try:
        answer = busy.submit(busy.job(({}, 100), 1)).result(NOW_S)
        assert (answer.death, answer.body, answer.cpu_s) == ("cpu", b"", 1.0)
        assert answer.is_lasting
        assert busy.num_deaths == 1
    finally:
        busy.close()
    assert text_of(workers.submit(loop(workers, 5))) == "5"
    assert (workers.pids, workers.num_deaths) == ([first], 0)


def test_a_job_whose_process_is_killed_once_is_done_again(workers: UntrustedWorkers) -> None:
    [pid] = workers.pids
    stop(pid)
    answer = workers.submit(loop(workers, 7))
    os.kill(pid, signal.SIGKILL)
    assert text_of(answer) == "7"
    assert workers.num_deaths == 1


def test_a_process_that_does_not_answer_has_a_deadline(workers: UntrustedWorkers) -> None:
    [pid] = workers.pids
    stop(pid)
    long = workers.job(({"n": 1, "x": "x" * 3_000_000}, 100), 1, 0.1)  # more than a pipe holds
    answer = workers.submit(long).result(NOW_S)
    assert (answer.death, answer.is_lasting) == ("deadline", False)
    assert text_of(workers.submit(loop(workers, 7))) == "7"
    assert pid not in workers.pids


@pytest.mark.parametrize(
    ("death", "says"), [("cpu", "take too long for short texts"), ("deadline", "at the moment")]
)
@pytest.mark.parametrize("is_first", [True, False], ids=["of the file", "of the texts"])
def test_patterns_are_blamed_only_for_the_time_they_have_taken(
    monkeypatch: pytest.MonkeyPatch, death: Death, says: str, is_first: bool
) -> None:
    dead, alive = Answer(b"", death), Answer.of(True)
    done: Future[Answer] = Future()
    done.set_result(dead)
    monkeypatch.setattr(UntrustedWorkers, "first_answer", lambda _: dead if is_first else alive)
    monkeypatch.setattr(UntrustedWorkers, "submit", lambda _, job: done)
    with pytest.raises(LoadError, match=rf"^tokenizer\.json cannot be .*{says}$"):
        try_patterns(json.dumps({"pre_tokenizer": {"pattern": {"Regex": "a+"}}}))


def test_long_texts_and_lone_surrogates_pass() -> None:
    workers = UntrustedWorkers("template", lambda: "{{ x }}")
    try:
        for text in ("\ud800 é 😀 \0", "é" * 3_000_000):
            answer = workers.submit(workers.job(({"x": text}, 10**7), 5)).result(NOW_S)
            assert answer.value == {"text": text}
    finally:
        workers.close()


def test_at_rest_there_is_no_process_until_the_next_job(workers: UntrustedWorkers) -> None:
    [pid] = workers.pids
    workers.rest()
    assert workers.pids == []
    assert not Path(f"/proc/{pid}").exists()
    assert text_of(workers.submit(loop(workers, 3))) == "3"


def test_work_at_rest_ends_at_once(workers: UntrustedWorkers) -> None:
    [pid] = workers.pids
    stop(pid)
    working = workers.submit(loop(workers, 1))
    while not (working.running() or working.done()):
        time.sleep(0.001)
    workers.rest()
    with pytest.raises(OverloadedError):
        working.result(NOW_S)
    assert text_of(workers.submit(loop(workers, 2))) == "2"


def test_what_is_closed_takes_no_jobs(workers: UntrustedWorkers) -> None:
    job = loop(workers, 1)
    workers.close()
    with pytest.raises(OverloadedError, match="chat templates cannot be checked at the moment"):
        workers.submit(job)
    assert workers.pids == []


def test_it_gets_no_secrets_and_writes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    process = WorkerProcess("template")
    try:
        process.ask(encoded(5, LOOP), NOW_S)
        folder = Path(f"/proc/{process.pid}")
        assert b"secret" not in (folder / "environ").read_bytes()
        limits = (folder / "limits").read_text(encoding="utf-8")
        for name in ("Max file size", "Max core file size"):
            [line] = [line for line in limits.splitlines() if line.startswith(name)]
            assert line.removeprefix(name).split()[0] == "0"
    finally:
        process.end()


def test_no_limit_counts_the_time_of_earlier_jobs(workers: UntrustedWorkers) -> None:
    """The system's count of a process's time is some per cent away from what the process is told:
    beside it a job would end at once after two minutes of others, and its text be refused."""
    assert text_of(workers.submit(loop(workers, 1))) == "1"
    [pid] = workers.pids

    def limit(process: object) -> list[str]:
        lines = Path(f"/proc/{process}/limits").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("Max cpu time")]

    assert limit(pid) == limit("self")


def test_it_ends_with_its_owners_process() -> None:
    program = (
        "from infer.text.untrusted.workers import UntrustedWorkers\n"
        "workers = UntrustedWorkers('template', lambda: 'x')\n"
        "workers.warm()\n"
        "print(*workers.pids)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, encoding="utf-8", check=True, timeout=NOW_S,
    )  # fmt: skip
    assert done.stderr == ""
    assert not any(Path(f"/proc/{pid}").exists() for pid in done.stdout.split())


# ---- what the checker of grammars remembers


class Counted:
    """Counts the jobs that reach the processes, and answers them with what is given."""

    def __init__(self, checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_jobs = 0
        self.answer: Answer | None = None
        self._submit = checker.workers.submit
        monkeypatch.setattr(checker.workers, "submit", self.submit)

    def submit(self, job: Job, owner: str = "") -> Future[Answer]:
        self.num_jobs += 1
        if self.answer is None:
            return self._submit(job, owner)
        assert job.remember is not None
        job.remember(self.answer)
        result: Future[Answer] = Future()
        result.set_result(self.answer)
        return result


REFUSED = Grammar.regex("(")


def test_a_refusal_is_remembered(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(checker, monkeypatch)
    for _ in range(3):
        with pytest.raises(RequestError, match="regex"):
            checker.check(REFUSED)
    assert counted.num_jobs == 1


@pytest.mark.parametrize(
    ("death", "words", "num_jobs", "status"),
    [
        ("cpu", "3 s of CPU time", 1, 400),
        ("memory", "memory limit", 1, 400),
        ("crash", "cannot be compiled", 1, 400),
        ("deadline", "cannot be checked at the moment", 2, 503),
        ("killed", "cannot be checked at the moment", 2, 503),
    ],
)
def test_a_refusal_is_remembered_unless_its_cause_may_pass(
    checker: GrammarChecker,
    monkeypatch: pytest.MonkeyPatch,
    death: Any,
    words: str,
    num_jobs: int,
    status: int,
) -> None:
    counted = Counted(checker, monkeypatch)
    counted.answer = Answer(b"", death, 3.0)
    for _ in range(2):
        with pytest.raises(RequestError, match=words) as caught:
            checker.check(Grammar.choice(["a"]))
        assert caught.value.status == status
    assert counted.num_jobs == num_jobs


def test_grammars_that_wait_for_the_same_verdict_are_compiled_once(
    checker: GrammarChecker,
) -> None:
    """Six times the same one, which ends its process: it is the only one that does."""
    checker.check(Grammar.choice(["a"]))
    [pid] = checker.workers.pids
    stop(pid)
    steps = [checker.checking(Grammar.choice(["b"])) for _ in range(6)]
    answers = [checker.workers.submit(next(each), "a") for each in steps]
    assert not any(each.done() for each in answers)
    os.kill(pid, OUT_OF_TIME)
    go_on(pid)
    for each, answer in zip(steps, answers, strict=True):
        with pytest.raises(RequestError, match="3 s of CPU time"):
            each.send(answer.result(NOW_S))
    assert checker.workers.num_deaths == 1


def test_the_least_recently_used_is_forgotten_first(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(checker, monkeypatch)
    counted.answer = Answer.of(("", 5))
    grammars = [Grammar.choice([str(i)]) for i in range(MAX_KNOWN + 1)]
    for grammar in (*grammars[:-1], grammars[0], grammars[-1], grammars[0]):
        assert checker.check(grammar) == 5
    assert counted.num_jobs == MAX_KNOWN + 1
    checker.check(grammars[1])
    assert counted.num_jobs == MAX_KNOWN + 2
