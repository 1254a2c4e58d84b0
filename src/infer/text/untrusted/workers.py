"""`UntrustedWorkers`: a few processes that work on untrusted text, shared fairly between owners."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from infer.errors import InferError, OverloadedError
from infer.fair_queue import FairQueue
from infer.text.untrusted.process import WorkerProcess
from infer.text.untrusted.worker import HEAD, OUT_OF_TIME, decoded, encoded

log = logging.getLogger(__name__)
T = TypeVar("T")

NUM_WORKERS = 2
"""Number of processes: one owner's long job leaves one to all others."""
PREPARE_S = 120.0
"""Maximum time for a process to start and to be prepared, in seconds."""
PREPARE_CPU_S = 100
"""Maximum CPU time of preparing, in seconds, where the kind has no other limit."""
DEADLINE_S = 30.0
"""Maximum time of a job in seconds; its CPU time ends it sooner unless the CPU is busy."""
MAX_WAITING = 1024
"""Maximum number of jobs that wait; beyond it an owner who has none may have one."""

Death = Literal["", "cpu", "memory", "deadline", "killed", "crash"]
"""Why a process has ended: too much CPU time, too much memory, too much time, by somebody else, of
a fault; "": it has not."""
_LASTING: frozenset[Death] = frozenset({"", "cpu", "memory", "crash"})


class Answer(NamedTuple):
    """The answer to a job."""

    body: bytes
    """The message of the process; b"" if it has died."""
    death: Death = ""
    cpu_s: float = 0.0
    """CPU time of the job, in seconds; the limit, if the process has died."""

    @classmethod
    def of(cls, value: Any) -> Answer:
        """An answer that was known and has taken no time."""
        return cls(encoded(0.0, value)[HEAD.size :])

    @property
    def is_lasting(self) -> bool:
        """Whether the same job will have the same answer again."""
        return self.death in _LASTING

    @property
    def value(self) -> Any:
        """The answer's value; None if the process has died."""
        return decoded(self.body) if self.body else None


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One job of an `UntrustedWorkers`, which makes it."""

    workers: UntrustedWorkers
    message: bytes
    cpu_s: int
    deadline_s: float
    recall: Callable[[], Answer | None] | None = None
    """Finds the answer in a memory when it is the job's turn."""
    remember: Callable[[Answer], object] | None = None
    """Receives the answer before the next job begins; called in a thread."""


Steps = Generator[Job, Answer, T]
"""Work that yields jobs, gets their answers, and returns a T. Who runs it decides how to wait."""


def run_steps(steps: Steps[T]) -> T:
    """Run `steps` to their end, and block while jobs are worked on."""
    try:
        job = next(steps)
        while True:
            try:
                answer = job.workers.submit(job).result()
            except InferError as error:
                job = steps.throw(error)
            else:
                job = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class _Place:
    """A place for one process, which may be empty."""

    process: WorkerProcess | None = None


class _Queued(NamedTuple):
    job: Job
    result: Future[Answer]


