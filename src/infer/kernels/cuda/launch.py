"""`launch` starts a Triton kernel; inside `compiled_together` it is compiled instead."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

MAX_THREADS = 8
"""Maximum number of threads that compile. Each has as many helpers of its own as there are cores
(MLIR's thread pool), nearly always idle."""

_compiles_only: ContextVar[bool] = ContextVar("_compiles_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`, to be called with the kernel's arguments.

    Triton compiles a kernel when it is first launched, which takes a second or more. The kernels of
    this project are launched one after the other, so an engine's first start would compile them one
    after the other, too. Inside `compiled_together` nothing is launched. All kernels that would
    have been are compiled by several threads, and later launches find them compiled.
    """
    if _compiles_only.get():
        return partial(kernel.warmup, grid=grid)
    return kernel[grid]  # type: ignore[no-any-return]


@contextmanager
def compiled_together() -> Iterator[None]:
    """A context in which this thread's launches only compile; at its end all are compiled.

    Tensors that kernels would have written keep what they have. The first error of a compilation is
    raised at the end.
    """
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    token = _compiles_only.set(True)
    try:
        with (
            _parsed_in_turn(),
            ThreadPoolExecutor(threads, "compile") as pool,
            triton.AsyncCompileMode(pool),
        ):
            yield
    finally:
        _compiles_only.reset(token)


@contextmanager
def _parsed_in_turn() -> Iterator[None]:
    """A context in which one thread at a time parses a kernel's source.

    CPython 3.11 raises `SystemError` now and then where two do (gh-106905). It takes milliseconds.
    """
    real, lock = triton.JITFunction.parse, threading.Lock()

    def parse(kernel: Any) -> Any:
        with lock:
            return real(kernel)

    triton.JITFunction.parse = parse
    try:
        yield
    finally:
        triton.JITFunction.parse = real
