"""Tests of the thread that computes steps."""

from __future__ import annotations

import gc
import threading
from functools import partial

import numpy as np
import pytest

from infer.runner.step_thread import Computed, HostFlight, StepThread
from infer.schedule.sequence import Sampled


def sampled(token: int) -> Computed:
    return Computed.of([Sampled(token)])


def tokens(flight: HostFlight) -> list[int]:
    return [result.token_id for result in flight.results()]


def test_steps_are_computed_in_order_and_get_the_tokens_before() -> None:
    def add(number: int, flight: HostFlight, before: np.ndarray) -> Computed:
        return sampled(int(before.sum()) + number)

    thread, flights = StepThread("test-steps"), list[HostFlight]()
    for number in range(20):
        flights.append(HostFlight(partial(add, number), flights[-1] if flights else None))
        thread.give(flights[-1])
    assert [tokens(flight) for flight in flights] == [[n * (n + 1) // 2] for n in range(20)]
    assert all((flight.elapsed_ms() or 0) > 0 for flight in flights)


def test_what_a_step_raises_is_raised_for_its_results_and_for_those_behind() -> None:
    def fail(flight: HostFlight, before: np.ndarray) -> Computed:
        raise MemoryError("on purpose")

    thread = StepThread("test-steps")
    first = HostFlight(fail, None)
    second = HostFlight(lambda flight, before: sampled(1), first)
    third = HostFlight(lambda flight, before: sampled(2), None)
    for flight in (first, second, third):
        thread.give(flight)
    with pytest.raises(MemoryError, match="on purpose"):
        first.results()
    with pytest.raises(RuntimeError, match="before has failed"):
        second.results()
    assert tokens(third) == [2]


def test_results_are_given_once_the_step_behind_is_with_the_kernels() -> None:
    entered, kernels = threading.Event(), threading.Event()

    def enters(flight: HostFlight, before: np.ndarray) -> Computed:
        entered.wait()
        flight.enter_kernels()
        kernels.wait()
        return sampled(8)

    thread = StepThread("test-steps")
    first = HostFlight(lambda flight, before: sampled(7), None)
    second = HostFlight(enters, first)
    thread.give(first)
    thread.give(second)
    assert first.wait()
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(tokens(first)))
    reader.start()
    assert not found
    entered.set()
    reader.join()
    assert found == [[7]]
    assert not second.wait(0.0)
    kernels.set()
    assert tokens(second) == [8]


def test_the_thread_ends_with_the_object() -> None:
    thread = StepThread("test-steps-that-end")
    thread.give(flight := HostFlight(lambda flight, before: sampled(0), None))
    flight.results()
    (found,) = [each for each in threading.enumerate() if each.name == "test-steps-that-end"]
    del thread
    gc.collect()
    found.join(10)
    assert not found.is_alive()