class UntrustedWorkers:
    """A job waits in a queue in which owners take turns, and no owner has all processes
    (`FairQueue`). A thread of the pool talks to the process; who waits for the answer needs none.
    If a process dies of a job, that job's answer says so, and another process is started at once,
    so that the next job finds it warm. Any thread may call it. Processes start when they are
    needed."""

    def __init__(
        self,
        kind: str,
        prepare: Callable[[], Any],
        num_workers: int = NUM_WORKERS,
        *,
        prepare_cpu_s: int = PREPARE_CPU_S,
    ) -> None:
        """`kind`: see `text.untrusted.worker`; `prepare` makes the value of a process's first
        job, and `prepare_cpu_s` is the CPU time of that job."""
        self.kind = kind
        self.num_workers = num_workers
        self.num_deaths = 0
        """Number of times that a process has died of a job."""
        self._prepare = prepare
        self._prepare_cpu_s = prepare_cpu_s
        self._threads = ThreadPoolExecutor(num_workers, f"infer-{kind}")
        self._lock = threading.Lock()
        self._queue: FairQueue[_Queued] = FairQueue(num_workers)
        self._idle = [_Place() for _ in range(num_workers)]
        self._places = tuple(self._idle)
        self._is_closed = False
        self._num_rests = 0

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that there are at the moment."""
        processes = [place.process for place in self._places]
        return [process.pid for process in processes if process is not None]

    @property
    def num_warm(self) -> int:
        """Number of processes that are prepared."""
        processes = [place.process for place in self._places]
        return sum(process is not None and process.is_prepared for process in processes)

    def num_open(self, owner: str) -> int:
        """Number of jobs of an owner that wait or are worked on."""
        with self._lock:
            return self._queue.num_open(owner)

    def job(
        self,
        value: Any,
        cpu_s: int,
        deadline_s: float = DEADLINE_S,
        *,
        recall: Callable[[], Answer | None] | None = None,
        remember: Callable[[Answer], object] | None = None,
    ) -> Job:
        """A job. `cpu_s`: limit of its CPU time in seconds; `deadline_s`: of its time.

        Raises `ValueError` or `RecursionError` for a value that JSON lacks.
        """
        return Job(self, encoded(cpu_s, value), cpu_s, deadline_s, recall, remember)

    def lasting(self, answer: Answer) -> Answer:
        """An answer that the same job will have again. Raises `OverloadedError` for another: the
        machine gave its process no time, or something outside has ended it."""
        if not answer.is_lasting:
            raise _overloaded(self.kind)
        return answer

    def submit(self, job: Job, owner: str = "") -> Future[Answer]:
        """Work on a job of an owner; the result is an `Answer`, also if a process dies.

        Raises `OverloadedError` if the pool is closed or too many jobs wait; the result has one if
        no process can be prepared.
        """
        result: Future[Answer] = Future()
        with self._lock:
            is_full = len(self._queue) >= MAX_WAITING
            if self._is_closed or (is_full and (not owner or self._queue.num_open(owner))):
                raise _overloaded(self.kind)
            self._queue.put(owner, _Queued(job, result))
            self._start_jobs()
        return result

    def warm(self) -> None:
        """Start all processes, and prepare them in the background."""
        with self._lock:
            while self._idle and not self._is_closed:
                place = self._idle.pop()
                if place.process is None:
                    place.process = WorkerProcess(self.kind)
                self._threads.submit(self._warm, place)

    def first_answer(self) -> Answer:
        """Prepare a process, and return the answer to its first job.

        To be called before any other job. Raises `OverloadedError` if it cannot be started.
        """
        with self._lock:
            if self._is_closed or not self._idle:
                raise _overloaded(self.kind)
            place = self._idle.pop()
        try:
            return self._prepared(place) or Answer(b"")
        finally:
            self._free(place)

    def rest(self) -> None:
        """End the processes until there is another job. Jobs that wait or are worked on fail with
        an `OverloadedError`."""
        self._end_all(is_closing=False)

    def close(self) -> None:
        """End the processes; like `rest`, and for ever."""
        self._end_all(is_closing=True)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _end_all(self, *, is_closing: bool) -> None:
        with self._lock:
            self._is_closed |= is_closing
            self._num_rests += 1
            waiting = self._queue.drain()
            idle, self._idle = self._idle, []
        for queued in waiting:
            if queued.result.set_running_or_notify_cancel():
                queued.result.set_exception(_overloaded(self.kind))
        for place in self._places:
            if place in idle:
                self._end(place)
            elif (process := place.process) is not None:
                process.kill()
        with self._lock:
            self._idle += idle
            if not self._is_closed:
                self._start_jobs()

    # ---- with the lock

    def _start_jobs(self) -> None:
        while self._idle and (taken := self._queue.take()) is not None:
            owner, queued = taken
            with_process = (i for i, place in enumerate(self._idle) if place.process is not None)
            place = self._idle.pop(next(with_process, -1))
            self._threads.submit(self._work, place, owner, queued, self._num_rests)

    # ---- in a thread of the pool, which alone has the place

    def _work(self, place: _Place, owner: str, queued: _Queued, num_rests: int) -> None:
        try:
            if queued.result.set_running_or_notify_cancel():
                try:
                    queued.result.set_result(self._remembered(place, queued.job, num_rests))
                except BaseException as error:
                    queued.result.set_exception(error)
        finally:
            if place.process is None and num_rests == self._num_rests:
                self._warm_again(place)
            self._free(place, owner)

    def _warm(self, place: _Place) -> None:
        self._warm_again(place)
        self._free(place)

    def _warm_again(self, place: _Place) -> None:
        # ValueError: the interpreter is ending and has closed the pipes.
        with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError, OverloadedError):
            self._prepared(place)

    def _free(self, place: _Place, owner: str | None = None) -> None:
        with self._lock:
            if owner is not None:
                self._queue.done(owner)
            if not self._is_closed:
                self._idle.append(place)
                self._start_jobs()
                return
        self._end(place)

    def _remembered(self, place: _Place, job: Job, num_rests: int) -> Answer:
        answer = job.recall() if job.recall is not None else None
        if answer is None:
            answer = self._answer(place, job, num_rests)
            if job.remember is not None:
                job.remember(answer)
        return answer

    def _answer(self, place: _Place, job: Job, num_rests: int) -> Answer:
        for is_last in (False, True):
            if (first := self._prepared(place)) is not None and first.death:
                log.error("no process for untrusted text (%s): %s", self.kind, first.death)
                raise _overloaded(self.kind)
            answer = self._asked(place, job.message, job.cpu_s, job.deadline_s)
            # Other deaths may have another cause than the job, so it is tried once more.
            if is_last or answer.death not in ("killed", "crash"):
                break
            if num_rests != self._num_rests:
                raise _overloaded(self.kind)
        return answer

    def _prepared(self, place: _Place) -> Answer | None:
        """The answer to the first job of a new process; None if there is a prepared one."""
        if self._is_closed:
            raise _overloaded(self.kind)
        if place.process is None:
            place.process = WorkerProcess(self.kind)
        if place.process.is_prepared:
            return None
        message = encoded(self._prepare_cpu_s, self._prepare())
        return self._asked(place, message, self._prepare_cpu_s, PREPARE_S)

    def _asked(self, place: _Place, message: bytes, cpu_s: int, deadline_s: float) -> Answer:
        process = place.process
        assert process is not None
        started_s, was_prepared, is_late = time.monotonic(), process.is_prepared, False
        try:
            used_s, body = process.ask(message, deadline_s)
            return Answer(body, "", min(max(0.0, used_s), float(cpu_s)))
        except TimeoutError:
            is_late = True
        except (OSError, EOFError):
            pass
        status = self._end(place)
        if was_prepared:
            self.num_deaths += 1
            took_s = time.monotonic() - started_s
            ended = "a process for untrusted text (%s) has ended: status %s, %.1f s"
            log.warning(ended, self.kind, status, took_s)
        return Answer(b"", "deadline" if is_late else _death_of(status), float(cpu_s))

    def _end(self, place: _Place) -> int:
        process, place.process = place.process, None
        return 0 if process is None else process.end()


def _death_of(status: int) -> Death:
    if status == -OUT_OF_TIME:
        return "cpu"
    if status == -signal.SIGABRT:  # native allocators abort if there is no memory
        return "memory"
    # SIGXCPU: a limit that the server was started with, of all that the process does.
    outside = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGXCPU)
    return "killed" if status in outside else "crash"


def _overloaded(kind: str) -> OverloadedError:
    return OverloadedError(f"{_PLURALS[kind]} cannot be checked at the moment")


_PLURALS = {"grammar": "grammars", "template": "chat templates", "pattern": "patterns"}
