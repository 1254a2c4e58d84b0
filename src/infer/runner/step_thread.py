"""`StepThread`: a thread that computes steps in order; `HostFlight`: a step that it computes"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch

from infer.schedule.sequence import Sampled
from infer.threads import BackgroundThread


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a step has sampled."""

    tokens: np.ndarray
    """For the step behind it, [R] int64; -1: the row is not finite."""
    results: Callable[[], list[Sampled]]
    """Makes the results, in the thread that wants them."""

    @classmethod
    def of(cls, results: list[Sampled]) -> Computed:
        """With results that are made already."""
        tokens = np.array([result.token_id for result in results], np.int64)
        return cls(tokens, lambda: results)


Compute = Callable[["HostFlight", np.ndarray], Computed]
"""Computes a step, given its flight and the tokens that the step before has sampled."""
_NO_TOKENS = np.empty(0, np.int64)


class HostFlight:
    """A step in flight on the CPU's kernels; see `engine.core.Flight`."""

    def __init__(self, compute: Compute, before: HostFlight | None) -> None:
        """`before`: the step whose tokens this one begins with."""
        self._compute: Compute | None = compute
        self._before, self._behind = before, list[HostFlight]()
        if before is not None:
            before._behind.append(self)
        # Locks that the thread releases: an event takes twice as long.
        self._waiting, self._running = Lock(), Lock()
        self._waiting.acquire()
        self._running.acquire()
        self._computed: Computed | None = None
        self._error: BaseException | None = None
        self._took_ms: float | None = None

    def run(self) -> None:
        """Compute the step; called by the thread. Nothing is raised here."""
        before, compute = self._before, self._compute
        self._before = self._compute = None  # else each step would keep all those before it
        began_s = time.perf_counter()
        try:
            assert compute is not None, "a step is computed once"
            if before is not None and before._error is not None:
                raise RuntimeError("the step before has failed")
            earlier = None if before is None else before._computed
            self._computed = compute(self, _NO_TOKENS if earlier is None else earlier.tokens)
        except BaseException as error:
            self._error = error
        self._took_ms = 1000 * (time.perf_counter() - began_s)
        self.enter_kernels()
        self._running.release()

    def enter_kernels(self) -> None:
        """Say that the step's thread does not need the interpreter for a while."""
        if self._waiting.locked():
            self._waiting.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the step has ended, or for `timeout_s` seconds; returns whether it has."""
        if ended := self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._running.release()
        return ended

    def results(self) -> list[Sampled]:
        """Wait for the step; one result per chunk that samples, in the plan's order. Raises what
        the computation raised.

        If another step comes behind it, this waits until that one is with the kernels: whoever
        needs the interpreter between two steps makes the cores wait."""
        if behind := self._behind:
            behind[0]._waiting.acquire()
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._computed is not None, "a step that has ended without an error has results"
        return self._computed.results()

    def elapsed_ms(self) -> float | None:
        """Time that the step took, in milliseconds; None before it has ended."""
        return self._took_ms


class StepThread:
    """The kernels release the interpreter's lock, so the thread that gives steps schedules and
    packs the next one meanwhile. Each step begins as soon as the one before has ended. The thread
    is started with the first step. It ends with the object that uses it, or with the interpreter.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._name = name
        self._flights: queue.SimpleQueue[HostFlight | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        weakref.finalize(self, self._flights.put, None)

    def give(self, flight: HostFlight) -> None:
        """Have a step computed when those before it have been."""
        if self._thread is None:
            flights, num_threads = self._flights, torch.get_num_threads()
            self._thread = BackgroundThread(
                lambda: _work(flights, num_threads), lambda: flights.put(None), self._name
            )
            self._thread.start()
        self._flights.put(flight)


def _work(flights: queue.SimpleQueue[HostFlight | None], num_threads: int) -> None:
    """The thread's work. `num_threads`: torch's number of threads, which each thread has for
    itself."""
    torch.set_num_threads(num_threads)
    while (flight := flights.get()) is not None:
        flight.run()
        del flight
