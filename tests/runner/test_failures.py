"""Tests of translating torch's errors to those of the engine core; the tests make the errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.errors import DeviceLostError
from infer.runner.device_errors import translated
from infer.runner.model_runner import ModelRunner

ILLEGAL = "CUDA error: an illegal memory access was encountered"
CASES = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), MemoryError),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), MemoryError),
    (torch.AcceleratorError(ILLEGAL), DeviceLostError),
    (torch.AcceleratorError("CUDA error: unspecified launch failure"), DeviceLostError),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case)[:40])
def test_an_error_of_torch_is_translated(error: RuntimeError, kind: type) -> None:
    got = translated(error)
    assert type(got) is kind
    assert str(error) in str(got)


def test_any_other_error_stays_as_it_is() -> None:
    """The text of an error does not matter: this one mentions memory, but the device works."""
    error = RuntimeError("view size is not compatible with input tensor's memory format")
    assert translated(error) is error


@pytest.mark.parametrize(("error", "kind"), CASES, ids=lambda case: str(case)[:40])
def test_a_runner_translates(
    error: RuntimeError, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(self: Any, plan: Any) -> Any:
        raise error

    monkeypatch.setattr(ModelRunner, "_execute", execute)
    cpu = torch.device("cpu")
    nothing: Any = None
    runner = ModelRunner(nothing, nothing, None, [torch.zeros((1, 16, 1, 1))], cpu)
    with pytest.raises(kind) as caught:
        runner.execute(())
    assert caught.value.__cause__ is error
