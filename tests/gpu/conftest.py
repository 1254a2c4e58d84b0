"""Tests of what computes on a GPU. They run in two ways.

With `TRITON_INTERPRET=1` in the environment Triton's interpreter runs the kernels on the CPU, in
float32 and float16 and, where only loads are concerned, bfloat16. `test_interpreted.py` starts
such a run in a process of its own, because the variable counts when a kernel's module is imported.
Without the variable every test here is marked `gpu` and computes on a CUDA device.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.engine.build.hardware import make_products_invariant

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that it will change
WITHOUT_DEVICE = {"test_interpreted.py", "test_compiled.py"}
"""Files whose tests need neither a device nor the interpreter."""


def patch_language_once() -> None:
    """Replace the functions of Triton's language by interpreted ones once, for all kernels.

    The interpreter does it at each launch and, around what it has replaced already, at each call
    of one kernel's function by another: a quarter of its time, and calls within calls.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    replace, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    done: set[frozenset[int]] = set()

    def patch(function: Any) -> Any:
        used = frozenset(map(id, function.__globals__.values())) & languages
        if used not in done:
            done.add(used)
            replace(function)
        return nothing

    languages = frozenset(map(id, (interpreter.tl, interpreter.tl.core)))
    interpreter._patch_lang = patch


if INTERPRETED and importlib.util.find_spec("triton") is not None:
    patch_language_once()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing imports Triton where its tests cannot run or are not asked for."""
    if not collection_path.name.startswith("test_"):
        return None
    if collection_path.name in WITHOUT_DEVICE:
        return INTERPRETED or None
    is_asked_for = INTERPRETED or "not gpu" not in (config.getoption("markexpr") or "")
    return not is_asked_for or importlib.util.find_spec("triton") is None or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        # The rows that pad a step are NaN here, and the interpreter takes maxima by numpy's nanmax.
        # As an error its warning would fail every such launch, and the core would do without.
        harmless = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
        for item in items:
            item.add_marker(harmless)
        return
    has_device = torch.cuda.is_available()
    if has_device:
        make_products_invariant()  # counts before the first product only
    for item in items:
        if item.path.parent == HERE and item.path.name not in WITHOUT_DEVICE:
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, instead of whatever happens to lie there."""

    def poisoned(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **settings: Any) -> torch.Tensor:
            made = real(*args, **settings)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
