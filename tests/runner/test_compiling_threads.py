"""Tests of the threads that compile grammars, in which tenants take turns."""

from __future__ import annotations

import gc
import queue
import threading
import weakref

import pytest

from infer.runner.compiling_threads import CompilingThreads


class Work:
    """Work that ends when it may."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.may_end = name, log, threading.Event()

    def __call__(self) -> str:
        self.log.append(self.name)
        assert self.may_end.wait(30)
        return self.name


@pytest.mark.parametrize("tenant", ["a", ""])
def test_one_tenant_has_one_thread_and_others_the_other(tenant: str) -> None:
    threads = CompilingThreads()
    log: list[str] = []
    of_a, of_b = ([Work(f"{name}{i}", log) for i in range(3)] for name in "ab")
    results_a = [threads.submit(tenant, work) for work in of_a]
    results_b = [threads.submit("b", work) for work in of_b]
    for work, result in zip(of_b, results_b, strict=True):
        work.may_end.set()
        assert result.result(30) == work.name
    # No other than the first of a's has begun, which still runs.
    assert [name for name in log if name != "a0"] == ["b0", "b1", "b2"]
    for work in of_a:
        work.may_end.set()
    assert [result.result(30) for result in results_a] == ["a0", "a1", "a2"]


def test_an_error_is_the_results() -> None:
    def fail() -> None:
        raise KeyError("on purpose")

    threads = CompilingThreads()
    with pytest.raises(KeyError, match="on purpose"):
        threads.submit("a", fail).result(30)
    assert threads.submit("a", lambda: 1).result(30) == 1


def test_a_result_holds_nothing_of_its_work() -> None:
    threads, work = CompilingThreads(), Work("a", [])
    work.may_end.set()
    held = weakref.ref(work)
    gc.disable()  # without cycles, which any thread would free
    try:
        result = threads.submit("a", work)
        del work
        assert threads.submit("a", lambda: 1).result(30) == 1  # the thread has left the first
        assert held() is None
        assert result.result() == "a"
    finally:
        gc.enable()


def test_each_thread_frees_what_it_has_made() -> None:
    class Made:
        def __del__(self) -> None:
            freed.put(threading.get_ident())

    freed: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads, both = CompilingThreads(), threading.Barrier(2)

    def ident_of_thread() -> int:
        both.wait(30)
        return threading.get_ident()

    idents = [threads.submit(name, ident_of_thread) for name in "ab"]
    for ident in (*(each.result(30) for each in idents), threading.get_ident()):
        threads.free(ident, [Made()])
        assert freed.get(timeout=30) == ident
