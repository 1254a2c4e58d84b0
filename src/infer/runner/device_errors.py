"""Translating torch's errors to those that the engine core handles; the runners use it."""

from __future__ import annotations

import torch

from infer.errors import DeviceLostError


def translated(error: RuntimeError) -> Exception:
    """The error that the engine core handles: `MemoryError`, `DeviceLostError`, or `error`."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return MemoryError(str(error))
    if isinstance(error, torch.AcceleratorError):
        return DeviceLostError(f"the device has failed: {error}")
    return error
