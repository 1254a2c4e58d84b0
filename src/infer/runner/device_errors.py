"""torch's errors in the terms of the engine core. Used by the runners."""

from __future__ import annotations

import torch

from infer.errors import DeviceLostError


def translated(error: RuntimeError) -> Exception:
    """torch's error in the core's terms: `MemoryError`, `DeviceLostError`, or as it is."""
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return MemoryError(str(error))
    if isinstance(error, torch.AcceleratorError):
        return DeviceLostError(f"the device does not compute any more: {error}")
    return error
